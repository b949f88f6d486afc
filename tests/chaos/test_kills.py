"""Real processes killed with SIGKILL; nothing may be lost, nothing may run twice to completion."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system import FINAL, System

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all of these: `up` brings back what a test has killed."""
    home = tmp_path_factory.mktemp("chaos")
    with System(home, time_scale=0.2, FAULT=f"@{home}/fault") as running:
        yield running


def journal(path: Path, job_id: str | None = None) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if job_id in (None, line["job"])]


def attempt_of(system: System, job_id: str) -> dict[str, Any]:
    return system.get(f"jobs/{job_id}/attempts/")[-1]


def steps_after(path: Path, job_id: str, count: int, timeout: float = 20) -> None:
    """Wait until the job has journaled `count` steps."""
    deadline = time.monotonic() + timeout
    while sum(line["event"] == "step" for line in journal(path, job_id)) < count:
        assert time.monotonic() < deadline, f"{journal(path, job_id)}"
        time.sleep(0.02)


def wait_until(holds: Callable[[], bool], otherwise: str, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def check(system: System, path: Path, jobs: list[str]) -> None:
    """The checker: every job ended, each ran to its end once, cards never shared, no lease without its attempt."""
    for job_id in jobs:
        assert system.job(job_id)["status"] in FINAL
        assert sum(line["event"] == "end" for line in journal(path, job_id)) <= 1
    runs: dict[tuple[str, int], list[float]] = {}
    for line in journal(path):
        for card in line["cards"]:
            runs.setdefault((card, line["pid"]), []).append(line["at"])
    spans = sorted((card, min(at), max(at)) for (card, _), at in runs.items())
    for (card, _, end), (other, begin, _) in itertools.pairwise(spans):
        assert card != other or begin >= end, f"two works on {card} at once"
    system.wait_for_free_cards()


def test_it_goes_on_when_the_worker_is_killed(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=1, steps=60, journal=str(path))
    steps_after(path, job["id"], 3)
    before = attempt_of(rig, job["id"])
    rig.kill("worker")
    done = rig.wait(job["id"])
    assert done["status"] == "succeeded"
    assert done["attempt"] == 1
    assert attempt_of(rig, job["id"])["work_pid"] == before["work_pid"]
    assert {line["pid"] for line in journal(path)} == {before["work_pid"]}
    check(rig, path, [job["id"]])
    # and the next job finds a worker again
    assert rig.wait(rig.submit("rehearsal", steps=1)["id"])["status"] == "succeeded"


def test_it_resumes_from_the_checkpoint_when_the_work_is_killed(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=1, steps=60, checkpoint_every=5, journal=str(path))
    steps_after(path, job["id"], 12)
    os.kill(attempt_of(rig, job["id"])["work_pid"], signal.SIGKILL)
    killed_at = time.time()
    done = rig.wait(job["id"])
    starts = [line for line in journal(path) if line["event"] == "start"]
    assert done["status"] == "succeeded"
    assert [a["outcome"] for a in done["attempts"]] == ["lost", "ended"]
    assert starts[1]["at"] - killed_at < 15
    assert starts[1]["step"] >= 10
    assert done["attempts"][0]["exit_status"] == -signal.SIGKILL
    check(rig, path, [job["id"]])


def test_it_takes_over_when_the_keeper_is_killed(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=1, steps=60, checkpoint_every=5, journal=str(path))
    steps_after(path, job["id"], 12)
    attempt = attempt_of(rig, job["id"])
    os.kill(attempt["keeper_pid"], signal.SIGKILL)
    killed_at = time.time()
    done = rig.wait(job["id"])
    assert done["status"] == "succeeded"
    starts = [line for line in journal(path) if line["event"] == "start"]
    assert starts[1]["at"] - killed_at < 15
    assert starts[1]["step"] >= 10
    assert not Path(f"/proc/{attempt['work_pid']}").exists()
    check(rig, path, [job["id"]])


def test_it_runs_all_when_the_broker_forgets_everything(rig: System, tmp_path: Path) -> None:
    import redis

    path = tmp_path / "journal"
    jobs = [rig.submit("rehearsal", steps=2, journal=str(path))["id"] for _ in range(10)]
    redis.Redis.from_url(broker_url(rig)).flushall()
    for job_id in jobs:
        assert rig.wait(job_id)["status"] == "succeeded"
    check(rig, path, jobs)


def broker_url(system: System) -> str:
    from mistudio import home

    return home.broker_url(system.home)


def test_it_takes_jobs_while_the_broker_is_down(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    broker = rig.pid("broker")
    os.kill(broker, signal.SIGKILL)
    began = time.monotonic()
    job = rig.submit("rehearsal", steps=2, journal=str(path))
    assert time.monotonic() - began < 3
    assert rig.wait(job["id"], timeout=60)["status"] == "succeeded"
    check(rig, path, [job["id"]])


POINTS = (
    "granted",
    "claimed",
    "work_recorded",
    "before_running",
    "running",
    "end_written",
    "moved",
    "final",
    "lease_ended",
)


@pytest.mark.parametrize("point", POINTS)
def test_it_survives_an_end_at(rig: System, tmp_path: Path, point: str) -> None:
    """The process ends at a named point, as a power cut would end it; the job still ends once."""
    path, fault = tmp_path / "journal", Path(rig.env["FAULT"][1:])
    fault.write_text(point)
    job = rig.submit("rehearsal", gpu=0, steps=3, checkpoint_every=1, journal=str(path))
    done = rig.wait(job["id"], timeout=40)
    wait_until(lambda: not fault.exists(), f"{point} never struck")
    assert done["status"] == "succeeded", (point, done["error"])
    rig.wait_for_free_cards()
    # A job that died after its last step, before its end was written, runs the end again: never a second result.
    assert len(done["artifacts"]) == 1


def test_it_ends_a_job_that_is_lost_three_times_without_progress(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=1000, journal=str(path))
    for attempt in (1, 2, 3):
        deadline = time.monotonic() + 20
        while (row := rig.job(job["id"]))["attempt"] < attempt or row["status"] != "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(attempt_of(rig, job["id"])["work_pid"], signal.SIGKILL)
        time.sleep(0.3)
    ended = rig.wait(job["id"])
    assert (ended["status"], ended["failure_reason"]) == ("failed", "lost")
    assert all(f"attempt {number} at " in ended["error"] for number in (1, 2, 3)), ended["error"]
    assert ended["error"].count("the work was ended by SIGKILL") == 3


def test_it_ends_its_services_within_15_seconds_and_no_job(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=100, journal=str(path))
    rig.wait(job["id"], "running")
    assert rig.stop() < 15
    assert f"goes on: rehearsal {job['id'].replace('-', '')[-6:]}" in (rig.home / "up.log").read_text()
    rig.start()
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 1)
    check(rig, path, [job["id"]])

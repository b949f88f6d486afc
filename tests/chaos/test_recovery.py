"""Recovery row by row: reboots, doorbells doubled, lost and late, ends that nobody carried out, every crash point."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from mistudio import home as homes
from tests.chaos.test_kills import attempt_of, check, journal, steps_after, wait_until
from tests.system import ROOT, System

pytestmark = pytest.mark.chaos
POINTS = (
    "granting", "granted", "claimed", "work_recorded", "before_running", "running", "end_written", "moved", "final",
    "lease_ended", "handing_over", "handed_over",
)  # fmt: skip


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    home = tmp_path_factory.mktemp("recovery")
    with System(home, time_scale=0.2, FAULT=f"@{home}/fault") as running:
        yield running


def ring(rig: System, job_id: str, attempt: int, times: int) -> None:
    """Put the doorbell of an attempt into its queue, so often."""
    code = (
        "from jobs import tasks\n"
        f"for _ in range({times}): tasks.run_job.apply_async(args=['{job_id}', {attempt}], queue='gpu.testhost')"
    )
    subprocess.run([sys.executable, "manage.py", "shell", "-c", code], cwd=ROOT, env=rig.env, check=True)


def forget_all_messages(rig: System) -> None:
    redis.Redis.from_url(homes.broker_url(rig.home)).flushall()


def books_balance(rig: System) -> bool:
    """Open leases are those of open attempts, one for one, and every open attempt is its job's latest."""
    held = rig.rows("SELECT DISTINCT attempt_id FROM jobs_lease WHERE ended_at IS NULL")
    living = rig.rows(
        "SELECT a.id FROM jobs_attempt a JOIN jobs_job j ON j.id = a.job_id AND j.attempt = a.number"
        " WHERE a.ended_at IS NULL AND j.status IN ('starting', 'running')"
    )
    return sorted(held) == sorted(living)


def test_every_crash_point_in_a_loop_loses_and_doubles_nothing(rig: System, tmp_path: Path) -> None:
    """Three jobs in flight at each point: one that the fault strikes, two beside it."""
    path, fault, jobs = tmp_path / "journal", Path(rig.env["FAULT"][1:]), []
    for point in POINTS:
        fault.write_text(point)
        first = {"hand_over_at": 2} if point.startswith("hand") else {}
        batch = [
            rig.submit("rehearsal", gpu=n, steps=4, checkpoint_every=1, journal=str(path), **first)["id"]
            for n in range(3)
        ]
        jobs += batch
        for job_id in batch:
            done = rig.wait(job_id, timeout=60)
            assert done["status"] == "succeeded", (point, done["error"])
            assert len(done["artifacts"]) == 1, point
        wait_until(lambda: not fault.exists(), f"{point} never struck")
        wait_until(lambda: books_balance(rig), f"after {point}: {rig.open_leases()}", timeout=20)
    statuses = rig.rows("SELECT status, count(*) FROM jobs_job GROUP BY status")
    assert statuses == [("succeeded", len(jobs))]
    rig.wait_for_free_cards()
    assert not rig.rows("SELECT id FROM jobs_attempt WHERE ended_at IS NULL")


def test_a_doorbell_rung_fifty_times_starts_one_keeper(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    worker = rig.pid("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        job = rig.submit("rehearsal", gpu=0, steps=3, journal=str(path))
        wait_until(lambda: rig.job(job["id"])["status"] == "starting", "never granted")
        ring(rig, job["id"], 1, times=50)
    finally:
        os.kill(worker, signal.SIGCONT)
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 1)
    assert len([line for line in journal(path) if line["event"] == "start"]) == 1
    check(rig, path, [job["id"]])


def test_a_lost_doorbell_is_rung_again(rig: System, tmp_path: Path) -> None:
    worker = rig.pid("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        job = rig.submit("rehearsal", gpu=0, steps=1)
        wait_until(lambda: rig.job(job["id"])["status"] == "starting", "never granted")
        forget_all_messages(rig)
    finally:
        os.kill(worker, signal.SIGCONT)
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 1)


def test_a_doorbell_that_comes_late_finds_nothing_to_do(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=2, journal=str(path))
    rig.wait(job["id"])
    rig.wait_for_free_cards()
    done = rig.job(job["id"])
    for attempt in (1, 2):  # of the attempt that ended, and of one that never was
        ring(rig, job["id"], attempt, times=3)
    time.sleep(1.5)
    assert rig.job(job["id"]) == done
    assert len(journal(path)) == 4  # start, two steps, end
    assert not any(job["id"] in command and "keeper" in command for _, command in rig.ours())


def test_an_end_that_was_written_is_adopted_when_work_and_keeper_are_gone(
    rig: System, tmp_path: Path
) -> None:
    """The work dies right after `end.json`; its keeper, stopped before, is killed: recovery carries the end out."""
    path, fault = tmp_path / "journal", Path(rig.env["FAULT"][1:])
    job = rig.submit("rehearsal", gpu=0, steps=30, journal=str(path))
    steps_after(path, job["id"], 2)
    attempt = attempt_of(rig, job["id"])
    os.kill(attempt["keeper_pid"], signal.SIGSTOP)
    fault.write_text("end_written")
    wait_until(lambda: not fault.exists(), "the end was never written", timeout=20)
    assert rig.job(job["id"])["status"] == "running"
    os.kill(attempt["keeper_pid"], signal.SIGKILL)
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 1)
    assert [a["outcome"] for a in done["attempts"]] == ["ended"]
    assert len(done["artifacts"]) == 1
    check(rig, path, [job["id"]])


def test_a_killed_child_is_lost_within_a_heartbeat_and_the_next_two_run_g42(
    rig: System, tmp_path: Path
) -> None:
    """SIGKILL of the child of a running job, as the OOM killer sends it; two more are queued for the card."""
    path = tmp_path / "journal"
    first = rig.submit("rehearsal", gpu=0, steps=40, checkpoint_every=5, journal=str(path))
    steps_after(path, first["id"], 6)
    others = [rig.submit("rehearsal", gpu=0, steps=1, journal=str(path))["id"] for _ in range(2)]
    os.kill(attempt_of(rig, first["id"])["work_pid"], signal.SIGKILL)
    wait_until(
        lambda: rig.get(f"jobs/{first['id']}/attempts/")[0]["outcome"] == "lost",
        "not lost in time",
        timeout=5,
    )
    for job_id in (first["id"], *others):
        assert rig.wait(job_id)["status"] == "succeeded"
    check(rig, path, [first["id"], *others])
    assert rig.open_leases() == []


def test_a_reboot_ends_attempts_as_lost_once_and_touches_nobody(rig: System, tmp_path: Path) -> None:
    """The power goes: services and jobs are gone, and the host comes back with another boot id. The pids that
    were recorded belong to somebody else now."""
    path = tmp_path / "journal"
    jobs = [
        rig.submit("rehearsal", gpu=n, steps=200, checkpoint_every=2, journal=str(path))["id"]
        for n in range(3)
    ]
    for job_id in jobs:
        steps_after(path, job_id, 6)
    rig.stop()
    rig.end_keepers()
    canary = subprocess.Popen(["sleep", "600"])
    with sqlite3.connect(rig.home / "db.sqlite3") as database:
        database.execute(
            "UPDATE jobs_attempt SET boot_id = 'before', keeper_pid = ?, work_pid = ? WHERE ended_at IS NULL",
            (canary.pid, canary.pid),
        )
    began = time.monotonic()
    rig.start()
    for job_id in jobs:
        done = rig.wait(job_id, timeout=60)
        assert done["status"] == "succeeded"
        assert [a["outcome"] for a in done["attempts"]] == ["lost", "ended"]
        assert [line["step"] for line in journal(path, job_id) if line["event"] == "start"][1] >= 4
    assert canary.poll() is None, "somebody else's process was signalled"
    canary.kill()
    canary.wait()
    check(rig, path, jobs)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_three_reboots_do_not_count_as_losses(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=150, journal=str(path))
    for attempt in (1, 2, 3):
        wait_until(lambda n=attempt: rig.job(job["id"])["attempt"] == n, "not started again", timeout=20)
        wait_until(lambda: rig.job(job["id"])["status"] == "running", "not running", timeout=20)
        rig.stop()
        rig.end_keepers()
        with sqlite3.connect(rig.home / "db.sqlite3") as database:
            database.execute("UPDATE jobs_attempt SET boot_id = 'before' WHERE ended_at IS NULL")
        rig.start()
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 4)

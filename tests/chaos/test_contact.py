"""The database is away: for all, and nothing stops; or for one host of two, which stops before the other goes on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_kills import attempt_of, check, journal, steps_after, wait_until
from tests.postgres import BINARIES, Cluster, Wire
from tests.system import System

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BINARIES, reason="PostgreSQL is not installed"),
]
AWAY_SECONDS = 120


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


def steps_of(path: Path, job_id: str) -> list[dict[str, Any]]:
    return [line for line in journal(path, job_id) if line["event"] == "step"]


def test_a_database_away_for_two_minutes_stops_and_doubles_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Real clocks. One job ends while it is away, one goes on beyond, one was told to pause a moment before."""
    path = tmp_path / "journal"
    with System(tmp_path / "home", time_scale=1, cluster=cluster) as rig:
        lengths = {"ends": 600, "beyond": 1800, "pauses": 1800, "waits": 20}  # steps of 0.1 s
        jobs = {
            name: rig.submit(
                "rehearsal", gpu=min(n, 2), steps=steps, seconds_per_step=0.1, journal=str(path)
            )["id"]
            for n, (name, steps) in enumerate(lengths.items())
        }
        for name in ("ends", "beyond", "pauses"):
            steps_after(path, jobs[name], 30, timeout=60)
        works = {name: attempt_of(rig, jobs[name])["work_pid"] for name in ("ends", "beyond")}
        assert rig.call("POST", f"jobs/{jobs['pauses']}/pause/")[0] == 202
        cluster.stop()
        gone_at = time.time()
        time.sleep(AWAY_SECONDS)
        during = [line for line in steps_of(path, jobs["beyond"]) if line["at"] > gone_at]
        assert len(during) > 0.9 * AWAY_SECONDS / 0.1  # it computed on
        back_at = time.time()
        cluster.start()
        rig.wait(jobs["pauses"], "paused", timeout=60)
        for name in ("ends", "beyond"):
            done = rig.wait(jobs[name], timeout=150)
            assert (done["status"], done["attempt"]) == ("succeeded", 1), done["error"]
            assert {line["pid"] for line in journal(path, jobs[name])} == {works[name]}
        [ended] = [line["at"] for line in journal(path, jobs["ends"]) if line["event"] == "end"]
        assert gone_at < ended < back_at
        assert rig.call("POST", f"jobs/{jobs['pauses']}/resume/")[0] == 202
        assert rig.wait(jobs["waits"], timeout=300)["status"] == "succeeded"
        assert rig.wait(jobs["pauses"], timeout=300)["status"] == "succeeded"
        gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(steps_of(path, jobs["beyond"]))]
        print(f"longest pause between two steps of the work beyond: {max(gaps):.2f} s")
        assert max(gaps) < 5
        check(rig, path, list(jobs.values()))


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_a_host_without_the_database_stops_before_another_takes_over(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    """Fence 20 s, ended within 6 s more, taken over after 30 s; then the wire is mended and nothing is doubled."""
    path = tmp_path / "journal"
    common = {"time_scale": 0.2, "cluster": cluster, "MISTUDIO_FENCE_SECONDS": "100"}
    with (
        Wire(cluster) as wire,
        System(tmp_path / "a", MISTUDIO_HOST_NAME="alpha", DATABASE_URL=wire.url, **common),  # type: ignore[arg-type]
        System(tmp_path / "b", MISTUDIO_HOST_NAME="beta", **common) as beta,  # type: ignore[arg-type]
        ExitStack() as mended,
    ):
        wait_until(lambda: len({gpu["host"] for gpu in beta.cards()}) == 2, "two hosts", timeout=30)
        cards = {gpu["host"]: gpu["uuid"] for gpu in beta.cards()}
        named = beta.submit("rehearsal", gpu=cards["alpha"], steps=700, journal=str(path))["id"]
        auto = beta.submit("rehearsal", gpu=cards["alpha"], steps=700, journal=str(path))["id"]
        wait_until(lambda: attempts_of(beta, named), "not granted", timeout=30)
        steps_after(path, named, 20, timeout=60)
        wait_until(lambda: stops_itself(cluster, named), "no heartbeat knew of the other host", timeout=20)
        cluster.rows(f"UPDATE jobs_job SET gpu_wanted = 'auto' WHERE id = '{named}' RETURNING 1")
        getattr(wire, how)()
        mended.callback(wire.mend)  # or nothing of alpha could end
        gone_at = time.time()
        wait_until(lambda: lost(beta, named), "not taken over", timeout=60)
        taken_at = time.time()
        last = max(line["at"] for line in journal(path, named))
        print(f"{how}: stopped after {last - gone_at:.1f} s, taken over after {taken_at - gone_at:.1f} s")
        assert 18 < last - gone_at < 27
        assert taken_at - gone_at + 2 >= 30
        done = beta.wait(named, timeout=90)
        assert (done["status"], done["host"]) == ("succeeded", "beta")
        first = done["attempts"][0]
        assert (first["outcome"], first["host"]) == ("lost", "alpha")
        assert beta.job(auto)["status"] == "queued"  # by name: it waits for its host
        wire.mend()
        assert beta.wait(auto, timeout=120)["host"] == "alpha"
        check(beta, path, [named, auto])
        assert beta.job(named)["attempt"] == done["attempt"]


def attempts_of(system: System, job_id: str) -> list[Any]:
    return system.job(job_id)["attempts"]


def lost(system: System, job_id: str) -> bool:
    return attempts_of(system, job_id)[0]["outcome"] == "lost"


def stops_itself(cluster: Cluster, job_id: str) -> bool:
    [(silent,)] = cluster.rows(f"SELECT silent_seconds FROM jobs_attempt WHERE job_id = '{job_id}'")
    return silent is not None

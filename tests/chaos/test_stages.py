"""Hand-over, pause, finalize and time limit: whatever is killed on their way, a job ends once and keeps what it had."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_kills import attempt_of, check, journal, steps_after, wait_until
from tests.chaos.test_recovery import books_balance
from tests.system import System

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

STARTS = ("granting", "granted", "claimed", "work_recorded", "before_running", "running")
ENDS = ("end_written", "moved", "final", "lease_ended")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    home = tmp_path_factory.mktemp("stages")
    with System(home, time_scale=0.2, FAULT=f"@{home}/fault") as running:
        yield running


@pytest.fixture
def fault(rig: System) -> Iterator[Path]:
    """The file that names the next point to strike; struck by the end of the test, and the books balance."""
    file = Path(rig.env["FAULT"][1:])
    yield file
    wait_until(lambda: not file.exists(), "the fault never struck", timeout=30)
    rig.wait_for_free_cards()
    wait_until(lambda: books_balance(rig), f"{rig.open_leases()}", timeout=20)


def press(rig: System, job_id: str, verb: str, expected: int = 202) -> Any:
    status, answer = rig.call("POST", f"jobs/{job_id}/{verb}/")
    assert status == expected, answer
    return answer


@pytest.mark.parametrize("point", [*STARTS, "end_written", "handing_over", "handed_over", *ENDS[1:]])
def test_a_hand_over_goes_on_from_its_checkpoint(
    rig: System, fault: Path, tmp_path: Path, point: str
) -> None:
    path = tmp_path / "journal"
    fault.write_text(point)
    job = rig.submit("rehearsal", gpu=2, steps=6, hand_over_at=3, checkpoint_every=1, journal=str(path))
    done = rig.wait(job["id"])
    assert (done["status"], done["gpu_uuid"]) == ("succeeded", rig.cards()[2]["uuid"]), done["error"]
    assert [a["gpu_uuids"] for a in done["attempts"]][-1] == [done["gpu_uuid"]]
    assert sum(a["outcome"] == "handed_over" for a in done["attempts"]) == 1
    steps = [(line["step"], line["cards"]) for line in journal(path) if line["event"] == "step"]
    assert {step for step, cards in steps if not cards} == {0, 1, 2}
    assert {step for step, cards in steps if cards} == {3, 4, 5}
    assert len(done["artifacts"]) == 1
    check(rig, path, [job["id"]])


@pytest.mark.parametrize("point", [*ENDS, *STARTS])
def test_a_pause_keeps_its_checkpoint_and_goes_on_once(
    rig: System, fault: Path, tmp_path: Path, point: str
) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=1, steps=40, journal=str(path))
    steps_after(path, job["id"], 4)
    if point in ENDS:
        fault.write_text(point)
    press(rig, job["id"], "pause")
    rig.wait(job["id"], "paused")
    kept = max(line["step"] for line in journal(path) if line["event"] == "step") + 1
    if point in STARTS:
        fault.write_text(point)
    assert press(rig, job["id"], "resume")["gpu_wanted"] == rig.cards()[1]["uuid"]
    done = rig.wait(job["id"])
    assert done["status"] == "succeeded", done["error"]
    first = [line["step"] for line in journal(path) if line["event"] == "start"][-1]
    assert first >= kept
    assert len(done["artifacts"]) == 1
    check(rig, path, [job["id"]])


@pytest.mark.parametrize("point", [*STARTS, *ENDS])
def test_a_finalized_training_has_one_artifact(rig: System, fault: Path, tmp_path: Path, point: str) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=1, steps=400, checkpoint_every=2, journal=str(path))
    steps_after(path, job["id"], 5)
    press(rig, job["id"], "cancel")
    rig.wait(job["id"])
    fault.write_text(point)
    made = press(rig, job["id"], "finalize")
    done = rig.wait(made["id"])
    assert (done["status"], done["gpu_uuid"]) == ("succeeded", None), done["error"]
    assert done["result"]["ended_early"] and done["result"]["first"] >= 4
    assert len(done["artifacts"]) == 1


@pytest.mark.parametrize("point", ["timing_out", "lease_ended"])
def test_a_time_limit_ends_it_whatever_is_killed(
    rig: System, fault: Path, tmp_path: Path, point: str
) -> None:
    path = tmp_path / "journal"
    job = rig.submit(
        "rehearsal", gpu=0, steps=999, time_limit_seconds=2, checkpoint_every=5, journal=str(path)
    )
    steps_after(path, job["id"], 2)
    fault.write_text(point)
    done = rig.wait(job["id"])
    assert (done["status"], done["failure_reason"]) == ("failed", "timeout")
    assert "its limit is 2 s" in done["error"]
    again = press(rig, job["id"], "retry")
    steps_after(path, again["id"], 1)
    assert next(line["step"] for line in journal(path, again["id"]) if line["event"] == "start") > 10
    press(rig, again["id"], "cancel")
    rig.wait(again["id"])


def test_a_limit_counts_running_only_and_over_all_attempts(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=999, time_limit_seconds=4, journal=str(path))
    for _ in range(2):
        before = len(journal(path))
        wait_until(lambda n=before: len(journal(path)) > n + 25, "too slow", timeout=20)  # about 1.3 s
        press(rig, job["id"], "pause")
        rig.wait(job["id"], "paused")
        press(rig, job["id"], "resume")
    done = rig.wait(job["id"])
    assert done["failure_reason"] == "timeout"
    assert 3.5 < sum(a["ran_seconds"] for a in done["attempts"]) < 6
    assert "over 3 attempts" in done["error"]


def test_a_deaf_work_is_killed_30_s_after_its_limit(rig: System) -> None:
    job = rig.submit("rehearsal", gpu=0, steps=999, deaf=True, time_limit_seconds=1)
    done = rig.wait(job["id"])
    assert done["failure_reason"] == "timeout"
    assert done["attempts"][0]["exit_status"] == -9
    assert 6 < done["attempts"][0]["ran_seconds"] < 10  # 1 s and the scaled 30 s


def test_ten_pauses_are_no_losses(rig: System, tmp_path: Path) -> None:
    """Without a checkpoint of its own between them."""
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=10_000, journal=str(path))
    for _ in range(10):
        rig.wait(job["id"], "running")
        steps_after(path, job["id"], len(journal(path)))
        press(rig, job["id"], "pause")
        rig.wait(job["id"], "paused")
        press(rig, job["id"], "resume")
    rig.wait(job["id"], "running")
    row = rig.job(job["id"])
    assert (row["attempt"], {a["outcome"] for a in row["attempts"][:10]}) == (11, {"ended"})
    press(rig, job["id"], "cancel")
    rig.wait(job["id"])


def test_a_work_that_is_stuck_is_marked_and_asked_where_it_is(tmp_path: Path) -> None:
    """45 s without progress at this time scale; it is not ended, and going on clears the mark."""
    with System(tmp_path / "home", time_scale=0.05) as rig:
        job = rig.submit("rehearsal", gpu=0, steps=30, sleep_at=10, sleep_seconds=60)
        wait_until(lambda: rig.job(job["id"])["stalled"], "never marked", timeout=60)
        assert rig.job(job["id"])["status"] == "running"
        wait_until(lambda: "in one_step" in log_of(rig, job["id"]), "no stack in its log", timeout=5)
        assert 'rehearsal.py", line' in log_of(rig, job["id"])
        done = rig.wait(job["id"])
        assert (done["status"], done["stalled"], done["attempt"]) == ("succeeded", False, 1)
        events = [(e["event"], e["detail"]) for e in rig.get(f"jobs/{job['id']}/events/")]
        assert next(detail for event, detail in events if event == "stalled").startswith("no progress for 4")
        assert "goes_on" in dict(events)


def log_of(rig: System, job_id: str) -> str:
    return rig.get(f"jobs/{job_id}/log?tail=400")["text"]


def test_a_keeper_that_is_told_to_end_keeps_a_checkpoint_first(rig: System, tmp_path: Path) -> None:
    """As when a machine is shut down: every process of the job is told to end, and it is no loss of its own."""
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=60, journal=str(path))
    for number in (1, 2, 3, 4):
        steps_after(path, job["id"], 4 * number)
        wait_until(lambda n=number: rig.job(job["id"])["attempt"] == n, "not started again", timeout=30)
        rig.wait(job["id"], "running")
        os.kill(attempt_of(rig, job["id"])["keeper_pid"], signal.SIGTERM)
        wait_until(lambda n=number: rig.job(job["id"])["attempt"] > n, "not queued again", timeout=30)
    done = rig.wait(job["id"])
    assert (done["status"], [a["outcome"] for a in done["attempts"]]) == (
        "succeeded",
        ["lost"] * 4 + ["ended"],
    )
    assert "SIGTERM" in done["attempts"][0]["detail"]
    starts = [line["step"] for line in journal(path) if line["event"] == "start"]
    assert starts == sorted(set(starts))  # each went on beyond the one before
    check(rig, path, [job["id"]])

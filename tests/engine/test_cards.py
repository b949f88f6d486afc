"""Jobs on cards, through the whole running system."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.system import System

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("asked", [1, "0", "uuid"])
def test_it_runs_where_it_was_told(system: System, asked: Any) -> None:
    cards = system.cards()
    uuid = cards[2]["uuid"] if asked == "uuid" else cards[int(asked)]["uuid"]
    gpu = f" {uuid.upper()} " if asked == "uuid" else asked
    job = system.submit("rehearsal", gpu=gpu, steps=2)
    done = system.wait(job["id"])
    assert done["status"] == "succeeded", done["error"]
    assert done["gpu_request"] == done["gpu_uuid"] == uuid
    assert done["attempts"][0]["reported_gpu_uuids"] == [uuid]
    assert done["result"]["visible"] == uuid
    assert done["simulated"] is True


def test_it_keeps_the_card_on_retry(system: System) -> None:
    job = system.submit("rehearsal", steps=4, fail_at=2)
    failed = system.wait(job["id"])
    assert failed["status"] == "failed"
    assert failed["failure_reason"] == "error"
    assert "told to fail at step 2" in failed["error"]
    status, again = system.call("POST", f"jobs/{job['id']}/retry", {})
    assert status == 202, again
    assert again["retry_of"] == job["id"]
    ended = system.wait(again["id"])
    assert ended["gpu_request"] == ended["gpu_uuid"] == failed["gpu_uuid"]


def test_it_takes_no_card_for_work_that_needs_none(system: System) -> None:
    job = system.submit("rehearsal", gpu=1, on_card=False, steps=1)
    done = system.wait(job["id"])
    assert done["status"] == "succeeded"
    assert done["gpu_uuid"] is None
    assert done["gpu_request"] == system.cards()[1]["uuid"]
    resources = system.rows(
        "SELECT resource FROM jobs_lease l JOIN jobs_attempt a ON a.id = l.attempt_id"
        f" WHERE a.job_id = '{job['id'].replace('-', '')}'"
    )
    assert resources == [("cpu:testhost",)]


def test_it_runs_two_jobs_of_one_card_one_after_the_other(system: System) -> None:
    first = system.submit("rehearsal", gpu=0, steps=10)
    second = system.submit("rehearsal", gpu=0, steps=1)
    system.wait(first["id"], "running")
    waiting = system.job(second["id"])
    assert waiting["status"] == "queued"
    done = [system.wait(job["id"]) for job in (first, second)]
    assert done[1]["started_at"] >= done[0]["finished_at"]


def test_it_runs_three_auto_jobs_at_once_on_three_cards(system: System) -> None:
    system.wait_for_free_cards()
    jobs = [system.submit("rehearsal", steps=40) for _ in range(3)]
    running = [system.wait(job["id"], "running") for job in jobs]
    assert len({job["gpu_uuid"] for job in running}) == 3
    assert [system.job(job["id"])["status"] for job in jobs] == ["running"] * 3
    done = [system.wait(job["id"]) for job in jobs]
    assert max(job["started_at"] for job in done) < min(job["finished_at"] for job in done)


def test_it_decides_auto_at_the_start(system: System) -> None:
    """All cards taken: the queued job goes to the one that is released first, not to the 80 GiB card that
    had the most free memory when it was submitted."""
    system.wait_for_free_cards()
    lengths = {0: 400, 1: 60, 2: 400}
    holders = {card: system.submit("rehearsal", gpu=card, steps=steps) for card, steps in lengths.items()}
    for holder in holders.values():
        system.wait(holder["id"], "running")
    job = system.submit("rehearsal", gpu="auto", steps=1)
    wait_behind_a_job(system, job["id"])
    done = system.wait(job["id"])
    assert done["gpu_uuid"] == system.cards()[1]["uuid"]
    assert done["gpu_request"] == "auto"
    for holder in holders.values():
        system.call("POST", f"jobs/{holder['id']}/cancel")
        system.wait(holder["id"])


def wait_behind_a_job(system: System, job_id: str) -> None:
    """Until the job says that another one is in its way; on a loaded machine a card may be stale before that."""
    deadline = time.monotonic() + 10
    while ((waiting := system.job(job_id))["waiting_for"] or {}).get("reason") != "lease":
        assert waiting["status"] == "queued", waiting
        assert time.monotonic() < deadline, waiting
        time.sleep(0.05)


def test_it_gives_back_memory_and_processes_after_a_cancel(system: System) -> None:
    system.wait_for_free_cards()
    job = system.submit("rehearsal", gpu=0, steps=10_000, memory_mib=300, children=2, checkpoint_every=5)
    system.wait(job["id"], "running")
    assert wait_for_memory(system, lambda used: used >= 300 * 2**20)
    wait_for_orphans(system, 2)
    status, _ = system.call("POST", f"jobs/{job['id']}/cancel")
    assert status == 202
    assert system.wait(job["id"])["status"] == "cancelled"
    system.wait_for_free_cards()
    assert not [pid for pid, command in system.ours() if command.startswith("sleep 600")]
    assert wait_for_memory(system, lambda used: used < 50 * 2**20)


def wait_for_orphans(system: System, count: int) -> None:
    """The work starts them once it has its memory."""
    deadline = time.monotonic() + 10
    while len([pid for pid, command in system.ours() if command.startswith("sleep 600")]) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_memory(system: System, holds: Callable[[int], bool]) -> bool:
    """Whether the memory that card 0 reports comes to where `holds` is true."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if holds(system.get("system/gpu-metrics?gpu_id=0")["gpus"][0]["memory_used_bytes"]):
            return True
        time.sleep(0.1)
    return False

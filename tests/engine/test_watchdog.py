"""Field cases on a whole system with cards of a driver: orphans on a card, and a cancel beside others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import processes
from jobs.processes import Process
from tests.engine.test_driver import GIB, listed, processes_of, work_of
from tests.stubs.driver import StandIn, StandInCard
from tests.system import System

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def driver(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    cards = [StandInCard(bus="00000000:01:00.0"), StandInCard(bus="00000000:41:00.0")]
    return StandIn(tmp_path_factory.mktemp("standin"), driver_library, cards)


@pytest.fixture(scope="module")
def host(driver: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("host"), driver=driver, time_scale=0.1) as running:
        yield running


@pytest.fixture(autouse=True)
def as_new(driver: StandIn, host: System) -> Iterator[None]:
    """Every test starts on two empty cards."""
    yield
    for card in driver.cards:
        card.processes = []
    driver.write()
    for job in host.get("jobs/")["results"]:
        host.call("POST", f"jobs/{job['id']}/cancel")
    host.wait_for_free_cards()


def keeper_of(host: System, job_id: str) -> int:
    return host.job(job_id)["attempts"][-1]["keeper_pid"]


def children_of(host: System, job_id: str, count: int) -> list[Process]:
    """What the work has started: each in a session of its own, below the keeper."""
    work, deadline = work_of(host, job_id), time.monotonic() + 10
    while True:
        found = [p for p in processes.descendants(keeper_of(host, job_id)) if p.pid != work]
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def wait_for(what: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("killed", ["work", "work and keeper"])
def test_it_ends_the_children_of_a_killed_parent_and_waits_for_their_memory_g44(
    host: System, driver: StandIn, killed: str
) -> None:
    """Job parent starts 2 children, listed by NVML on A; SIGKILL the parent: both end, the fall of the memory is
    verified, then A is free."""
    job = host.submit("rehearsal", gpu=0, steps=10_000, children=2)
    host.wait(job["id"], "running")
    children = children_of(host, job["id"], 2)
    driver.cards[0].processes = [("compute", child.pid, 5 * 1024) for child in children]
    driver.write()
    listed(host, driver, 0, 2)
    assert {entry["owner"] for entry in processes_of(host, driver.cards[0].uuid)} == {"job"}
    time.sleep(1)  # a heartbeat, so that the keeper may go, too
    work, keeper = work_of(host, job["id"]), keeper_of(host, job["id"])
    began = time.monotonic()
    if "keeper" in killed:
        os.kill(keeper, signal.SIGKILL)
    os.kill(work, signal.SIGKILL)
    wait_for(lambda: not any(map(processes.alive, children)), 60)
    assert time.monotonic() - began < 60
    host.call("POST", f"jobs/{job['id']}/cancel")
    time.sleep(2)  # the driver still lists them, with their memory
    assert [lease[0] for lease in host.open_leases()] == [f"gpu:{driver.cards[0].uuid}"]
    assert host.get("system/gpu-metrics?gpu_id=0")["gpus"][0]["memory_used_bytes"] >= 10 * GIB
    driver.cards[0].processes = []
    driver.write()
    host.wait_for_free_cards()
    assert host.wait(host.submit("rehearsal", gpu=0, steps=1)["id"])["status"] == "succeeded"


def test_a_cancel_ends_the_jobs_own_processes_and_no_others_g52(host: System) -> None:
    """While it is cancelled, the worker has other children: its fork server and another job; and somebody sleeps."""
    other = host.submit("rehearsal", gpu=1, steps=10_000, children=1)
    host.wait(other["id"], "running")
    job = host.submit("rehearsal", gpu=0, steps=10_000, children=2)
    host.wait(job["id"], "running")
    stranger = subprocess.Popen(["sleep", "600"], env=host.env)  # as if it had been started beside the worker
    try:
        mine = [
            *children_of(host, job["id"], 2),
            *named(work_of(host, job["id"]), keeper_of(host, job["id"])),
        ]
        spared = [
            *children_of(host, other["id"], 1),
            *named(work_of(host, other["id"]), keeper_of(host, other["id"])),
        ]
        spared += named(host.pid("worker"), host.pid("forkserver"), host.pid("agent"), stranger.pid)
        host.call("POST", f"jobs/{job['id']}/cancel")
        assert host.wait(job["id"])["status"] == "cancelled"
        wait_for(lambda: not any(map(processes.alive, mine)), 20)
        time.sleep(7)  # a round of the watchdog
        assert [process for process in spared if not processes.alive(process)] == []
        assert host.job(other["id"])["status"] == "running"
    finally:
        stranger.kill()
        stranger.wait()
        host.call("POST", f"jobs/{other['id']}/cancel")
        host.wait(other["id"])


def named(*pids: int) -> list[Process]:
    return [process for pid in pids if (process := processes.find(pid))]


def test_health_hears_the_watchdog(host: System) -> None:
    wait_for(lambda: host.get("system/health")["checks"]["watchdog_age_s"] is not None, 20)
    assert host.get("system/health")["checks"]["watchdog_age_s"] < 18
    assert host.get("system/health")["status"] == "ok"

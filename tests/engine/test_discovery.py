"""Which cards there are, and which of them jobs may use, while that changes under a running system.

Our stand-in library, the real `nvidia-ml-py`, everything else as it is; jobs compute on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.stubs.driver import (
    IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    StandIn,
    StandInCard,
    StandInInstance,
)
from tests.system import System

pytestmark = pytest.mark.engine
GIB = 2**30


@pytest.fixture(scope="module")
def driver(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("standin"), driver_library, sim_2())


@pytest.fixture(scope="module")
def host(driver: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("host"), driver=driver, time_scale=0.2) as running:
        yield running


def sim_2() -> list[StandInCard]:
    """Two cards of 24 GiB."""
    return [StandInCard(bus=f"00000000:{bus}:00.0") for bus in ("01", "41")]


def become(host: System, driver: StandIn, *cards: StandInCard) -> None:
    """From now on the machine has these cards; returns when everybody knows."""
    host.wait_for_free_cards(40)
    driver.cards, driver.init = list(cards), 0
    driver.write()
    uuids = [card.uuid for card in cards]
    uuids += [part.uuid for card in cards for part in (card.instances or {}).values()]
    seen(host, lambda shown: [card["uuid"] for card in shown] == uuids)
    seen(host, lambda shown: all(card["health"] == "ok" for card in shown))


def seen(host: System, holds: Callable[[list[dict[str, Any]]], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds(shown := [card for card in host.cards() if card["health"] != "removed"]):
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)


def events(host: System, uuid: str) -> list[str]:
    """Oldest first."""
    return [event["event"] for event in host.get(f"system/events?uuid={uuid}")["results"]][::-1]


def test_it_reads_visible_devices_as_uuids_and_sets_the_jobs_own_g10(
    driver_library: Path, tmp_path: Path
) -> None:
    """SIM-2, the services started with CUDA_VISIBLE_DEVICES=GPU-bbbb…: only B is offered, and a job on B is told
    B from its own choice."""
    driver = StandIn(tmp_path, driver_library, sim_2())
    a, b = (card.uuid for card in driver.cards)
    with System(tmp_path / "home", driver=driver, CUDA_VISIBLE_DEVICES=b) as host:
        assert [(card["uuid"], card["selectable"]) for card in host.cards()] == [(a, False), (b, True)]
        status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": 0})
        assert (status, refused["code"], refused["reason"]) == (400, "gpu_not_available", "not_selectable")
        done = host.wait(host.submit("rehearsal", steps=1)["id"])
        assert done["gpu_uuid"] == done["result"]["visible"] == b


def test_it_never_moves_a_job_to_the_card_that_took_its_cards_slot_g03(host: System, driver: StandIn) -> None:
    """SIM-2: B is replaced by B2 in the same slot; whoever still asks for B is told, with the cards that are there."""
    a, b = sim_2()
    become(host, driver, a, b)
    done = host.wait(host.submit("rehearsal", gpu=b.uuid, steps=1)["id"])
    b2 = StandInCard(bus=b.bus)
    become(host, driver, a, b2)
    status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": b.uuid})
    assert (status, refused["code"], refused["reason"]) == (400, "gpu_not_available", "removed")
    assert b.uuid in refused["detail"]
    assert [card["uuid"] for card in refused["available"]] == [a.uuid, b2.uuid]
    status, refused = host.call("POST", f"jobs/{done['id']}/retry", {})
    assert (status, refused["reason"]) == (400, "removed")
    assert host.get("jobs/")["count"] == 1
    assert events(host, b.uuid) == ["added", "removed"]


def test_it_holds_a_job_against_the_slice_it_names_g12(host: System, driver: StandIn) -> None:
    """SIM-MIG: A of 40 GiB with two instances of 20 GiB, B plain. 25 GiB are too large for a slice, 15 GiB run with
    CUDA_VISIBLE_DEVICES=MIG-…, and nobody gets the whole of A meanwhile."""
    parts = {n: StandInInstance(total=20480) for n in (0, 1)}
    a = StandInCard(total=40960, name="NVIDIA A100-PCIE-40GB", instances=parts)
    b = StandInCard(bus="00000000:41:00.0")
    become(host, driver, a, b)
    slice_ = parts[0].uuid
    shown = {card["uuid"]: card for card in host.cards()}
    assert [shown[u]["selectable"] for u in (a.uuid, b.uuid, slice_)] == [False, True, True]
    assert (shown[slice_]["mig_parent"], shown[slice_]["memory_total_bytes"]) == (a.uuid, 20 * GIB)
    aggregate = host.get("system/all")["aggregate"]
    assert (aggregate["gpu_count"], aggregate["memory_total_bytes"]) == (2, 64 * GIB)  # no slice counts twice

    status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": slice_, "estimate_mib": 25 * 1024})
    assert (status, refused["code"]) == (400, "model_too_large")
    status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": "auto", "estimate_mib": 30 * 1024})
    assert (status, refused["code"]) == (400, "model_too_large")  # the whole of A is nobody's
    job = host.submit("rehearsal", gpu=slice_.upper(), steps=40, estimate_mib=15 * 1024)
    host.wait(job["id"], "running")
    status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": a.uuid})
    assert (status, refused["code"], refused["reason"]) == (400, "gpu_not_available", "mig_parent")
    done = host.wait(job["id"])
    assert done["status"] == "succeeded", done["error"]
    assert done["gpu_uuid"] == done["result"]["visible"] == slice_
    assert done["gpu_names"] == [parts[0].name]

    del parts[0]  # unmade live
    become(host, driver, a, b)
    status, refused = host.call("POST", f"jobs/{done['id']}/retry", {})
    assert (status, refused["reason"]) == (400, "removed")
    assert events(host, slice_) == ["added", "removed"]


def test_it_runs_jobs_on_a_card_that_shares_the_hosts_memory_g25(host: System, driver: StandIn) -> None:
    """SIM-UMA: an NVIDIA GB10, whose memory raises NotSupported; what is free is the host's, less a reserve."""
    become(host, driver, StandInCard(name="NVIDIA GB10", faults={"memory": NOT_SUPPORTED}))
    (card,) = (card for card in host.cards() if card["health"] != "removed")
    memory = psutil.virtual_memory()
    assert card["unified_memory"] is True
    assert card["memory_total_bytes"] == memory.total
    free = host.get(f"system/gpu-metrics?gpu_id={card['uuid']}")["gpus"][0]["memory_free_bytes"]
    assert abs(free - memory.available) < GIB
    done = host.wait(host.submit("rehearsal", steps=1)["id"])
    assert done["status"] == "succeeded", done["error"]
    host.wait_for_free_cards()  # what the rest of the machine uses is not taken for the job's
    between = host.submit(
        "rehearsal", estimate_mib=(memory.available + (memory.total - memory.available) // 2) >> 20
    )
    ended = host.wait(between["id"])
    assert ended["failure_reason"] == "insufficient_gpu_memory", ended


def test_it_leaves_a_running_job_alone_when_the_driver_was_upgraded_g05(
    host: System, driver: StandIn
) -> None:
    """Every new init raises LibRmVersionMismatch (18): the job on A goes on, new ones wait or are refused with the
    repair, the log has one line; and all is well after the repair."""
    a, b = sim_2()
    become(host, driver, a, b)
    running = host.submit("rehearsal", gpu=0, steps=100)
    host.wait(running["id"], "running")
    driver.init = VERSION_MISMATCH
    driver.write()
    deadline = time.monotonic() + 10
    while not (why := host.get("system/all")["hosts"][0]["backend_error"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "upgraded under the running kernel module: reboot" in why
    status, refused = host.call("POST", "jobs/rehearsal/", {"gpu": 1})
    assert (status, refused["code"]) == (400, "driver_unavailable")
    assert "reboot" in refused["detail"]
    waiting = host.submit("rehearsal", steps=1)
    done = host.wait(running["id"])
    assert done["status"] == "succeeded", done["error"]
    told = host.job(waiting["id"])
    assert (told["status"], told["waiting_for"]["reason"]) == ("queued", "driver")
    assert "reboot" in told["waiting_for"]["detail"]
    assert not {"lost", "removed"} & {*events(host, a.uuid), *events(host, b.uuid)}
    assert (host.home / "logs" / "agent.log").read_text().count("No cards can be read") == 1
    driver.init = 0
    driver.write()
    assert host.wait(waiting["id"])["status"] == "succeeded"


def test_it_finds_a_card_that_the_driver_reports_later_g04(host: System, driver: StandIn) -> None:
    """Init is well and the count 0 for a while; then there is a card, without a restart of anything."""
    become(host, driver)
    agent = host.pid("agent")
    time.sleep(2)
    assert host.get("system/all")["hosts"][0]["backend_error"] is None
    card = StandInCard()
    driver.cards = [card]
    driver.write()
    began = time.monotonic()
    seen(host, lambda shown: [c["uuid"] for c in shown] == [card.uuid])
    assert time.monotonic() - began < 6  # the list comes every 6 s, every 1.2 s at this clock
    assert host.pid("agent") == agent


def test_a_card_lost_while_no_agent_ran_is_lost_and_not_stale(host: System, driver: StandIn) -> None:
    """And a card that this user never could open stands in nobody's way: what is taken out meanwhile is removed."""
    a, b = sim_2()
    forbidden = StandInCard(bus="00000000:81:00.0", faults={"handle": NO_PERMISSION})
    become(host, driver, a, b)
    old = host.kill("agent")
    b.faults = {"handle": IS_LOST}
    driver.cards = [a, b, forbidden]
    driver.write()
    seen(host, lambda shown: [card["health"] for card in shown] == ["ok", "lost"], 40)
    assert host.pid("agent") != old
    (detail,) = (card["health_detail"] for card in host.cards() if card["uuid"] == b.uuid)
    assert "GPU is lost" in detail
    b.faults = {}
    driver.write()
    seen(host, lambda shown: [card["health"] for card in shown] == ["ok", "ok"])
    assert events(host, b.uuid) == ["added", "lost", "recovered"]
    assert events(host, forbidden.uuid) == []

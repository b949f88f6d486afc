"""The driver's cards, read through the real `nvidia-ml-py` in real reader processes, over our stand-in library."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpus import backends, procfs, readers, shapes
from gpus.agent import metrics_of
from gpus.backends.base import BackendUnavailable
from gpus.readings import CardReading
from gpus.sampling import Sampler
from tests.stubs.driver import (
    ATS,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    VERSION_MISMATCH,
    StandIn,
    StandInCard,
    StandInInstance,
)

MIB = 2**20
MakeDriver = Callable[..., StandIn]
SPEC: backends.Spec = {"backend": "nvml", "host": "vm", "home": "", "sizes": []}
#: What each fault of the stand-in takes away, and nothing else.
VALUES = {
    "utilization": {"utilization_gpu_percent", "utilization_memory_percent"},
    "memory": {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"},
    "temperature": {"temperature_celsius"},
    "slowdown": {"temperature_slowdown_celsius"},
    "power": {"power_draw_watts"},
    "limit": {"power_limit_watts"},
    "fan": {"fan_percent"},
    "clocks": {"clock_sm_mhz", "clock_memory_mhz"},
    "pstate": {"performance_state"},
    "reasons": {"throttle_reasons"},
    "ecc": {"ecc_errors_uncorrected"},
    "pcie": {"pcie_generation", "pcie_width"},
}


@pytest.fixture
def make_driver(driver_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDriver:
    """A driver with these cards, for every reader that starts from now on."""

    def make(*cards: StandInCard) -> StandIn:
        driver = StandIn(tmp_path, driver_library, list(cards))
        for name, value in driver.environment.items():
            monkeypatch.setenv(name, value)
        return driver

    return make


@pytest.fixture
async def sampler() -> AsyncIterator[Sampler]:
    sampler = Sampler(SPEC)
    yield sampler
    await sampler.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is asked again without a pause."""
    monkeypatch.setattr(readers, "scaled", lambda seconds: 0.0)


async def see(sampler: Sampler) -> None:
    sampler.ask_at = 0.0  # a driver that was away is asked again without a pause
    await sampler.discover()
    await sampler.sweep(with_processes=True)


def only(sampler: Sampler) -> Any:
    (card,) = sampler.cards.values()
    return card


async def test_every_value_of_a_healthy_card(make_driver: MakeDriver, sampler: Sampler) -> None:
    driver = make_driver(
        StandInCard(used=1024, utilization=(37, 12), temperature=(55, 93), power=(123456, 350000))
    )
    await see(sampler)
    card = only(sampler)
    assert card.info == {
        "uuid": driver.cards[0].uuid, "index": 0, "name": "NVIDIA GeForce RTX 3090",
        "pci_bus_id": "00000000:01:00.0", "memory_total_bytes": 24576 * MIB, "driver_version": "580.65.06",
        "cuda_version": "13.0", "compute_capability": "8.6", "mig_mode": None, "mig_parent": None, "mig_place": None,
        "compute_mode": "default", "unified_memory": False, "simulated": False,
    }  # fmt: skip
    expected = CardReading(
        utilization_gpu_percent=37, utilization_memory_percent=12, memory_total_bytes=24576 * MIB,
        memory_used_bytes=1024 * MIB, memory_free_bytes=(24576 - 1024 - 256) * MIB,
        memory_reserved_bytes=256 * MIB, temperature_celsius=55, temperature_slowdown_celsius=93,
        power_draw_watts=123.456, power_limit_watts=350.0, fan_percent=30, clock_sm_mhz=1695,
        clock_memory_mhz=9501, performance_state="P2", throttle_reasons=["sw_power_cap"],
        ecc_errors_uncorrected=0, pcie_generation=4, pcie_width=16,
    )  # fmt: skip
    assert card.reading == expected.as_dict()


@pytest.mark.parametrize("value", VALUES)
async def test_a_value_that_fails_costs_no_other(
    make_driver: MakeDriver, sampler: Sampler, value: str
) -> None:
    make_driver(StandInCard(faults={value: NOT_SUPPORTED}))
    await see(sampler)
    reading = only(sampler).reading
    assert set(reading["missing"]) == VALUES[value]
    assert set(reading["missing"].values()) == {"Not Supported"}
    silent = {
        name for name, said in reading.items() if said is None or (name == "throttle_reasons" and not said)
    }
    assert silent == VALUES[value]
    assert not only(sampler).error


async def test_an_old_driver_has_the_first_version_of_memory(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    make_driver(StandInCard(used=1000, reserved=300, faults={"memory_v2": NOT_SUPPORTED}))
    await see(sampler)
    reading = only(sampler).reading
    assert reading["memory_used_bytes"] == 1300 * MIB  # the driver's share is inside
    assert reading["memory_free_bytes"] == (24576 - 1300) * MIB
    assert reading["missing"] == {"memory_reserved_bytes": "Not Supported"}


async def test_an_old_driver_has_the_older_call_for_heat(make_driver: MakeDriver, sampler: Sampler) -> None:
    make_driver(StandInCard(faults={"temperature_v": FUNCTION_NOT_FOUND}))
    await see(sampler)
    assert only(sampler).reading["temperature_celsius"] == 40
    assert only(sampler).reading["missing"] == {}


async def test_it_takes_no_value_out_of_range_and_clamps_none_g34(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    """Utilization says 4294967295 and 137 in turn: null with the reason, and a gap in the chart."""
    driver = make_driver(StandInCard(utilization=(4294967295, 137), temperature=(255, 93)))
    await see(sampler)
    reading = only(sampler).reading
    assert reading["utilization_gpu_percent"] is reading["utilization_memory_percent"] is None
    assert reading["temperature_celsius"] is None
    assert "137, which is out of range" in reading["missing"]["utilization_memory_percent"]
    driver.cards[0].utilization = (137, 12)
    driver.write()
    await see(sampler)
    assert only(sampler).reading["utilization_gpu_percent"] is None
    assert only(sampler).reading["utilization_memory_percent"] == 12


async def test_it_lists_processes_of_every_kind_once(make_driver: MakeDriver, sampler: Sampler) -> None:
    make_driver(
        StandInCard(
            processes=[
                ("compute", 1, 20480), ("graphics", 1, 153), ("graphics", 4000001, 90), ("compute", 4000002, -1),
            ]
        )
    )  # fmt: skip
    await see(sampler)
    listed = {entry["pid"]: entry for entry in only(sampler).processes}
    assert {pid: (e["type"], e["memory_used_bytes"]) for pid, e in listed.items()} == {
        1: ("compute", 20480 * MIB),
        4000001: ("graphics", 90 * MIB),
        4000002: ("compute", None),
    }
    assert listed[1]["name"]
    assert listed[4000001]["name"] is listed[4000001]["user"] is None


async def test_it_says_null_where_windows_says_nothing_g31(make_driver: MakeDriver, sampler: Sampler) -> None:
    """WSL2: utilization is not supported, the memory of every process is the raw 2^64-1; sums skip what is null."""
    silent = [("compute", 4000001, -1), ("compute", 4000002, -1)]
    driver = make_driver(
        StandInCard(processes=silent, faults={"utilization": NOT_SUPPORTED}),
        StandInCard(bus="00000000:41:00.0", utilization=(40, 0)),
    )
    await see(sampler)
    card = sampler.cards[driver.cards[0].uuid]
    assert [process["memory_used_bytes"] for process in card.processes] == [None, None]
    both = shapes.aggregate([metrics_of(card) for card in sampler.cards.values()])
    assert both["utilization_gpu_percent"] == 40
    assert both["memory_used_bytes"] == 4 * MIB


async def test_it_finds_the_processes_that_do_not_fit_the_first_answer(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    make_driver(StandInCard(processes=[("compute", 4000000 + n, 1) for n in range(40)]))
    await see(sampler)
    assert len(only(sampler).processes) == 40


async def test_a_card_that_lists_nobody_can_still_be_read(make_driver: MakeDriver, sampler: Sampler) -> None:
    make_driver(StandInCard(faults={"compute": NOT_SUPPORTED}))
    await see(sampler)
    assert only(sampler).reading["temperature_celsius"] == 40
    assert "cannot be listed" in only(sampler).error


async def test_a_uuid_with_a_zero_byte_stays_whole_g08(make_driver: MakeDriver, sampler: Sampler) -> None:
    uuid = "GPU-13096139-7ada-8313-ee08-000dd8540fe1"
    make_driver(StandInCard(uuid=uuid))
    await see(sampler)
    assert list(sampler.cards) == [uuid]
    assert only(sampler).reading["memory_total_bytes"]


async def test_it_logs_a_value_that_is_never_said_once_g32(
    make_driver: MakeDriver, sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour of samples of card B, whose temperature is not supported: a line, and the card works."""
    make_driver(StandInCard(), StandInCard(bus="00000000:41:00.0", faults={"temperature": NOT_SUPPORTED}))
    with caplog.at_level(logging.INFO, "gpus.sampling"):
        await sampler.discover()
        for _ in range(1800):
            await sampler.sweep(with_processes=False)
    lines = [r.getMessage() for r in caplog.records if "temperature_celsius" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("Card 1 ")
    card = next(card for card in sampler.cards.values() if card.index == 1)
    assert card.reading["temperature_celsius"] is None
    assert card.reading["power_draw_watts"] == 25.0
    assert not card.error


async def test_a_lost_card_stays_listed_and_comes_back_without_a_restart_g27_g28(
    make_driver: MakeDriver, sampler: Sampler, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIM-4: card C is lost on every call, its handle included; A, B and D are read as ever. Good again with the
    same UUID, its first good sample makes it healthy: found by a new process, as the library in the old one still
    takes it for lost."""
    driver = make_driver(*sim_4())
    await see(sampler)
    shared = sampler.readers.shared.process
    driver.cards[2].faults = {"handle": IS_LOST}
    driver.write()
    before = {card.uuid: card.sampled_at for card in sampler.cards.values()}
    for _ in range(3):
        await see(sampler)
    states = {card.uuid: (card.index, card.lost) for card in sampler.cards.values()}
    assert states == {card.uuid: (n, n == 2) for n, card in enumerate(driver.cards)}
    assert "lost" in sampler.cards[driver.cards[2].uuid].error
    read = {card.uuid for card in sampler.cards.values() if card.sampled_at != before[card.uuid]}
    assert read == {card.uuid for n, card in enumerate(driver.cards) if n != 2}
    assert sampler.readers.shared.process is shared  # the others' reader had no part in it
    assert not sampler.complete
    driver.cards[2].faults = {}
    driver.write()
    await late(sampler)
    assert not any(card.lost for card in sampler.cards.values())
    assert not sampler.complete  # the shared reader cannot open it still
    monkeypatch.setattr(readers, "PROVEN_SECONDS", 0.0)
    await late(sampler)
    await see(sampler)
    assert sampler.complete
    assert not sampler.readers.own


async def test_a_card_that_hangs_leaves_the_others_their_reader(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(StandInCard(), StandInCard(bus="00000000:41:00.0"))
    await see(sampler)
    driver.cards[1].hangs = {"utilization": 30}
    driver.write()
    await sampler.sweep(with_processes=False)
    assert "did not answer" in sampler.cards[driver.cards[1].uuid].error
    assert sampler.readers.alone(driver.cards[1].uuid)
    assert not sampler.readers.alone(driver.cards[0].uuid)
    await sampler.sweep(with_processes=False)
    assert not sampler.cards[driver.cards[0].uuid].error


@pytest.mark.parametrize(
    ("code", "repair"),
    [
        (DRIVER_NOT_LOADED, "modprobe nvidia"),
        (VERSION_MISMATCH, "reboot"),
        (NO_PERMISSION, "/dev/nvidia*"),
        (UNKNOWN, "nvidia-smi"),
    ],
)
async def test_a_driver_that_does_not_start_says_its_repair_and_is_asked_again(
    make_driver: MakeDriver, sampler: Sampler, code: int, repair: str
) -> None:
    driver = make_driver(StandInCard())
    driver.init = code
    driver.write()
    await sampler.discover()
    assert repair in sampler.backend_error
    driver.init = 0
    driver.write()
    await see(sampler)
    assert not sampler.backend_error
    assert only(sampler).reading["memory_total_bytes"]


async def test_a_driver_upgraded_under_us_keeps_the_cards_and_says_reboot(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(StandInCard())
    await see(sampler)
    driver.init = VERSION_MISMATCH
    driver.write()
    await sampler.sweep(with_processes=False)
    assert "reboot" in sampler.backend_error
    assert len(sampler.cards) == 1


def test_the_settings_reach_the_driver(make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` means the driver where there is one; asked from this process, which has none, it says so."""
    with pytest.raises(BackendUnavailable, match=r"libnvidia-ml\.so\.1"):
        backends.get("auto")


async def test_a_card_that_hangs_when_cards_are_listed_leaves_the_others_read(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(StandInCard(), StandInCard(bus="00000000:41:00.0"))
    await see(sampler)
    driver.cards[1].hangs = {"memory": 30}
    driver.write()
    before = sampler.cards[driver.cards[0].uuid].sampled_at
    await see(sampler)
    assert not sampler.backend_error
    assert sampler.cards[driver.cards[0].uuid].sampled_at != before
    assert sampler.readers.alone(driver.cards[1].uuid)


async def test_a_card_that_lists_nobody_still_answers_at_once(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(StandInCard(processes=[("compute", 1, 100)]))
    await see(sampler)
    driver.cards[0].faults = {"compute": NOT_SUPPORTED}
    driver.write()
    card = await sampler.fresh(driver.cards[0].uuid, 2)
    assert card is not None
    assert (card.lists, card.processes, card.processes_at) == (False, [], None)


# Several cards ----------------------------------------------------------------------------------------


def sim_4() -> list[StandInCard]:
    return [StandInCard(bus=f"00000000:{bus}:00.0") for bus in ("01", "41", "81", "C1")]


async def late(sampler: Sampler) -> None:
    """One more round, and the answers of the cards that have readers of their own."""
    await see(sampler)
    await asyncio.wait(sampler.late.values(), timeout=10)


async def test_cards_added_removed_and_reordered_are_followed(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    """Indexes move, UUIDs and readings stay; a handle that is held goes on naming its card."""
    driver = make_driver(*sim_4()[1:3])
    first, second = driver.cards
    first.used, second.used = 100, 200
    driver.write()
    await see(sampler)
    driver.cards = [second, StandInCard(bus="00000000:01:00.0"), first]
    driver.write()
    await sampler.sweep(with_processes=False)
    used = {card.uuid: card.reading["memory_used_bytes"] // MIB for card in sampler.cards.values()}
    assert used == {first.uuid: 100, second.uuid: 200}
    await see(sampler)
    assert indexes(sampler) == {driver.cards[1].uuid: 0, first.uuid: 1, second.uuid: 2}
    driver.cards = [second]
    driver.write()
    await see(sampler)
    assert indexes(sampler) == {second.uuid: 0}


def indexes(sampler: Sampler) -> dict[str, int]:
    return {card.uuid: card.index for card in sampler.cards.values()}


async def test_a_card_that_is_taken_out_is_removed_and_never_lost(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(*sim_4())
    await see(sampler)
    gone = driver.cards.pop()
    driver.write()
    await sampler.sample(lists=False)
    assert gone.uuid not in sampler.cards
    assert sampler.complete


async def test_a_card_lost_before_the_agent_began_is_said_lost(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    """The driver counts it and does not open it; the database knows its name."""
    driver = make_driver(*sim_4())
    driver.cards[2].faults = {"handle": IS_LOST}
    driver.write()
    await see(sampler)
    assert len(sampler.cards) == 3
    assert not sampler.complete
    sampler.recall([{"uuid": driver.cards[2].uuid, "index": 2, "simulated": False}])
    await sampler.sweep(with_processes=False)
    assert sampler.cards[driver.cards[2].uuid].lost
    assert not sampler.complete


async def test_a_card_that_hangs_when_the_agent_begins_costs_the_others_nothing(
    make_driver: MakeDriver, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first list hangs with it; the cards that the database knows are read one by one."""
    monkeypatch.setattr("gpus.sampling.START_SECONDS", 2.0)
    driver = make_driver(*sim_4())
    driver.cards[1].hangs = {"handle": 30}
    driver.write()
    await see(sampler)
    assert "did not answer" in sampler.backend_error
    sampler.recall(
        [{"uuid": card.uuid, "index": n, "simulated": False} for n, card in enumerate(driver.cards)]
    )
    await sampler.sample(lists=True)
    assert not sampler.backend_error
    read = [card.index for card in sampler.cards.values() if card.sampled_at]
    assert read == [0, 2, 3]


@pytest.mark.parametrize("value", ["handle", "uuid"])
async def test_a_card_this_user_never_may_open_hides_no_removed_one(
    make_driver: MakeDriver, sampler: Sampler, value: str
) -> None:
    driver = make_driver(*sim_4())
    driver.cards[0].faults = {value: NO_PERMISSION}
    driver.write()
    await see(sampler)
    sampler.recall([])  # nor does the database know it
    await see(sampler)
    assert sampler.complete
    driver.cards.pop()
    driver.write()
    await see(sampler)
    assert sampler.complete
    assert len(sampler.cards) == 2


async def test_a_card_whose_permission_was_taken_away_says_so(
    make_driver: MakeDriver, sampler: Sampler, at_once: None
) -> None:
    driver = make_driver(*sim_4())
    await see(sampler)
    driver.cards[1].faults = {"handle": NO_PERMISSION}
    driver.write()
    await sampler.readers.shared.close()  # files that are open stay open: only a new process is refused
    await see(sampler)
    sampler.recall([])
    await see(sampler)
    assert not sampler.complete
    card = sampler.cards[driver.cards[1].uuid]
    assert card.lost
    assert "check their mode" in card.error
    driver.cards[1].faults = {}
    driver.write()
    await late(sampler)
    assert not card.lost


async def test_a_card_that_tells_no_value_is_not_read(make_driver: MakeDriver, sampler: Sampler) -> None:
    """Every value without permission: the list is complete all the same, and the card grows stale with the reason."""
    driver = make_driver(StandInCard(faults=dict.fromkeys(VALUES, NO_PERMISSION)))
    await see(sampler)
    assert sampler.complete
    assert only(sampler).sampled_at is None
    assert "Insufficient Permissions" in only(sampler).error
    del driver.cards[0].faults["fan"]
    driver.write()
    await see(sampler)
    assert only(sampler).reading["fan_percent"] == 30
    assert not only(sampler).error


# Drivers that change --------------------------------------------------------------------------------------


async def test_a_driver_loaded_anew_is_asked_by_a_new_process(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    """`rmmod nvidia && modprobe nvidia`: the library in the old process says “Uninitialized” until it ends."""
    driver = make_driver(StandInCard())
    await see(sampler)
    driver.load = 2
    driver.write()
    await sampler.sweep(with_processes=False)
    assert "Uninitialized" in sampler.backend_error
    assert "unloaded" in sampler.backend_error
    before = only(sampler).sampled_at
    await see(sampler)
    assert not sampler.backend_error
    assert only(sampler).sampled_at != before


async def test_a_driver_that_stays_away_is_asked_less_and_less_often_and_told_once_g05(
    make_driver: MakeDriver, sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    """Every new init raises LibRmVersionMismatch (18) for ever; the cards stay known, none of them lost."""
    driver = make_driver(StandInCard())
    await see(sampler)
    driver.init = VERSION_MISMATCH
    driver.write()
    pauses = []
    with caplog.at_level(logging.INFO, "gpus.sampling"):
        for _ in range(6):
            await see(sampler)
            pauses.append(sampler.pause)
    assert pauses == [5, 10, 20, 40, 60, 60]
    asked_at = sampler.ask_at
    await sampler.discover()
    assert sampler.ask_at == asked_at  # it was not asked
    told = [r.getMessage() for r in caplog.records if r.name == "gpus.sampling"]
    assert told == [f"No cards can be read: {sampler.backend_error}"]
    assert not only(sampler).lost


async def test_a_driver_too_new_for_a_new_process_leaves_the_old_one_reading(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    """One card is lost; its own process cannot even begin. The others are none the worse."""
    driver = make_driver(*sim_4())
    await see(sampler)
    driver.cards[2].faults = {"handle": IS_LOST}
    driver.write()
    await see(sampler)
    own = sampler.readers.own[driver.cards[2].uuid]
    own.reader.spec = SPEC | {"backend": "simulated"}  # a reader that says the driver is away
    own.pause = 0.0
    await late(sampler)
    assert not sampler.backend_error
    assert "no cards are named" in sampler.cards[driver.cards[2].uuid].error


# MIG ------------------------------------------------------------------------------------------------------


def sim_mig() -> list[StandInCard]:
    """Card A of 40 GiB with two instances of 20 GiB, the slots between and after them empty; card B plain."""
    parts = {0: StandInInstance(total=20480), 3: StandInInstance(total=20480)}
    a = StandInCard(total=40960, name="NVIDIA A100-PCIE-40GB", instances=parts)
    return [a, StandInCard(bus="00000000:41:00.0")]


async def test_instances_are_cards_after_all_cards(make_driver: MakeDriver, sampler: Sampler) -> None:
    whole, plain = make_driver(*sim_mig()).cards
    assert whole.instances
    await see(sampler)
    parts = [part.uuid for part in whole.instances.values()]
    assert indexes(sampler) == {whole.uuid: 0, plain.uuid: 1, parts[0]: 2, parts[1]: 3}
    infos = {uuid: card.info for uuid, card in sampler.cards.items()}
    assert [infos[uuid]["mig_mode"] for uuid in (whole.uuid, plain.uuid)] == [True, None]
    part = infos[parts[0]]
    assert (part["mig_parent"], part["memory_total_bytes"]) == (whole.uuid, 20480 * MIB)
    assert part["mig_place"] == "1/0"
    assert part["name"] == "NVIDIA A100-PCIE-40GB MIG 3g.20gb"
    assert part["pci_bus_id"] == infos[whole.uuid]["pci_bus_id"]
    assert part["compute_capability"] == "8.6"


async def test_an_instance_says_its_memory_and_that_the_rest_is_its_cards(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    whole, _ = make_driver(*sim_mig()).cards
    assert whole.instances
    await see(sampler)
    part = sampler.cards[whole.instances[0].uuid]
    said = {name: value for name, value in part.reading.items() if value not in (None, [])}
    assert said.pop("missing").keys() == part.reading.keys() - said.keys() - {"missing"}
    assert said == {
        "memory_total_bytes": 20480 * MIB,
        "memory_used_bytes": 12 * MIB,
        "memory_free_bytes": (20480 - 12) * MIB,
        "memory_reserved_bytes": 0,
    }
    assert (
        part.reading["missing"]["utilization_gpu_percent"]
        == "a MIG instance has none of its own: see its card"
    )
    card = sampler.cards[whole.uuid].reading
    assert card["missing"] == {
        "utilization_gpu_percent": "Not Supported",
        "utilization_memory_percent": "Not Supported",
    }
    assert card["temperature_celsius"] == 40


async def test_a_process_is_listed_where_it_runs(make_driver: MakeDriver, sampler: Sampler) -> None:
    """The card lists everybody; whoever is in an instance is the instance's."""
    cards = sim_mig()
    assert cards[0].instances
    cards[0].processes = [("graphics", 4000001, 153)]
    cards[0].instances[0].processes = [("compute", 4000002, 5000)]
    cards[0].instances[3].processes = [("compute", 4000003, 6000), ("mps", 4000004, 1)]
    make_driver(*cards)
    await see(sampler)
    parts = cards[0].instances
    assert {uuid: [p["pid"] for p in card.processes] for uuid, card in sampler.cards.items()} == {
        cards[0].uuid: [4000001],
        cards[1].uuid: [],
        parts[0].uuid: [4000002],
        parts[3].uuid: [4000003, 4000004],
    }


async def test_instances_are_made_and_unmade_live(make_driver: MakeDriver, sampler: Sampler) -> None:
    driver = make_driver(*sim_mig())
    parts = driver.cards[0].instances
    assert parts
    await see(sampler)
    gone = parts.pop(0)
    parts[5] = StandInInstance(total=9984, name="NVIDIA A100-PCIE-40GB MIG 2g.10gb")
    driver.write()
    await sampler.sample(lists=False)  # the one that is gone is noticed by reading it
    assert gone.uuid not in sampler.cards
    assert sampler.cards[parts[5].uuid].info["memory_total_bytes"] == 9984 * MIB
    assert sampler.complete
    assert not any(card.lost for card in sampler.cards.values())
    driver.cards[0].instances = None
    driver.write()
    await see(sampler)
    assert list(sampler.cards) == [card.uuid for card in driver.cards]


# Cards without memory of their own --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "addressing"), [("NVIDIA GB10", None), ("NVIDIA Later", ATS), ("NVIDIA Thor", ATS)]
)
async def test_an_integrated_card_has_the_hosts_memory_g25(
    make_driver: MakeDriver, sampler: Sampler, name: str, addressing: int | None
) -> None:
    """Both versions of the memory info are not supported; total and free are the host's."""
    make_driver(StandInCard(name=name, addressing=addressing, faults={"memory": NOT_SUPPORTED}))
    await see(sampler)
    total, available = procfs.memory()
    card = only(sampler)
    assert card.info["unified_memory"] is True
    assert card.info["memory_total_bytes"] == card.reading["memory_total_bytes"] == total
    assert abs(card.reading["memory_free_bytes"] - available) < 2**30
    assert card.reading["memory_used_bytes"] == total - card.reading["memory_free_bytes"]
    assert card.reading["missing"] == {"memory_reserved_bytes": "Not Supported"}


def test_the_hosts_memory_is_what_is_available_g25() -> None:
    """MemTotal 127.6 GB, MemAvailable 118.6 GB."""
    text = "MemTotal:       127600748 kB\nMemFree:         1000 kB\nMemAvailable:   118566368 kB\nHugePages_Total: 0\n"
    assert procfs.memory(text) == (127600748 * 1024, 118566368 * 1024)


@pytest.mark.parametrize(
    ("addressing", "code"), [(None, NOT_SUPPORTED), (1, NOT_SUPPORTED), (ATS, UNKNOWN), (ATS, NO_PERMISSION)]
)
async def test_no_other_card_is_taken_for_integrated(
    make_driver: MakeDriver, sampler: Sampler, addressing: int | None, code: int
) -> None:
    """A card of its own whose memory is not supported, or an integrated one that fails otherwise: unknown, with why."""
    make_driver(StandInCard(addressing=addressing, faults={"memory": code}))
    await see(sampler)
    assert only(sampler).info["unified_memory"] is False
    assert only(sampler).info["memory_total_bytes"] is only(sampler).reading["memory_used_bytes"] is None
    assert set(only(sampler).reading["missing"]) == VALUES["memory"]

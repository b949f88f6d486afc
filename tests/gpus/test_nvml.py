"""The driver's cards, read through the real `nvidia-ml-py` in real reader processes, over our stand-in library."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpus import backends
from gpus.backends.base import BackendUnavailable
from gpus.readings import CardReading
from gpus.sampling import FAILURES_TO_LOSE, Sampler
from tests.stubs.driver import (
    DRIVER_NOT_LOADED,
    IS_LOST,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    StandIn,
    StandInCard,
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


async def see(sampler: Sampler) -> None:
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
        "cuda_version": "13.0", "compute_capability": "8.6", "mig_mode": None, "mig_parent": None,
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


async def test_a_value_out_of_range_is_none_with_the_reason(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    make_driver(StandInCard(utilization=(4294967295, 137), temperature=(255, 93)))
    await see(sampler)
    reading = only(sampler).reading
    assert reading["utilization_gpu_percent"] is reading["utilization_memory_percent"] is None
    assert reading["temperature_celsius"] is None
    assert "out of range" in reading["missing"]["utilization_memory_percent"]


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


async def test_a_lost_card_stays_listed_and_costs_the_others_nothing(
    make_driver: MakeDriver, sampler: Sampler
) -> None:
    driver = make_driver(*(StandInCard(bus=f"00000000:{n}1:00.0") for n in range(4)))
    await see(sampler)
    driver.cards[1].faults = {"handle": IS_LOST}
    driver.write()
    for _ in range(FAILURES_TO_LOSE):
        await see(sampler)
    states = {card.uuid: (card.index, card.lost) for card in sampler.cards.values()}
    assert states == {card.uuid: (n, n == 1) for n, card in enumerate(driver.cards)}
    assert "lost" in sampler.cards[driver.cards[1].uuid].error
    driver.cards[1].faults = {}
    driver.write()
    await see(sampler)
    assert not any(card.lost for card in sampler.cards.values())
    assert sampler.complete


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
    [(DRIVER_NOT_LOADED, "modprobe nvidia"), (VERSION_MISMATCH, "reboot"), (999, "nvidia-smi")],
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

"""The shapes that leave the house, with odd values: null is never 0."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus import shapes
from gpus.models import Gpu
from gpus.readings import CardReading
from tests.gpus.conftest import MakeCard

# The contract's own lists (section 4); a name changed there or here turns these red.
INFO = """gpu_id uuid host name pci_bus_id driver_version cuda_version compute_capability memory_total_bytes mig_mode
    mig_parent compute_mode unified_memory simulated selectable health health_detail enabled max_jobs interactive_slots
    jobs first_seen_at last_seen_at"""
METRICS = """gpu_id uuid sampled_at age_s stale utilization_gpu_percent utilization_memory_percent memory_total_bytes
    memory_used_bytes memory_free_bytes memory_reserved_bytes temperature_celsius temperature_slowdown_celsius
    power_draw_watts power_limit_watts fan_percent clock_sm_mhz clock_memory_mhz performance_state throttle_reasons
    ecc_errors_uncorrected pcie_generation pcie_width missing"""
PROCESS = "pid name user type gpu_uuid memory_used_bytes owner job_id state"
AGGREGATE = """gpu_count readable_count memory_used_bytes memory_total_bytes memory_free_bytes utilization_gpu_percent
    temperature_celsius_max power_draw_watts power_limit_watts"""
NOBODY: Any = {"owner": "unknown", "job_id": None}


def sample(**values: Any) -> shapes.Metrics:
    return shapes.metrics(0, "GPU-a", CardReading(**values).as_dict(), timezone.now())


def test_it_names_every_field_as_the_contract_does(make_card: MakeCard) -> None:
    process = shapes.process("GPU-a", {"pid": 1, "type": "compute"}, NOBODY)
    for shape, names in (
        (shapes.info(make_card()), INFO),
        (sample(), METRICS),
        (process, PROCESS),
        (shapes.aggregate([]), AGGREGATE),
    ):
        assert sorted(shape) == sorted(names.split())


def test_it_says_null_for_what_a_card_does_not_say() -> None:
    metrics = sample(missing={"fan_percent": "no fan"})
    said = {name for name, value in metrics.items() if value is not None}
    assert said == {"gpu_id", "uuid", "sampled_at", "age_s", "stale", "throttle_reasons", "missing"}
    assert metrics["missing"] == {"fan_percent": "no fan"}


def test_it_keeps_a_real_zero() -> None:
    metrics = sample(utilization_gpu_percent=0.0, memory_used_bytes=0)
    assert metrics["utilization_gpu_percent"] == 0.0
    assert metrics["memory_used_bytes"] == 0


def test_an_instance_is_a_part_of_its_card_and_counts_once() -> None:
    total, now = 40 * 2**30, timezone.now()
    whole = sample(memory_total_bytes=total, power_draw_watts=90.0)
    part = shapes.metrics(1, "MIG-a", CardReading(memory_total_bytes=total // 2).as_dict(), now)
    both = shapes.aggregate([whole, part])
    assert (both["gpu_count"], both["readable_count"], both["memory_total_bytes"]) == (1, 1, total)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_it_says_null_for_numbers_that_are_none(odd: float) -> None:
    metrics = sample(power_draw_watts=odd, temperature_celsius=40.0)
    assert metrics["power_draw_watts"] is None
    assert metrics["temperature_celsius"] == 40.0
    assert shapes.finite({"a": [odd, (1.0, odd)], "b": "NaN"}) == {"a": [None, [1.0, None]], "b": "NaN"}


def test_a_card_that_was_never_read_is_stale_and_silent() -> None:
    metrics = shapes.metrics(3, "GPU-a", {}, None)
    assert (metrics["gpu_id"], metrics["sampled_at"], metrics["age_s"], metrics["stale"]) == (
        3,
        None,
        None,
        True,
    )
    assert metrics["memory_used_bytes"] is None
    assert metrics["throttle_reasons"] == []


def test_a_reading_older_than_three_samples_is_stale() -> None:
    now = timezone.now()
    assert not shapes.metrics(0, "a", {}, now - timedelta(seconds=5.5))["stale"]
    assert shapes.metrics(0, "a", {}, now - timedelta(seconds=6.5))["stale"]
    assert shapes.metrics(0, "a", {}, now + timedelta(seconds=60))["age_s"] == 0  # a clock that was set back


def test_times_are_utc_with_a_z() -> None:
    assert (sample()["sampled_at"] or "").endswith("Z")


def test_the_aggregate_skips_what_is_stale_or_unsaid() -> None:
    stale = shapes.metrics(2, "GPU-c", CardReading(memory_used_bytes=10**12).as_dict(), None)
    both = [
        sample(
            utilization_gpu_percent=10.0, memory_used_bytes=5, temperature_celsius=40.0, power_draw_watts=20.0
        ),
        sample(utilization_gpu_percent=20.0, memory_used_bytes=7, temperature_celsius=60.0),
        stale,
    ]
    result = shapes.aggregate(both)
    assert (result["gpu_count"], result["readable_count"]) == (3, 2)
    assert result["memory_used_bytes"] == 12
    assert result["utilization_gpu_percent"] == 15.0
    assert result["temperature_celsius_max"] == 60.0
    assert result["power_draw_watts"] == 20.0
    assert result["memory_free_bytes"] is None


def test_the_aggregate_of_nothing_readable_is_null() -> None:
    result = shapes.aggregate([shapes.metrics(0, "a", {}, None)])
    assert {name for name, value in result.items() if value is not None} == {"gpu_count", "readable_count"}


def test_processes_are_sorted_by_memory_and_the_unknown_come_last() -> None:
    entries = [{"pid": pid, "memory_used_bytes": used} for pid, used in ((1, None), (2, 5), (3, 9), (4, 0))]
    shown = shapes.by_memory(shapes.process("GPU-a", entry, NOBODY) for entry in entries)
    assert [process["pid"] for process in shown] == [3, 2, 4, 1]
    assert shown[-1]["memory_used_bytes"] is None


@pytest.mark.parametrize(
    ("values", "held", "quarantined", "word"),
    [
        ({}, False, False, "ok"),
        ({"enabled": False}, False, False, "disabled"),
        ({"enabled": False}, True, False, "draining"),
        ({"enabled": False}, True, True, "quarantined"),
        ({"sampled_at": None}, True, True, "stale"),
        ({"sampled_at": None, "lost_at": timezone.now()}, True, True, "lost"),
        ({"lost_at": timezone.now(), "removed_at": timezone.now()}, False, False, "removed"),
    ],
)
def test_health_is_the_first_word_that_holds(
    values: dict[str, Any], held: bool, quarantined: bool, word: str, make_card: MakeCard
) -> None:
    card = make_card(**values)
    shown = shapes.info(card, {"jobs": ["j"] if held else [], "quarantined": quarantined})
    assert shown["health"] == word
    assert bool(shown["health_detail"]) is (word != "ok")


def test_a_silent_host_comes_before_everything(make_card: MakeCard) -> None:
    card: Gpu = make_card(removed_at=timezone.now())
    card.host.agent_seen_at = timezone.now() - timedelta(seconds=16)
    assert shapes.info(card)["health"] == "host_lost"

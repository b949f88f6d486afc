"""The shapes of cards that leave the house, in REST and in frames alike: `info`, `metrics`, `process`, `aggregate`.

What a card does not say is `None`, never 0; `missing` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

from django.utils import timezone

from gpus.models import Gpu
from gpus.owners import NOTHING, Hold, Owner
from gpus.readings import CardReading, is_instance
from gpus.timing import stale_seconds

Health = Literal["host_lost", "removed", "lost", "stale", "quarantined", "draining", "disabled", "ok"]


class Info(TypedDict):
    gpu_id: int
    uuid: str
    host: str
    name: str
    pci_bus_id: str | None
    driver_version: str | None
    cuda_version: str | None
    compute_capability: str | None
    memory_total_bytes: int | None
    mig_mode: bool | None
    mig_parent: str | None
    compute_mode: str | None
    unified_memory: bool
    simulated: bool
    selectable: bool
    health: Health
    health_detail: str
    enabled: bool
    max_jobs: int
    interactive_slots: int
    jobs: list[str]
    first_seen_at: str | None
    last_seen_at: str | None


class Metrics(TypedDict):
    gpu_id: int
    uuid: str
    sampled_at: str | None
    age_s: float | None
    stale: bool
    utilization_gpu_percent: float | None
    utilization_memory_percent: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    memory_reserved_bytes: int | None
    temperature_celsius: float | None
    temperature_slowdown_celsius: float | None
    power_draw_watts: float | None
    power_limit_watts: float | None
    fan_percent: float | None
    clock_sm_mhz: int | None
    clock_memory_mhz: int | None
    performance_state: str | None
    throttle_reasons: list[str]
    ecc_errors_uncorrected: int | None
    pcie_generation: int | None
    pcie_width: int | None
    missing: dict[str, str]


class Process(TypedDict):
    pid: int
    name: str | None
    user: str | None
    type: Literal["compute", "graphics", "mps"]
    gpu_uuid: str
    memory_used_bytes: int | None
    owner: Literal["job", "foreign", "unknown", "self"]
    job_id: str | None
    state: str | None


class Aggregate(TypedDict):
    gpu_count: int
    readable_count: int
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    utilization_gpu_percent: float | None
    temperature_celsius_max: float | None
    power_draw_watts: float | None
    power_limit_watts: float | None


#: What a card says about itself that is shown as it stands.
STATIC = (
    "pci_bus_id",
    "driver_version",
    "cuda_version",
    "compute_capability",
    "mig_mode",
    "mig_parent",
    "compute_mode",
)
UNREAD = CardReading().as_dict()


def iso(moment: datetime | None) -> str | None:
    """UTC ISO 8601 with a Z, as everywhere in the API."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment else None


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity made `None`: JSON knows neither, and both mean "does not say"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def info(gpu: Gpu, hold: Hold = NOTHING) -> Info:
    health, detail = gpu.health(held=bool(hold["jobs"]), quarantined=hold["quarantined"])
    return {
        "gpu_id": gpu.index,
        "uuid": gpu.uuid,
        "host": gpu.host.name,
        "name": gpu.name,
        **{key: gpu.info.get(key) for key in STATIC},  # type: ignore[typeddict-item]
        "memory_total_bytes": gpu.memory_total_bytes,
        "unified_memory": bool(gpu.info.get("unified_memory")),
        "simulated": gpu.simulated,
        "selectable": gpu.selectable,
        "health": health,
        "health_detail": detail,
        "enabled": gpu.enabled,
        "max_jobs": gpu.max_jobs,
        "interactive_slots": gpu.interactive_slots,
        "jobs": hold["jobs"],
        "first_seen_at": iso(gpu.first_seen_at),
        "last_seen_at": iso(gpu.last_seen_at),
    }


def metrics(gpu_id: int, uuid: str, reading: dict[str, Any], sampled_at: datetime | None) -> Metrics:
    """One sample; `reading` is `CardReading.as_dict()`, or `{}` for a card that was never read."""
    age = max(0.0, (timezone.now() - sampled_at).total_seconds()) if sampled_at else None
    return {
        "gpu_id": gpu_id,
        "uuid": uuid,
        "sampled_at": iso(sampled_at),
        "age_s": None if age is None else round(age, 3),
        "stale": age is None or age > stale_seconds(),
        **{key: finite(reading.get(key, nothing)) for key, nothing in UNREAD.items()},  # type: ignore[typeddict-item]
    }


def process(uuid: str, entry: dict[str, Any], owner: Owner) -> Process:
    """A process that a card lists; `entry` is `GpuProcess.as_dict()`."""
    return {
        "pid": entry["pid"],
        "name": entry.get("name"),
        "user": entry.get("user"),
        "type": entry.get("type", "compute"),
        "gpu_uuid": uuid,
        "memory_used_bytes": entry.get("memory_used_bytes"),
        "owner": owner["owner"],  # type: ignore[typeddict-item]
        "job_id": owner["job_id"],
        "state": entry.get("state"),
    }


def by_memory(processes: Iterable[Process]) -> list[Process]:
    """Largest first; those whose memory the driver does not tell come last."""
    return sorted(
        processes, key=lambda p: (p["memory_used_bytes"] is None, -(p["memory_used_bytes"] or 0), p["pid"])
    )


def total(values: Iterable[float | int | None]) -> Any:
    """The sum of what was said; `None` when nothing was."""
    said = [value for value in values if value is not None]
    return sum(said) if said else None


def aggregate(cards: list[Metrics]) -> Aggregate:
    """All cards as one; only cards with a reading that is not stale count. An instance is a part of its card."""
    cards = [card for card in cards if not is_instance(card["uuid"])]
    readable = [card for card in cards if not card["stale"]]
    busy = [
        card["utilization_gpu_percent"] for card in readable if card["utilization_gpu_percent"] is not None
    ]
    heat = [card["temperature_celsius"] for card in readable if card["temperature_celsius"] is not None]
    return {
        "gpu_count": len(cards),
        "readable_count": len(readable),
        "memory_used_bytes": total(card["memory_used_bytes"] for card in readable),
        "memory_total_bytes": total(card["memory_total_bytes"] for card in readable),
        "memory_free_bytes": total(card["memory_free_bytes"] for card in readable),
        "utilization_gpu_percent": round(sum(busy) / len(busy), 1) if busy else None,
        "temperature_celsius_max": max(heat, default=None),
        "power_draw_watts": total(card["power_draw_watts"] for card in readable),
        "power_limit_watts": total(card["power_limit_watts"] for card in readable),
    }

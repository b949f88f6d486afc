"""What a card says: plain data, units in the names, `None` for "does not say".

Each field names the `nvidia-smi --query-gpu=` key that shows the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CardInfo:
    """What stays the same while a card is in its slot."""

    uuid: str  # uuid
    index: int  # index, for people only
    name: str  # name
    pci_bus_id: str  # pci.bus_id
    memory_total_bytes: int | None  # memory.total
    driver_version: str | None = None  # driver_version
    cuda_version: str | None = None
    compute_capability: str | None = None  # compute_cap
    mig_mode: bool | None = None  # mig.mode.current
    mig_parent: str | None = None  # of an instance: the UUID of its card
    mig_place: str | None = None  # of an instance: the numbers of its GPU and compute instance, `1/0`
    compute_mode: str | None = None  # compute_mode
    unified_memory: bool = False  # has none of its own: what is told is the host's
    simulated: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_split(info: Mapping[str, Any]) -> bool:
    """Whether this is a card in MIG mode: no job can use it, only its instances."""
    return bool(info.get("mig_mode")) and not info.get("mig_parent")


def names_of(uuid: str, info: Mapping[str, Any]) -> list[str]:
    """The UUID, and of an instance its name of drivers before 470, which CUDA still takes: `MIG-GPU-…/1/0`."""
    older = f"MIG-{info.get('mig_parent')}/{info.get('mig_place')}"
    return [uuid, older] if info.get("mig_place") else [uuid]


def is_instance(uuid: str) -> bool:
    """Whether this is a MIG instance, a part of a card that is listed too."""
    return uuid.startswith("MIG-")


@dataclass(frozen=True)
class CardReading:
    """One sample of a card. `missing` says, field by field, why a value is `None`."""

    utilization_gpu_percent: float | None = None  # utilization.gpu
    utilization_memory_percent: float | None = None  # utilization.memory: controller busy, not fullness
    memory_total_bytes: int | None = None  # memory.total
    memory_used_bytes: int | None = None  # memory.used
    memory_free_bytes: int | None = None  # memory.free
    memory_reserved_bytes: int | None = None  # memory.reserved
    temperature_celsius: float | None = None  # temperature.gpu
    temperature_slowdown_celsius: float | None = None
    power_draw_watts: float | None = None  # power.draw
    power_limit_watts: float | None = None  # enforced.power.limit
    fan_percent: float | None = None  # fan.speed
    clock_sm_mhz: int | None = None  # clocks.sm
    clock_memory_mhz: int | None = None  # clocks.mem
    performance_state: str | None = None  # pstate
    throttle_reasons: list[str] = field(default_factory=list)  # clocks_event_reasons.active
    ecc_errors_uncorrected: int | None = None  # ecc.errors.uncorrected.volatile.total
    pcie_generation: int | None = None  # pcie.link.gen.current
    pcie_width: int | None = None  # pcie.link.width.current
    missing: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GpuProcess:
    """A process that a card lists; its owner is told later, by `gpus.owners`."""

    pid: int
    name: str | None
    user: str | None
    type: str  # compute | graphics | mps
    memory_used_bytes: int | None
    state: str | None = None  # kernel state letter

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

"""What is free at this moment: cards and CPU slots, memory with reservations, as dispatch and the forms see it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import psutil
from django.conf import settings

from gpus.models import Gpu, Host
from jobs.models import Lease

MIB, GIB = 2**20, 2**30


def reserve_bytes(total: int) -> int:
    """What stays free on a card whatever is asked: max(256 MiB, 2 %)."""
    return max(256 * MIB, total // 50)


@dataclass
class Slots:
    """One resource: its host, its limits, and the leases that hold it."""

    resource: str
    host: Host
    limits: dict[str, int]
    gpu: Gpu | None = None
    leases: list[Lease] = field(default_factory=list)
    host_reserved: int = 0  # what jobs on this host's own memory have still to take

    def taken(self, job_class: str) -> set[int]:
        return {lease.slot for lease in self.leases if lease.job_class == job_class}

    def free_slot(self, job_class: str) -> int | None:
        """The lowest free slot; none while the class is full or a quarantined lease closes the card."""
        if any(lease.state == Lease.State.QUARANTINED for lease in self.leases):
            return None
        taken, limit = self.taken(job_class), self.limits.get(job_class, 0)
        if len(taken) >= limit:
            return None
        return next((n for n in range(limit) if n not in taken), None)

    def reserved_bytes(self) -> int:
        """What running jobs have not taken yet of their estimates."""
        return sum(still_to_take(lease) for lease in self.leases)

    def free_bytes(self) -> int | None:
        """Sampled free memory less reservations; None when the card does not say."""
        sampled = self.gpu.reading.get("memory_free_bytes") if self.gpu else None
        return None if sampled is None else sampled - self.reserved_bytes()

    def capacity_bytes(self) -> int | None:
        """What a job could ever have of this card."""
        total = self.gpu.memory_total_bytes if self.gpu else None
        return None if total is None else total - reserve_bytes(total)

    def fits_now(self, need: int | None) -> bool:
        free = self.free_bytes()
        if need is None or free is None or self.gpu is None:
            return True
        on_host = not self.gpu.simulated or self.host_fits(need)
        return free - reserve_bytes(self.gpu.memory_total_bytes or 0) >= need and on_host

    def host_fits(self, need: int | None) -> bool:
        """Whether the host's own memory holds the job: that of the CPU's jobs and of simulated cards."""
        here = self.host.name == settings.MISTUDIO_HOST_NAME
        return not here or psutil.virtual_memory().available - self.host_reserved >= (need or 0)


def still_to_take(lease: Lease) -> int:
    """Estimate less what was seen, while the job runs; one that ends takes nothing more."""
    if lease.state != Lease.State.ACTIVE:
        return 0
    return max(0, (lease.estimate_bytes or 0) - (lease.observed_bytes or 0))


class Board:
    """All resources of living hosts. `closed` says, per resource, why a card takes nothing at all."""

    def __init__(self) -> None:
        self.slots: dict[str, Slots] = {}
        self.closed: dict[str, str] = {}
        self._add_resources(self._open_leases())
        self._reserve_host_memory()

    @staticmethod
    def _open_leases() -> dict[str, list[Lease]]:
        leases: dict[str, list[Lease]] = defaultdict(list)
        for lease in Lease.objects.filter(ended_at=None).select_related("attempt__job"):
            leases[lease.resource].append(lease)
        return leases

    def _add_resources(self, leases: dict[str, list[Lease]]) -> None:
        for host in Host.objects.all():
            name = f"cpu:{host.name}"
            self._add(Slots(name, host, {"batch": settings.MISTUDIO_CPU_JOBS}, None, leases[name]))
        for gpu in Gpu.objects.select_related("host"):
            limits = {"batch": gpu.max_jobs, "interactive": gpu.interactive_slots}
            self._add(Slots(gpu.resource, gpu.host, limits, gpu, leases[gpu.resource]))

    def _reserve_host_memory(self) -> None:
        on_host = [s for s in self.slots.values() if s.gpu is None or s.gpu.simulated]
        reserved: dict[int, int] = defaultdict(int)
        for slots in on_host:
            reserved[slots.host.pk] += slots.reserved_bytes()
        for slots in on_host:
            slots.host_reserved = reserved[slots.host.pk]

    def _add(self, slots: Slots) -> None:
        self.slots[slots.resource] = slots
        if reason := closed_because(slots):
            self.closed[slots.resource] = reason

    def cards(self) -> list[Slots]:
        return [s for s in self.slots.values() if s.gpu is not None]

    def by_preference(self) -> list[Slots]:
        """Most free memory first; ties: fewest leases, then PCI order."""
        return sorted(self.cards(), key=lambda s: (-(s.free_bytes() or 0), len(s.leases), s.gpu.index))  # type: ignore[union-attr]


def closed_because(slots: Slots) -> str:
    """Why this resource takes no job now, whatever it asks; empty when it is open."""
    if slots.gpu is not None:
        quarantined = any(lease.state == Lease.State.QUARANTINED for lease in slots.leases)
        health, detail = slots.gpu.health(held=bool(slots.leases), quarantined=quarantined)
        if health != "ok":
            return f"card {slots.gpu.index} is {health}: {detail}"
        if not slots.gpu.selectable:
            return f"card {slots.gpu.index} is not offered to miStudio (MISTUDIO_VISIBLE_GPUS)"
    if not slots.host.agent_alive():
        return f"the agent of {slots.host} is silent"
    if not slots.host.worker_alive():
        return f"the worker of {slots.host} is silent"
    return ""

"""What is free at this moment: cards and CPU slots, memory with reservations, as dispatch and the forms see it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psutil
from django.conf import settings
from django.utils import timezone

from gpus import agent_client
from gpus.models import Gpu, Host, Maintenance, within
from gpus.readings import is_split
from gpus.timing import PROCESS_LIST_SECONDS, scaled
from jobs.memory import CardMemory, card_memory, still_to_take
from jobs.models import Job, Lease, WatchdogEvent
from jobs.ownership import LATELY_SECONDS, Known, known_members, owners_among

#: A card that is closed for one of these may open by itself; the others need a person.
PASSING = ("host_lost", "stale", "quarantined", "worker_silent", "driver", "maintenance")
#: On the CPU, too, a long job keeps nobody from a short question.
CPU_INTERACTIVE = 1


@dataclass(frozen=True)
class Closed:
    """Why a resource takes no job at all: a word, and a sentence for people."""

    word: str
    detail: str

    @property
    def passing(self) -> bool:
        return self.word in PASSING


@dataclass
class Slots:
    """One resource: its host, its limits, the leases that hold it, and for a card its memory."""

    resource: str
    host: Host
    limits: dict[str, int]
    gpu: Gpu | None = None
    leases: list[Lease] = field(default_factory=list)
    memory: CardMemory = field(default_factory=lambda: CardMemory(None, None))
    lately_ours: bool = False  # whether a lease is open, or ended a moment ago
    haunted: bool = False  # whether the watchdog told of a ghost on the card: named only
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

    def free_bytes(self) -> int | None:
        """Sampled free memory less reservations; None when the card does not say."""
        return self.memory.free_for_jobs

    @property
    def uses_host_memory(self) -> bool:
        return self.gpu is None or self.gpu.simulated

    def fits_now(self, need: int | None) -> bool:
        return self.memory.holds(need) and (not self.uses_host_memory or self.host_fits(need))

    def host_fits(self, need: int | None) -> bool:
        """Whether the host's own memory holds the job: that of the CPU's jobs and of simulated cards."""
        return (need or 0) <= self.host_room()

    def host_room(self) -> float:
        here = self.host.name == settings.MISTUDIO_HOST_NAME
        return psutil.virtual_memory().available - self.host_reserved if here else math.inf

    def room(self) -> float:
        """The largest job, in bytes, that fits now."""
        return min(self.memory.room_now, self.host_room() if self.uses_host_memory else math.inf)

    def look(self, known: Known) -> None:
        """The card's memory as its row has it; a list that grew old says nothing."""
        if self.gpu is not None:
            current = within(self.gpu.processes_at, 3 * scaled(PROCESS_LIST_SECONDS))
            self.remember(self.gpu.reading, self.gpu.processes if current else [], known)

    def look_again(self) -> bool:
        """The card's memory of this moment, asked of its agent; False when that is silent."""
        assert self.gpu is not None
        answer = agent_client.fresh(self.gpu.uuid) if self.host.name == settings.MISTUDIO_HOST_NAME else None
        if answer is None:
            return False
        self.remember(answer["reading"], answer["processes"], known_members(self.host.name))
        return True

    def take(self, lease: Lease) -> None:
        """One lease more, of a job that has taken no memory yet."""
        self.leases.append(lease)
        if self.gpu is None:
            return
        self.lately_ours = True
        self.memory = replace(self.memory, promised=self.memory.promised + still_to_take(lease, 0))

    def remember(self, reading: dict[str, Any], listed: list[dict[str, Any]], known: Known) -> None:
        assert self.gpu is not None
        owners = owners_among(listed, self.host.name, known)
        total = self.gpu.memory_total_bytes
        self.memory = card_memory(total, reading, listed, owners, self.leases, self.lately_ours)


class Board:
    """All resources of living hosts. `closed` says, per resource, why a card takes nothing at all; `kept`, for which
    job a card is kept free: those behind it in the queue do not start there (`placement.keep`)."""

    def __init__(self) -> None:
        self.slots: dict[str, Slots] = {}
        self.closed: dict[str, Closed] = {}
        self.kept: dict[str, Job] = {}
        self.maintenances = list(Maintenance.in_force())
        self._add_resources(self._leases())
        self._reserve_host_memory()

    @staticmethod
    def _leases() -> dict[str, list[Lease]]:
        leases: dict[str, list[Lease]] = defaultdict(list)
        for lease in Lease.objects.filter(ended_at=None).select_related("attempt__job"):
            leases[lease.resource].append(lease)
        return leases

    def _add_resources(self, leases: dict[str, list[Lease]]) -> None:
        known = {}
        for host in Host.objects.all():
            name, known[host.pk] = f"cpu:{host.name}", known_members(host.name)
            limits = {"batch": settings.MISTUDIO_CPU_JOBS, "interactive": CPU_INTERACTIVE}
            self._add(Slots(name, host, limits, None, leases[name]))
        just_ended, ghosts = lately_ended(), haunted_cards()
        for gpu in Gpu.objects.select_related("host"):
            limits = {"batch": gpu.max_jobs, "interactive": gpu.interactive_slots}
            slots = Slots(gpu.resource, gpu.host, limits, gpu, leases[gpu.resource])
            slots.lately_ours = bool(slots.leases) or gpu.resource in just_ended
            slots.haunted = gpu.uuid in ghosts
            slots.look(known[gpu.host_id])
            self._add(slots)

    def _reserve_host_memory(self) -> None:
        reserved: dict[int, int] = defaultdict(int)
        on_host = [s for s in self.slots.values() if s.gpu is None or s.gpu.simulated]
        for slots in on_host:
            cpu = sum(still_to_take(lease, lease.observed_bytes or 0) for lease in slots.leases)
            reserved[slots.host.pk] += slots.memory.promised if slots.gpu else cpu
        for slots in on_host:
            slots.host_reserved = reserved[slots.host.pk]

    def after(self, leases: Iterable[Lease]) -> Board:
        """This board when these leases have been given too; what else changed since it was made, it does not know."""
        for lease in leases:
            self.slots[lease.resource].take(lease)
        self._reserve_host_memory()
        return self

    def _add(self, slots: Slots) -> None:
        self.slots[slots.resource] = slots
        if reason := self._maintained(slots.host) or closed_because(slots):
            self.closed[slots.resource] = reason

    def _maintained(self, host: Host) -> Closed | None:
        """Before anything else: in a maintenance no card is given, and none is refused for what is done to it."""
        told = [one.sentence for one in self.maintenances if one.host_id in (None, host.pk)]
        return Closed("maintenance", told[0]) if told else None

    def cards(self) -> list[Slots]:
        return [s for s in self.slots.values() if s.gpu is not None]

    def by_preference(self) -> list[Slots]:
        """Most free memory first; ties: fewest leases, then PCI order."""
        return sorted(self.cards(), key=lambda s: (-(s.free_bytes() or 0), len(s.leases), s.gpu.index))  # type: ignore[union-attr]


def lately_ended() -> set[str]:
    """Resources whose last lease ended a moment ago."""
    since = timezone.now() - timedelta(seconds=scaled(LATELY_SECONDS))
    return set(Lease.objects.filter(ended_at__gt=since).values_list("resource", flat=True))


def haunted_cards() -> set[str]:
    """Cards that hold memory or compute for nobody, for three rounds of the watchdog already."""
    told = WatchdogEvent.objects.filter(closed_at=None, finding=WatchdogEvent.Finding.GHOST)
    return set(told.filter(state=WatchdogEvent.State.REPORTED).values_list("gpu_uuid", flat=True))


def closed_because(slots: Slots) -> Closed | None:
    """Why this resource takes no job now, whatever it asks; None when it is open."""
    if slots.gpu is not None and (closed := card_closed(slots.gpu, slots.leases)):
        return closed
    if not slots.host.agent_alive():
        return Closed("host_lost", f"the agent of {slots.host} is silent")
    if not slots.host.worker_alive():
        return Closed("worker_silent", f"the worker of {slots.host} is silent")
    return None


def card_closed(gpu: Gpu, leases: list[Lease]) -> Closed | None:
    if gpu.host.agent_alive() and gpu.host.backend_error and not gpu.simulated and not gpu.removed_at:
        return Closed("driver", gpu.host.backend_error)
    quarantined = any(lease.state == Lease.State.QUARANTINED for lease in leases)
    health, detail = gpu.health(held=bool(leases), quarantined=quarantined)
    if health != "ok":
        return Closed(health, f"card {gpu.index} is {health}: {detail}")
    if is_split(gpu.info):
        return Closed("mig_parent", f"card {gpu.index} is split into MIG instances")
    if not gpu.selectable:
        return Closed(
            "not_selectable", f"card {gpu.index} is not offered to miStudio (MISTUDIO_VISIBLE_GPUS)"
        )
    return None

"""The end of a lease: a card is free when its processes are gone and its memory has come back."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from gpus import agent_client
from jobs import ownership, processes
from jobs.models import Attempt, Lease
from jobs.processes import Process

#: Memory that may stay when the listed processes are gone: driver and rounding.
TOLERANCE_BYTES = 512 * 2**20


def held(attempt: Attempt) -> list[Lease]:
    return list(Lease.objects.filter(attempt=attempt, ended_at=None))


def end_if_free(attempt: Attempt) -> bool:
    """End the attempt's leases if nothing of it is left; True when none is open any more."""
    leases = held(attempt)
    if not leases:
        return True
    if ownership.members(attempt):
        return False
    for lease in leases:
        if _memory_is_back(lease, attempt):
            _end(lease)
    return not held(attempt)


def _end(lease: Lease) -> None:
    Lease.objects.filter(pk=lease.pk, ended_at=None).update(state=Lease.State.ENDED, ended_at=timezone.now())


def _memory_is_back(lease: Lease, attempt: Attempt) -> bool:
    """In a reading taken now: no listed process is ours, and used ≤ listed + reserved + 512 MiB.

    A card that another live lease holds, or whose memory is the whole machine's, is judged by the members alone.
    Without an answer of the agent nothing is known, and the lease waits for the next look.
    """
    if not lease.resource.startswith("gpu:"):
        return True
    if Lease.objects.filter(resource=lease.resource, state=Lease.State.ACTIVE).exclude(pk=lease.pk).exists():
        return True
    fresh = agent_client.fresh(lease.resource.removeprefix("gpu:"))
    if fresh is None:
        return False
    listed = others(fresh["processes"])
    if any(lists(listed, member) for member in processes.recorded(attempt)):
        return False
    if not fresh["lists"] or fresh.get("unified"):
        return True
    return unaccounted_bytes(fresh["reading"], listed) <= TOLERANCE_BYTES


def lists(listed: list[dict[str, Any]], member: Process) -> bool:
    """Whether a card that lists this number means the member: it is alive, or dead and not forgotten; not somebody
    else to whom the number was given since."""
    numbers = {process["pid"] for process in listed}
    return member.pid in numbers and processes.find(member.pid) in (None, member)


def others(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the agent's own processes, which some drivers list on every card."""
    return [process for process in listed if not process.get("own")]


def unaccounted_bytes(reading: dict[str, Any], listed: list[dict[str, Any]]) -> int:
    """Used memory that neither a listed process nor the driver has; 0 where the memory of processes is not told."""
    used, told = reading.get("memory_used_bytes"), [process.get("memory_used_bytes") for process in listed]
    if used is None or None in told:
        return 0
    return max(0, used - sum(filter(None, told)) - (reading.get("memory_reserved_bytes") or 0))


def quarantine(attempt: Attempt) -> None:
    """What did not come back in time closes the card until it does."""
    Lease.objects.filter(attempt=attempt, ended_at=None).update(state=Lease.State.QUARANTINED)


def end_unused(attempt: Attempt) -> None:
    """End the leases of an attempt that no process ever claimed: nothing can hold memory."""
    for open_lease in held(attempt):
        _end(open_lease)

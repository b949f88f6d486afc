"""The end of a lease: a card is free when its processes are gone and its memory has come back."""

from __future__ import annotations

from django.utils import timezone

from gpus import agent_client
from jobs.models import Attempt, Lease
from jobs.processes import members

#: Memory that may stay when the listed processes are gone: driver and rounding.
TOLERANCE_BYTES = 512 * 2**20


def held(attempt: Attempt) -> list[Lease]:
    return list(Lease.objects.filter(attempt=attempt, ended_at=None))


def end_if_free(attempt: Attempt) -> bool:
    """End the attempt's leases if nothing of it is left; True when none is open any more."""
    leases = held(attempt)
    if not leases:
        return True
    if {p for p in members(attempt) if p.pid != attempt.keeper_pid}:
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
    ours = {attempt.work_pid, *(pid for pid, _ in attempt.members)}
    if any(process["pid"] in ours for process in fresh["processes"]):
        return False
    return (
        not fresh["lists"] or fresh.get("unified") or memory_accounted(fresh["reading"], fresh["processes"])
    )


def memory_accounted(reading: dict[str, int | None], processes: list[dict[str, int | None]]) -> bool:
    used, listed = reading.get("memory_used_bytes"), [p.get("memory_used_bytes") for p in processes]
    if used is None or any(value is None for value in listed):
        return True
    return used <= sum(v or 0 for v in listed) + (reading.get("memory_reserved_bytes") or 0) + TOLERANCE_BYTES


def quarantine(attempt: Attempt) -> None:
    """What did not come back in time closes the card until it does."""
    Lease.objects.filter(attempt=attempt, ended_at=None).update(state=Lease.State.QUARANTINED)


def end_unused(attempt: Attempt) -> None:
    """End the leases of an attempt that no process ever claimed: nothing can hold memory."""
    for open_lease in held(attempt):
        _end(open_lease)

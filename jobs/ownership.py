"""Answers of the jobs floor about processes and cards: whose process is that, and what holds this card."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from gpus.owners import Hold, Owner
from gpus.timing import scaled
from jobs import processes
from jobs.models import Attempt, Lease, WatchdogEvent
from jobs.processes import Census, Process

#: So long after a lease of ours, a card may still list its processes, and hold memory for nobody.
LATELY_SECONDS = 15.0
#: Leftovers that the watchdog is ending: their memory comes back, as that of a lease does.
LEAVING = (WatchdogEvent.State.FOUND, WatchdogEvent.State.TERM, WatchdogEvent.State.KILL)


# Members of an attempt ----------------------------------------------------------------------------------


def members(attempt: Attempt, census: Census | None = None) -> set[Process]:
    """Who of the attempt lives, but for its keeper: nobody who belongs to another attempt that is open, as a copied
    token may say, and never us or who started us."""
    census = census or Census()
    found = census.members(attempt) - set(census.lineage(ourselves())) - {keeper_of(attempt)}
    if not found:
        return found
    others = list(open_here().exclude(pk=attempt.pk))
    return {process for process in found if not any(census.proof(process, other) for other in others)}


def ourselves() -> Process:
    me = processes.find(os.getpid())
    assert me is not None
    return me


def keeper_of(attempt: Attempt) -> Process:
    return Process(attempt.keeper_pid or 0, attempt.keeper_start or 0)


def open_here() -> Any:
    """Open attempts of this host; the boot names the host."""
    return Attempt.objects.filter(ended_at=None, boot_id=processes.boot_id())


def remember(attempt: Attempt, found: Iterable[Process]) -> None:
    """Record members before they are signalled: what proves a child may go with its parent."""
    new = [[p.pid, p.start] for p in found if p not in processes.recorded(attempt)]
    if new:
        attempt.members = [*attempt.members, *new]
        Attempt.objects.filter(pk=attempt.pk).update(members=attempt.members)


# Owners of listed processes -----------------------------------------------------------------------------


@dataclass
class Known:
    """The attempts of a host whose leases are open, or ended a moment ago, or of whom somebody is being ended."""

    attempts: list[Attempt]
    census: Census = field(default_factory=Census)

    def job_of(self, process: Process) -> str | None:
        return next((str(a.job_id) for a in self.attempts if self.census.proof(process, a)), None)

    def job_recorded(self, pid: int) -> str | None:
        """By its number alone: of a process that is on another host, or that a card is slow to forget."""
        recorded = ((a, p) for a in self.attempts for p in processes.recorded(a))
        return next((str(attempt.job_id) for attempt, process in recorded if process.pid == pid), None)


def owners_of(host: str, uuid: str, listed: list[dict[str, Any]]) -> list[Owner]:
    """`job` by proof, `self` for the agent, `foreign` for a living process that is none of ours, `unknown` where
    nothing can be proven from here. A driver's pid is a hint: on another host, only what was recorded there counts."""
    return owners_among(listed, host, known_members(host))


def owners_among(listed: list[dict[str, Any]], host: str, known: Known) -> list[Owner]:
    """The same for who has asked already what is known of the host: the many cards of a board."""
    return [owner_of(entry, known, here=host == settings.MISTUDIO_HOST_NAME) for entry in listed]


def known_members(host: str) -> Known:
    lately = timezone.now() - timedelta(seconds=scaled(LATELY_SECONDS))
    held = Q(leases__ended_at=None, leases__isnull=False) | Q(leases__ended_at__gt=lately)
    leaving = Q(watchdog_events__closed_at=None, watchdog_events__state__in=LEAVING)
    return Known(list(Attempt.objects.filter(held | leaving, host__name=host).distinct()))


def owner_of(entry: dict[str, Any], known: Known, *, here: bool) -> Owner:
    if entry.get("own"):
        return {"owner": "self", "job_id": None}
    process = known.census.find(entry["pid"]) if here else None
    job = known.job_of(process) if process else known.job_recorded(entry["pid"])
    if job:
        return {"owner": "job", "job_id": job}
    return {"owner": "foreign" if process else "unknown", "job_id": None}


def holds() -> dict[str, Hold]:
    """By card UUID: jobs with an open lease, and whether one of them is quarantined."""
    table: dict[str, Hold] = {}
    leases = Lease.objects.filter(ended_at=None, resource__startswith="gpu:")
    for resource, state, job_id in leases.values_list("resource", "state", "attempt__job_id"):
        hold = table.setdefault(resource.removeprefix("gpu:"), {"jobs": [], "quarantined": False})
        hold["jobs"].append(str(job_id))
        hold["quarantined"] |= state == Lease.State.QUARANTINED
    return table

"""Answers of the jobs floor to the cards floor: whose process is that, and what holds this card."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from gpus.owners import Hold, Owner
from gpus.timing import scaled
from jobs import processes
from jobs.models import Attempt, Lease
from jobs.processes import Process

#: So long after a lease of ours, a card may still list its processes, and hold memory for nobody.
LATELY_SECONDS = 15.0


@dataclass
class Known:
    """What is recorded of the attempts of a host whose leases are open, or ended a moment ago."""

    processes: dict[Process, str] = field(default_factory=dict)  # recorded ones, and their jobs
    tokens: dict[str, str] = field(default_factory=dict)  # hash of an attempt's token, and its job

    def add(self, attempt: Attempt) -> None:
        job = str(attempt.job_id)
        pairs = [
            *attempt.members,
            (attempt.keeper_pid, attempt.keeper_start),
            (attempt.work_pid, attempt.work_start),
        ]
        self.processes |= {Process(pid, start): job for pid, start in pairs if pid and start}
        if attempt.token_hash:
            self.tokens[attempt.token_hash] = job

    def job_of(self, process: Process) -> str | None:
        """By proof: recorded itself, descended from a recorded one, or carrying the token of an attempt."""
        for ancestor in processes.lineage(process):
            if ancestor in self.processes:
                return self.processes[ancestor]
        return next(
            (job for carried in processes.tokens(process.pid) if (job := self.tokens.get(carried))), None
        )


def owners_of(host: str, uuid: str, listed: list[dict[str, Any]]) -> list[Owner]:
    """`job` by proof, `foreign` for a living process that is none of ours, `unknown` where nothing can be proven
    from here. A driver's pid is a hint: on another host, only what was recorded there counts."""
    return owners_among(listed, host, known_members(host))


def owners_among(listed: list[dict[str, Any]], host: str, known: Known) -> list[Owner]:
    """The same for who has asked already what is known of the host: the many cards of a board."""
    judge = owner_of if host == settings.MISTUDIO_HOST_NAME else recorded
    return [judge(entry["pid"], known) for entry in listed]


def known_members(host: str) -> Known:
    known = Known()
    lately = timezone.now() - timedelta(seconds=scaled(LATELY_SECONDS))
    held = Q(leases__ended_at=None) | Q(leases__ended_at__gt=lately)
    for attempt in Attempt.objects.filter(held, host__name=host, leases__isnull=False).distinct():
        known.add(attempt)
    return known


def owner_of(pid: int, known: Known) -> Owner:
    process = processes.find(pid)
    if process is None:  # nobody has this number any more: a card that lists it is only slow to forget
        return recorded(pid, known)
    job = known.job_of(process)
    return {"owner": "job" if job else "foreign", "job_id": job}


def recorded(pid: int, known: Known) -> Owner:
    job = next((job for process, job in known.processes.items() if process.pid == pid), None)
    return {"owner": "job" if job else "unknown", "job_id": job}


def holds() -> dict[str, Hold]:
    """By card UUID: jobs with an open lease, and whether one of them is quarantined."""
    table: dict[str, Hold] = {}
    leases = Lease.objects.filter(ended_at=None, resource__startswith="gpu:")
    for resource, state, job_id in leases.values_list("resource", "state", "attempt__job_id"):
        hold = table.setdefault(resource.removeprefix("gpu:"), {"jobs": [], "quarantined": False})
        hold["jobs"].append(str(job_id))
        hold["quarantined"] |= state == Lease.State.QUARANTINED
    return table

"""Answers of the jobs floor to the cards floor: whose process is that, and what holds this card."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from gpus.owners import Hold, Owner
from jobs import processes
from jobs.models import Attempt, Lease


def owners_of(host: str, uuid: str, listed: list[dict[str, Any]]) -> list[Owner]:
    """`job` by proof (pid and start ticks of an open attempt), `foreign` for a living process that is none of
    ours, `unknown` where nothing can be proven from here."""
    known = recorded_members(host)
    local = host == settings.MISTUDIO_HOST_NAME
    return [owner_of(entry["pid"], known, local) for entry in listed]


def recorded_members(host: str) -> dict[int, tuple[int, str]]:
    """By pid: start ticks and job of everything recorded for attempts whose leases are open."""
    members: dict[int, tuple[int, str]] = {}
    attempts = Attempt.objects.filter(host__name=host, leases__ended_at=None).distinct()
    for attempt in attempts:
        pairs = [*attempt.members, (attempt.work_pid, attempt.work_start)]
        members |= {pid: (start, str(attempt.job_id)) for pid, start in pairs if pid and start}
    return members


def owner_of(pid: int, known: dict[int, tuple[int, str]], local: bool) -> Owner:
    start, job_id = known.get(pid, (None, None))
    if not local:
        return {"owner": "job" if job_id else "unknown", "job_id": job_id}
    process = processes.find(pid)
    if process is not None and process.start == start:
        return {"owner": "job", "job_id": job_id}
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

"""The list of jobs: filters, pages, and the rows that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib.auth.models import User
from django.db.models import QuerySet

from jobs import places, registry
from jobs.models import Job, Lease, Status
from jobs.serializers import may_see
from monitor import board, words

PAGE = 50
FILTERS = ("status", "kind", "mine", "card")


def page(user: User, asked: Mapping[str, str], size: int = PAGE) -> dict[str, Any]:
    # No database takes a NUL, and PostgreSQL says so with an error.
    chosen = {name: asked.get(name, "").replace("\0", "") for name in FILTERS}
    start = whole(asked.get("from", ""))
    jobs = by_ids(asked["ids"]) if asked.get("ids") else filtered(user, chosen)[start : start + size + 1]
    gpus, shown = board.gpu_map(), list(jobs)
    places.tell(shown)
    remaining = words.remaining_of(shown)
    return {
        "rows": [row(job, user, gpus, remaining) for job in shown[:size]],
        "gpus": gpus,
        "chosen": chosen,
        "any": any(chosen.values()),
        "statuses": Status.values,
        "kinds": registry.choices(),
        "more": more(chosen, start + size) if len(shown) > size else "",
    }


def row(job: Job, user: User, gpus: Mapping[str, Any], remaining: Mapping[str, Any]) -> dict[str, Any]:
    waits = job.status in (Status.QUEUED, Status.STARTING)
    see = may_see(job, user)
    why = words.why_waiting(job, gpus, remaining, see) if waits else None
    return {"job": job, "why": why, "see": see}


def filtered(user: User, chosen: Mapping[str, str]) -> QuerySet[Job]:
    jobs = Job.objects.select_related("owner").order_by("-queued_at")
    if chosen["status"]:
        jobs = jobs.filter(status__in=chosen["status"].split(","))
    if chosen["kind"]:
        jobs = jobs.filter(kind=chosen["kind"])
    if chosen["card"]:
        jobs = jobs.filter(pk__in=ran_on(chosen["card"]))
    return jobs.filter(owner=user) if chosen["mine"] else jobs


def ran_on(uuid: str) -> QuerySet[Any]:
    """Ids of the jobs that ever held a slot of this card: every lease is kept."""
    return Lease.objects.filter(resource=f"gpu:{uuid}").values("attempt__job_id")


def by_ids(ids: str) -> list[Job]:
    """The jobs of a list of ids; what is no id is left out."""
    wanted = []
    for text in ids.split(",")[:PAGE]:
        try:
            wanted.append(UUID(text))
        except ValueError:
            continue
    return list(Job.objects.filter(pk__in=wanted).select_related("owner"))


def whole(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else 0


def more(chosen: Mapping[str, str], start: int) -> str:
    return urlencode({name: value for name, value in chosen.items() if value} | {"from": start})

"""The list of jobs: filters, pages, and the rows that changed. A group is one line, which opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib.auth.models import User
from django.db.models import Exists, OuterRef, QuerySet

from jobs import places, registry
from jobs.models import ACTIVE, Job, JobGroup, Lease, Status
from jobs.serializers import may_see
from monitor import board, links, words

PAGE = 50
FILTERS = ("status", "kind", "mine", "card")


def page(user: User, asked: Mapping[str, str], size: int = PAGE, *, together: bool = True) -> dict[str, Any]:
    """A page of the list, a line per group unless `together` is false; or the rows that a request names."""
    # No database takes a NUL, and PostgreSQL says so with an error.
    chosen = {name: asked.get(name, "").replace("\0", "") for name in FILTERS}
    start, few = whole(asked.get("from", "")), named(asked)
    together = together and not (asked.get("ids") or asked.get("group"))
    jobs = few if few is not None else found(user, chosen, together)[start : start + size + 1]
    shown, gpus = list(jobs), board.gpu_map()
    places.tell(shown)
    return {
        "rows": rows(shown if few is not None else shown[:size], user, gpus, together=together),
        "gpus": gpus,
        "chosen": chosen,
        "any": any(chosen.values()),
        "statuses": Status.values,
        "kinds": registry.choices(),
        "more": more(chosen, start + size) if few is None and len(shown) > size else "",
    }


def found(user: User, chosen: Mapping[str, str], together: bool) -> QuerySet[Job]:
    jobs = filtered(user, chosen)
    return one_per_group(jobs) if together else jobs


def named(asked: Mapping[str, str]) -> QuerySet[Job] | None:
    """What a request names: jobs by `ids`, the members of one `group`, the lines of `groups`; `None` for the list."""
    jobs = Job.objects.select_related("owner")
    if asked.get("group"):
        members = jobs.filter(group_id__in=ids_of(asked["group"])[:1], retries=None)
        return members.order_by("queued_at", "pk")
    if asked.get("groups"):
        return one_per_group(jobs.filter(group_id__in=ids_of(asked["groups"])))
    return jobs.filter(pk__in=ids_of(asked["ids"])) if asked.get("ids") else None


def one_per_group(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """One job for each line of the list: of a group, the last of those that were found. Ids are ordered in time; a
    window would read all jobs for each page."""
    later = jobs.order_by().filter(group_id=OuterRef("group_id"), pk__gt=OuterRef("pk"))
    return jobs.exclude(Exists(later))


def rows(jobs: list[Job], user: User, gpus: Mapping[str, Any], *, together: bool) -> list[dict[str, Any]]:
    """The lines of these jobs; `together`: a job of a group stands for the group."""
    remaining, by_group = words.remaining_of(jobs), grouped(jobs) if together else {}
    return [
        group_row(job, user, by_group[job.group_id])
        if job.group_id in by_group
        else row(job, user, gpus, remaining)
        for job in jobs
    ]


def grouped(jobs: list[Job]) -> dict[UUID | None, dict[str, Any]]:
    """By id, the groups of these jobs with how far they are."""
    groups = JobGroup.objects.filter(pk__in={job.group_id for job in jobs}).select_related("owner")
    found: dict[UUID | None, dict[str, Any]] = {group.pk: {"group": group, "members": []} for group in groups}
    members = Job.objects.filter(group_id__in=list(found), retries=None)
    for member in members.only("status", "progress", "group_id", "gpu_uuids", "gpu_wanted"):
        found[member.group_id]["members"].append(member)
    return found


def group_row(job: Job, user: User, found: Mapping[str, Any]) -> dict[str, Any]:
    see = may_see(found["group"], user)
    return {
        "group": found["group"],
        "job": job,
        "see": see,
        "cards": sorted(held_cards(found["members"]) or asked_cards(found["members"])),
        **links.progress(found["members"]),
    }


def held_cards(members: list[Job]) -> set[str]:
    return {uuid for member in members if member.status in ACTIVE for uuid in member.gpu_uuids}


def asked_cards(members: list[Job]) -> set[str]:
    """The cards that those which have not ended ask for by name."""
    wanted = [member.gpu_wanted for member in members if not member.final]
    return {uuid for request in wanted if not request.startswith("auto") for uuid in request.split(",")}


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


def ids_of(texts: str) -> list[UUID]:
    """What is no id is left out."""
    wanted = []
    for text in texts.split(",")[:PAGE]:
        try:
            wanted.append(UUID(text))
        except ValueError:
            continue
    return wanted


def whole(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else 0


def more(chosen: Mapping[str, str], start: int) -> str:
    return urlencode({name: value for name, value in chosen.items() if value} | {"from": start})

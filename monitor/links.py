"""What leads from a job to others: its group, its retries, what it waits for, who waits for it, what may come next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jobs import chains, groups, registry
from jobs.artifacts import references
from jobs.kind import JobKind
from jobs.models import FINAL, Job, JobGroup, Status


def takers(kind: JobKind) -> Iterator[dict[str, str]]:
    """Kinds that take what this one makes, with the parameter that takes it."""
    made = set(kind.makes)
    for name, other in registry.all_kinds().items():
        taking = (parameter for parameter, field in references(other).items() if made & set(field.types))
        if parameter := next(taking, None):
            yield {"name": name, "label": other.label, "parameter": parameter}


def of(job: Job) -> dict[str, Any]:
    """The job's neighbours, each with its state."""
    links = before(job)
    broken = [] if job.final else [link for link in links if chains.fell_through(link["job"])]
    return {
        "group": group_of(job),
        "retries": list(job.retries.order_by("queued_at")),
        "before": links,
        "behind": behind(job),
        "broken": broken,
        "lacks": any(link["makes"] for link in broken),
    }


def before(job: Job) -> list[dict[str, Any]]:
    """Whose results it takes, and what it was to come after."""
    rows = job.inputs.select_related("source_job", "artifact__job")
    made = [(row.parameter, row.artifact.job if row.artifact else row.source_job) for row in rows]
    found = [{"job": maker, "what": f"makes its {name}", "makes": True} for name, maker in made if maker]
    return found + [{"job": earlier, "what": "comes first", "makes": False} for earlier in job.after.all()]


def behind(job: Job) -> list[dict[str, Any]]:
    """Who takes its result or comes after it."""
    takes = Job.objects.filter(inputs__source_job=job) | Job.objects.filter(inputs__artifact__job=job)
    found = [
        {"job": other, "what": "takes its result"} for other in takes.distinct().order_by("queued_at")[:20]
    ]
    return found + [
        {"job": other, "what": "comes after"} for other in job.followed_by.order_by("queued_at")[:20]
    ]


def group_of(job: Job) -> dict[str, Any] | None:
    group = JobGroup.objects.filter(pk=job.group_id).first() if job.group_id else None
    return {"group": group, **progress(list(groups.members(group)))} if group else None


# A group in a line --------------------------------------------------------------------------------------
#: The state that a group is known by: the first of these that a member has.
WORST = (
    Status.FAILED, Status.REFUSED, Status.HELD, Status.RUNNING, Status.STARTING, Status.QUEUED, Status.PAUSED,
    Status.CANCELLED, Status.SUCCEEDED,
)  # fmt: skip


def progress(members: list[Job]) -> dict[str, Any]:
    """Of a group: how many have ended, how far all are together, and the worst state."""
    states = [member.status for member in members]
    shares = [
        1.0 if member.status in FINAL else (member.progress or {}).get("fraction") or 0.0
        for member in members
    ]
    return {
        "count": len(members),
        "done": states.count(Status.SUCCEEDED),
        "others": {
            state: states.count(state) for state in WORST if state in states and state != Status.SUCCEEDED
        },
        "unfinished": sum(state not in FINAL for state in states),
        "fraction": sum(shares) / len(shares) if shares else 0.0,
        "worst": next((state for state in WORST if state in states), ""),
    }

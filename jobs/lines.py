"""The queue as lines: jobs that ask for the same cards stand in one, highest priority first, then oldest.

Dispatch asks lines, not jobs: of each the first, and others only where the line has room for them. So ten thousand
queued jobs cost what their few lines cost (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, QuerySet, Subquery
from django.utils import timezone

from gpus import choice
from jobs import limits
from jobs.models import Job

ORDER = ("-priority", "queued_at")


@dataclass(frozen=True)
class Line:
    """What its jobs ask for; the name is that of `Job.line`."""

    name: str

    @classmethod
    def of(cls, job: Job) -> Line:
        """The line of a job that stands in one, or would."""
        asks = "cpu" if not job.needs_card else "cpu-whole" if job.device == "cpu" else job.gpu_wanted
        return cls(f"{'interactive' if job.interactive else 'batch'} {asks}")

    @property
    def job_class(self) -> str:
        return self.name.split(" ")[0]

    @property
    def asks(self) -> str:
        return self.name.split(" ")[1]

    @property
    def on_cpu(self) -> bool:
        return self.asks in ("cpu", "cpu-whole")

    @property
    def uuids(self) -> list[str]:
        """The cards that it names; none for `auto` and the CPU."""
        wanted = [] if self.on_cpu else choice.wanted(self.asks)
        return wanted if isinstance(wanted, list) else []

    def jobs(self) -> QuerySet[Job]:
        """All who stand in it, in order, whether they may start yet or not."""
        return Job.objects.filter(line=self.name).order_by(*ORDER)


def startable() -> QuerySet[Job]:
    """Jobs in any line that nothing keeps but the cards."""
    due = Q(not_before=None) | Q(not_before__lte=timezone.now())
    jobs = Job.objects.filter(due, line__isnull=False)
    busy = limits.busy_users()
    return jobs.exclude(owner_id__in=busy) if busy else jobs


def whole(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """With all that judging them reads, in a fixed number of queries."""
    return jobs.select_related("owner").prefetch_related("after", "inputs__source_job", "inputs__artifact")


@dataclass(frozen=True)
class Standing:
    """A line as it stands: who is first of those that may start, and the bytes that its jobs need, from least to
    most; `unknown` where some do not say."""

    line: Line
    first: Job
    least: int | None
    most: int | None
    unknown: bool

    def has_at_most(self, room: float) -> bool:
        return self.unknown or (self.least is not None and self.least <= room)

    def has_over(self, limit: float) -> bool:
        return self.most is not None and self.most > limit


def standing() -> list[Standing]:
    """Every line in which somebody may start, by its first in the order of the queue."""
    firsts = startable().filter(line=OuterRef("line")).order_by(*ORDER).values("pk")[:1]
    known = Job.objects.filter(line__isnull=False).order_by().values("line")
    known = known.annotate(
        least=Min("need_bytes"), most=Max("need_bytes"), told=Count("need_bytes"), all=Count("*")
    )
    found = {row["head"]: row for row in known.annotate(head=Subquery(firsts)) if row["head"]}
    heads = whole(Job.objects.filter(pk__in=found)).order_by(*ORDER)
    return [of_row(head, found[head.pk]) for head in heads]


def of_row(head: Job, row: Mapping[str, Any]) -> Standing:
    return Standing(Line(row["line"]), head, row["least"], row["most"], row["told"] < row["all"])


def place_in_order(job: Job) -> tuple[int, object]:
    return -job.priority, job.queued_at


def ahead_of(job: Job) -> Q:
    """Whoever is asked before this job."""
    return Q(priority__gt=job.priority) | Q(priority=job.priority, queued_at__lt=job.queued_at)


def any_of(conditions: Iterable[Q]) -> Q:
    return reduce(or_, conditions)

"""The queue as lines: jobs that ask for the same cards stand in one, highest priority first, then oldest.

Dispatch asks lines, not jobs: of each the first, and others only where the line has room for them. So ten thousand
queued jobs cost what their few lines cost, and why a job far down the line waits is said when somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Count, Max, Min, OuterRef, Q, QuerySet, Subquery
from django.utils import timezone

from gpus import choice
from gpus.models import Gpu
from jobs import limits
from jobs.models import Job, Status
from jobs.waits import Wait

ORDER = ("-priority", "queued_at")
#: So far down a line an expected start is told, from what is known of those before.
TOLD = 50
#: Reasons whose details speak of cards, and of other jobs by their names alone.
OF_CARDS = ("lease", "memory", "kept", "card", "driver", "host", "slot", "maintenance")


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


def of_row(head: Job, row: dict[str, Any]) -> Standing:
    return Standing(Line(row["line"]), head, row["least"], row["most"], row["told"] < row["all"])


def place_in_order(job: Job) -> tuple[int, object]:
    return -job.priority, job.queued_at


def ahead_of(job: Job) -> Q:
    """Whoever is asked before this job."""
    return Q(priority__gt=job.priority) | Q(priority=job.priority, queued_at__lt=job.queued_at)


# Why not yet, when somebody asks -------------------------------------------------------------------------------


def tell(jobs: Iterable[Job]) -> None:
    """Set `waiting_for` of the queued ones to why they wait now. Dispatch writes that down for the first of a line
    only; the rows are not saved."""
    waiting = [job for job in jobs if job.status == Status.QUEUED and job.line and not later(job)]
    busy = limits.busy_users() if waiting else {}
    by_line: dict[str, list[Job]] = defaultdict(list)
    for job in waiting:
        if job.owner_id in busy:
            say(job, limits.wait_of(busy[job.owner_id]))
        else:
            by_line[job.line].append(job)
    cards = list(Gpu.objects.filter(removed_at=None).order_by("index")) if by_line else []
    for name, asking in by_line.items():
        Front(Line(name), cards).tell(asking)


def later(job: Job) -> bool:
    """Whether its launch did not come up, and the next one is not due."""
    return job.not_before is not None and job.not_before > timezone.now()


def say(job: Job, wait: Wait) -> None:
    since = (job.waiting_for or {}).get("since") or job.queued_at.isoformat()
    job.waiting_for = wait.as_dict() | {"since": since}


class Front:
    """The beginning of a line as it stands now."""

    def __init__(self, line: Line, known: list[Gpu]) -> None:
        self.line = line
        self.cards = cards_of(line, known)
        self.head = line.jobs().only("waiting_for").first()

    def tell(self, asking: list[Job]) -> None:
        """The first of the line says itself why it waits; of the others, how many stand before each."""
        for job, before in self.counted(asking):
            if before and self.head:
                say(job, self.turn(self.head, before))

    def turn(self, head: Job, before: int) -> Wait:
        uuid = self.line.uuids[0] if len(self.line.uuids) == 1 else None
        says = head.waiting_for or {}
        detail = f"{ordinal(before + 1)} in line for {self.asked()}"
        if says.get("reason") in OF_CARDS:  # other messages are its owner's
            detail += f"; the first waits: {says['detail']}"
        return Wait("turn", detail, uuid, str(head.pk), self.expected(says.get("eta_seconds"), before))

    def counted(self, asking: list[Job]) -> list[tuple[Job, int]]:
        """Each with how many stand before it, in two queries: those of one page mostly stand together."""
        first, last = min(asking, key=place_in_order), max(asking, key=place_in_order)
        before = self.line.jobs().filter(ahead_of(first)).count()
        among = self.line.jobs().exclude(ahead_of(first)).filter(Q(pk=last.pk) | ahead_of(last))
        here = {pk: before + n for n, pk in enumerate(among.values_list("pk", flat=True))}
        return [(job, here.get(job.pk, before)) for job in asking]

    def asked(self) -> str:
        if self.line.on_cpu:
            return "the CPU"
        named = ", ".join(str(card.index) for card in self.cards)
        return f"card {named}" if self.line.uuids else "any card"

    def expected(self, waits: float | None, before: int) -> float | None:
        """Seconds until so many have started: what the first still waits, then the others, over all slots."""
        if waits is None or before > TOLD or not (slots := self.slots()):
            return None
        takes = [seconds for (seconds,) in self.line.jobs().values_list("estimate__seconds")[:before]]
        return None if None in takes else waits + sum(takes) / slots

    def slots(self) -> int:
        if self.line.on_cpu:
            return settings.MISTUDIO_CPU_JOBS if self.line.asks == "cpu" else 1
        limit = "interactive_slots" if self.line.job_class == "interactive" else "max_jobs"
        return sum(getattr(card, limit) for card in self.cards)


def cards_of(line: Line, known: list[Gpu]) -> list[Gpu]:
    """Those that it names; for `auto` all that are in use."""
    if line.on_cpu:
        return []
    used = [card for card in known if card.enabled and card.selectable]
    return [card for card in known if card.uuid in line.uuids] if line.uuids else used


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `11th`."""
    teen = 10 <= number % 100 <= 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"

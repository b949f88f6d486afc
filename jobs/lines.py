"""The queue as lines: jobs that ask for the same cards stand in one, highest priority first, then oldest.

Dispatch asks lines, not jobs: of each the first, and others only where the line has room for them. So ten thousand
queued jobs cost what their few lines cost, and why a job far down the line waits is said when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.conf import settings
from django.db.models import Count, OuterRef, Q, QuerySet, Subquery
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
OF_CARDS = ("lease", "memory", "kept", "card", "driver", "host", "slot")


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


def heads() -> list[Job]:
    """The first startable job of every line, in the order of the queue."""
    firsts = startable().filter(line=OuterRef("line")).order_by(*ORDER).values("pk")[:1]
    lines = Job.objects.filter(line__isnull=False).order_by().values("line").annotate(n=Count("pk"))
    found = lines.annotate(head=Subquery(firsts)).values_list("head", flat=True)
    return list(whole(Job.objects.filter(pk__in=[pk for pk in found if pk])).order_by(*ORDER))


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
    fronts: dict[str, Front] = {}
    for job in waiting:
        if job.owner_id in busy:
            say(job, limits.wait_of(busy[job.owner_id]))
            continue
        front = fronts.get(job.line) or fronts.setdefault(job.line, Front(Line(job.line)))
        if wait := front.wait(job):
            say(job, wait)


def later(job: Job) -> bool:
    """Whether its launch did not come up, and the next one is not due."""
    return job.not_before is not None and job.not_before > timezone.now()


def say(job: Job, wait: Wait) -> None:
    since = (job.waiting_for or {}).get("since") or job.queued_at.isoformat()
    job.waiting_for = wait.as_dict() | {"since": since}


class Front:
    """The first of a line as they stand now, and what is known of how long they take."""

    def __init__(self, line: Line) -> None:
        self.line = line
        shown = ("waiting_for", "estimate", "priority", "queued_at")
        self.first = list(line.jobs().only(*shown)[: TOLD + 1])
        self.cards = cards_of(line)

    def wait(self, job: Job) -> Wait | None:
        """Why a job that is not the first of the line waits; the first says so itself."""
        before = self.before(job)
        if before == 0 or not self.first:
            return None
        head = self.first[0]
        detail = f"{ordinal(before + 1)} in line for {self.asked()}{self.first_says()}"
        uuid = self.line.uuids[0] if len(self.line.uuids) == 1 else None
        return Wait("turn", detail, uuid, str(head.pk), self.expected(before) if before <= TOLD else None)

    def before(self, job: Job) -> int:
        here = next((n for n, other in enumerate(self.first) if other.pk == job.pk), None)
        return here if here is not None else self.line.jobs().filter(ahead_of(job)).count()

    def asked(self) -> str:
        if self.line.on_cpu:
            return "the CPU"
        named = ", ".join(str(card.index) for card in self.cards)
        return f"card {named}" if self.line.uuids else "any card"

    def first_says(self) -> str:
        """What the first waits for, unless that is a message of its own that not everybody may read."""
        says = self.first[0].waiting_for or {}
        return f"; the first waits: {says['detail']}" if says.get("reason") in OF_CARDS else ""

    def expected(self, before: int) -> float | None:
        """Seconds until so many have started: what the first still waits, then the others, over all slots."""
        waits = (self.first[0].waiting_for or {}).get("eta_seconds")
        takes = [(job.estimate or {}).get("seconds") for job in self.first[:before]]
        slots = self.slots()
        return None if waits is None or None in takes or not slots else waits + sum(takes) / slots

    def slots(self) -> int:
        if self.line.on_cpu:
            return settings.MISTUDIO_CPU_JOBS if self.line.asks == "cpu" else 1
        limit = "interactive_slots" if self.line.job_class == "interactive" else "max_jobs"
        return sum(getattr(card, limit) for card in self.cards)


def cards_of(line: Line) -> list[Gpu]:
    """Those that it names; for `auto` all that are in use."""
    if line.on_cpu:
        return []
    cards = Gpu.objects.filter(removed_at=None).order_by("index")
    return list(
        cards.filter(uuid__in=line.uuids) if line.uuids else cards.filter(enabled=True, selectable=True)
    )


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `11th`."""
    teen = 10 <= number % 100 <= 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"

"""Why a queued job waits, said when somebody asks: its place in its line, and when its turn may come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from django.conf import settings
from django.db.models import Count, OuterRef, Q, Subquery
from django.utils import timezone

from gpus.models import Gpu
from jobs import limits
from jobs.lines import ORDER, Line, ahead_of, any_of, place_in_order
from jobs.models import Job, Status
from jobs.waits import Wait

#: So far down a line an expected start is told, from what is known of those before.
TOLD = 50
#: Reasons whose details speak of cards, and of other jobs by their names alone.
OF_CARDS = ("lease", "memory", "kept", "card", "driver", "host", "slot", "maintenance")


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
    if by_line:
        Places(by_line).tell()


def later(job: Job) -> bool:
    """Whether its launch did not come up, and the next one is not due."""
    return job.not_before is not None and job.not_before > timezone.now()


def say(job: Job, wait: Wait) -> None:
    since = (job.waiting_for or {}).get("since") or job.queued_at.isoformat()
    job.waiting_for = wait.as_dict() | {"since": since}


class Places:
    """Where jobs stand in their lines: a fixed number of queries, however many lines and jobs these are."""

    def __init__(self, asking: Mapping[str, list[Job]]) -> None:
        self.asking = {name: sorted(jobs, key=place_in_order) for name, jobs in asking.items()}
        self.heads = heads_of(asking)
        self.cards = list(Gpu.objects.filter(removed_at=None).order_by("index"))
        self.before = self.counted()
        self.takes = self.seconds()

    def tell(self) -> None:
        """The first of a line says itself why it waits; of the others, how many stand before each."""
        for name, jobs in self.asking.items():
            for job in jobs:
                if name in self.heads and self.before.get(job.pk):
                    say(job, self.turn(Line(name), self.before[job.pk]))

    def turn(self, line: Line, before: int) -> Wait:
        head, cards = self.heads[line.name], cards_of(line, self.cards)
        says = head.waiting_for or {}
        detail = f"{ordinal(before + 1)} in line for {asked_by(line, cards)}"
        if says.get("reason") in OF_CARDS:  # other messages are its owner's
            detail += f"; the first waits: {says['detail']}"
        uuid = line.uuids[0] if len(line.uuids) == 1 else None
        return Wait("turn", detail, uuid, str(head.pk), self.expected(line, cards, before))

    def counted(self) -> dict[Any, int]:
        """By job, how many stand before it. Those of one page mostly stand together: who is among them is listed."""
        ahead = any_of(Q(line=name) & ahead_of(jobs[0]) for name, jobs in self.asking.items())
        before = dict(Job.objects.filter(ahead).order_by().values_list("line").annotate(n=Count("pk")))
        here = any_of(Q(line=name) & from_to(jobs[0], jobs[-1]) for name, jobs in self.asking.items())
        found: dict[Any, int] = {}
        for line, pk in Job.objects.filter(here).order_by("line", *ORDER).values_list("line", "pk"):
            found[pk] = before.setdefault(line, 0)
            before[line] += 1
        return found

    def seconds(self) -> dict[str, list[float | None]]:
        """By line, what those near its beginning take, in order; where the first knows how long it still waits."""
        last = {
            name: near[-1]
            for name, jobs in self.asking.items()
            if self.waits_of(name) is not None
            and (near := [job for job in jobs if 0 < self.before.get(job.pk, 0) <= TOLD])
        }
        found: dict[str, list[float | None]] = defaultdict(list)
        if last:
            rows = Job.objects.filter(any_of(Q(line=name) & ahead_of(job) for name, job in last.items()))
            for line, takes in rows.order_by("line", *ORDER).values_list("line", "estimate__seconds"):
                found[line].append(takes)
        return found

    def waits_of(self, name: str) -> float | None:
        head = self.heads.get(name)
        return (head.waiting_for or {}).get("eta_seconds") if head else None

    def expected(self, line: Line, cards: list[Gpu], before: int) -> float | None:
        """Seconds until so many have started: what the first still waits, then the others, over all slots."""
        waits, takes, slots = self.waits_of(line.name), self.takes[line.name][:before], slots_of(line, cards)
        if waits is None or len(takes) < before or None in takes or not slots:
            return None
        return waits + sum(seconds or 0 for seconds in takes) / slots


def heads_of(names: Iterable[str]) -> dict[str, Job]:
    """The first of each line, whether it may start yet or not."""
    firsts = Job.objects.filter(line=OuterRef("line")).order_by(*ORDER).values("pk")[:1]
    known = Job.objects.filter(line__in=list(names)).order_by().values("line").annotate(n=Count("pk"))
    heads = known.annotate(head=Subquery(firsts)).values_list("head", flat=True)
    return {job.line: job for job in Job.objects.filter(pk__in=list(heads)).only("line", "waiting_for")}


def from_to(first: Job, last: Job) -> Q:
    """Both and whoever stands between them."""
    return ~ahead_of(first) & (Q(pk=last.pk) | ahead_of(last))


def asked_by(line: Line, cards: list[Gpu]) -> str:
    """What a line is for, in words."""
    if line.on_cpu:
        return "the CPU"
    return f"card {', '.join(str(card.index) for card in cards)}" if line.uuids else "any card"


def slots_of(line: Line, cards: list[Gpu]) -> int:
    if line.on_cpu:
        return settings.MISTUDIO_CPU_JOBS if line.asks == "cpu" else 1
    limit = "interactive_slots" if line.job_class == "interactive" else "max_jobs"
    return sum(getattr(card, limit) for card in cards)


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

"""What earlier jobs of a kind took, held against their formula: how estimates become better than it.

Memory is compared within one kind, one sort of device and one class of size; seconds within one kind and device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from django.conf import settings

from gpus import choice
from jobs.kind import Estimate, JobKind
from jobs.models import Job, Status

#: So many of the newest jobs are asked; rates follow what the host does now.
NEWEST, NEWEST_RATES = 50, 10
#: The larger of two jobs does so many times the work of the smaller, or their difference says nothing.
APART = 2
#: Beyond the largest share of its formula that a job took.
MARGIN = 1.05
#: A formula is lowered only where so many jobs took less, and never by more than this.
ENOUGH, LOWEST = 5, 0.7


@dataclass(frozen=True)
class Past:
    """One job that succeeded: the sum of its formula and its peak in bytes, its work and its seconds."""

    formula: int
    peak: int | None
    work: float | None
    seconds: float | None

    @property
    def share(self) -> float | None:
        return self.peak / self.formula if self.peak and self.formula else None


def corrected(estimate: Estimate, kind: JobKind, needs_card: bool) -> Estimate:
    """The formula's estimate by what was measured; `breakdown` remains the formula's. Never below what a job of this
    class of size took."""
    past = recent(kind.name, needs_card)
    shares = [p.share for p in past if p.share and of_one_size(p.formula, estimate.memory_bytes)]
    if shares and estimate.memory_bytes:
        factor, basis = factor_of(shares), f"measured on {len(shares)} job{'s'[: len(shares) > 1]}"
        if factor != 1:
            estimate = replace(estimate, memory_bytes=math.ceil(estimate.memory_bytes * factor), basis=basis)
    took = [(p.work, p.seconds) for p in past if p.work and p.seconds][:NEWEST_RATES]
    if took and estimate.work:
        start, rate = line(took)
        return replace(estimate, seconds=round(start + rate * estimate.work, 1))
    return estimate


def line(took: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds that a job takes whatever its size, and seconds per unit of work: the median over all pairs of jobs
    (Theil-Sen). Where the jobs are of one size, or do not tell, all seconds are of the work."""
    pairs = [pair for pair in combinations(sorted(took), 2) if pair[1][0] >= APART * pair[0][0]]
    rate = statistics.median([(s2 - s1) / (w2 - w1) for (w1, s1), (w2, s2) in pairs] or [0.0])
    if rate <= 0:
        return 0.0, statistics.median(seconds / work for work, seconds in took)
    return max(0.0, statistics.median(seconds - rate * work for work, seconds in took)), rate


def factor_of(shares: list[float]) -> float:
    """What the formula is multiplied with: up as soon as one job took more, down once enough took less."""
    widest = max(shares) * MARGIN
    return max(widest, LOWEST) if widest > 1 or len(shares) >= ENOUGH else 1.0


def of_one_size(formula: int, other: int | None) -> bool:
    """Whether two formulas fall into the same half octave."""
    return bool(formula and other) and round(2 * math.log2(formula)) == round(2 * math.log2(other or 1))


def recent(kind_name: str, needs_card: bool) -> list[Past]:
    """The newest first. What simulated cards and the CPU measured says nothing about real cards."""
    done = Job.objects.filter(
        kind=kind_name, status=Status.SUCCEEDED, estimate__isnull=False, stage="", **device(needs_card)
    )
    columns = ("estimate", "peak_memory_bytes", "started_at", "finished_at", "attempt", "retry_from")
    rows = done.order_by("-finished_at").values(*columns)[:NEWEST]
    return [past(row) for row in rows]


def device(needs_card: bool) -> dict[str, Any]:
    """The sort of device that a job of now would run on, as rows tell it."""
    if not needs_card or choice.cpu_allowed():
        return {"device": "cpu"}
    return {"device": "cuda", "simulated": settings.MISTUDIO_GPU_BACKEND == "simulated"}


def past(row: Mapping[str, Any]) -> Past:
    """Seconds count only where one attempt did it all from the start."""
    told = row["estimate"]
    whole = row["attempt"] == 1 and not row["retry_from"] and row["started_at"] and row["finished_at"]
    seconds = (row["finished_at"] - row["started_at"]).total_seconds() if whole else None
    formula = sum((told.get("breakdown") or {}).values())
    return Past(formula, row["peak_memory_bytes"], told.get("work"), seconds)

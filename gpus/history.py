"""The history of the cards, as pages and programs ask for it: curves on one time axis, gaps as gaps.

    GpuSample (48 h) ─(every 60 s, gpus.rollups)─▶ GpuMinute (35 d) ─▶ GpuHour (2 y)
        └──────────────────────────────────────────────┴───────────────────┴──▶ query

A query takes the coarsest table that its resolution allows and, where that is not rolled up yet, the finer one; so
its answer is the same whenever the roll-up ran last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connection, models
from django.utils import timezone

from gpus import samples
from gpus.models import GpuHour, GpuMinute, GpuSample, GpuSeries
from gpus.samples import HOUR, METRICS, MINUTE, SECOND, SPAN, Metric
from gpus.timing import sample_seconds

#: Seconds. Each divides the next table's period, so that a step never cuts a minute or an hour.
STEPS = (
    *(1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30),
    *(60 * n for n in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30)),
    *(3600 * n for n in (1, 2, 3, 4, 6, 8, 12, 24)),
)
DAY = 86_400
MAX_POINTS = 2_000
#: Over all cards of one answer: 64 cards get 312 points each, whatever was asked for.
MAX_POINTS_TOGETHER = 20_000


@dataclass
class Series:
    """One card's curve, as long as its window's `t`; `None` is a gap. Units of the metric."""

    min: list[float | int | None] = field(default_factory=list)
    mean: list[float | int | None] = field(default_factory=list)
    max: list[float | int | None] = field(default_factory=list)


@dataclass
class Window:
    """Curves of several cards on one time axis. `t`: starts of the steps in seconds since 1970, as charts want them."""

    metric: Metric
    resolution_s: int
    t: list[int]
    series: dict[str, Series]


class Bucket(NamedTuple):
    """What a step holds of one card, in stored integers."""

    low: int
    total: int
    readings: int
    high: int

    def __add__(self, other: Bucket) -> Bucket:  # type: ignore[override]
        return Bucket(
            min(self.low, other.low),
            self.total + other.total,
            self.readings + other.readings,
            max(self.high, other.high),
        )


Buckets = dict[str, dict[int, Bucket]]


def last(minutes: float, metric: str, uuids: Sequence[str], points: int = 300) -> Window:
    """What a page draws: the last `minutes` of these cards, up to now."""
    now = timezone.now()
    return query(metric, uuids, now - timedelta(minutes=minutes), now, points, now=now)


def query(
    metric: str,
    uuids: Sequence[str],
    start: datetime,
    end: datetime,
    points: int = 300,
    now: datetime | None = None,
    step: int | None = None,
) -> Window:
    """One metric of these cards from `start` to `end`, in about `points` equal steps of a round length.

    `step` (seconds, of `STEPS`) instead of `points`: the end of a longer window, on that window's axis.

    Steps begin at multiples of their length, so windows that follow each other share them. A card without history is
    all gaps. The step that is under way is there as soon as it holds something.
    """
    now = now or timezone.now()
    points = min(points, max(1, MAX_POINTS_TOGETHER // max(1, len(uuids))))
    step = step or resolution(start, end, points, now)
    first, end_ms = samples.floor(samples.milliseconds(start), step * SECOND), samples.milliseconds(end)
    found = _read(METRICS[metric], uuids, first, end_ms, step * SECOND)
    t = list(range(first // SECOND, -(-end_ms // SECOND), step))
    under_way = t[-1] + step > now.timestamp()
    if len(t) > 1 and under_way and not any(t[-1] // step in buckets for buckets in found.values()):
        t.pop()
    curves = {uuid: _series(METRICS[metric], found.get(uuid, {}), [at // step for at in t]) for uuid in uuids}
    return Window(METRICS[metric], step, t, curves)


def resolution(start: datetime, end: datetime, points: int, now: datetime) -> int:
    """Seconds of a step: enough for `points`, at least what is kept of that time, and two readings or more.

    With room for one reading only, the beat's own jitter would leave steps empty that are no gaps.
    """
    wanted = (end - start).total_seconds() / points
    wanted = max(wanted, 2 * sample_seconds())
    if start < now - samples.RAW_KEPT:
        wanted = max(wanted, 60)
    if start < now - samples.MINUTES_KEPT:
        wanted = max(wanted, 3600)
    return next((step for step in STEPS if step >= wanted), DAY * int(-(-wanted // DAY)))


def _series(metric: Metric, buckets: dict[int, Bucket], numbers: list[int]) -> Series:
    series = Series()
    for number in numbers:
        bucket = buckets.get(number)
        series.min.append(metric.shown(bucket.low if bucket else None))
        series.mean.append(metric.shown(bucket.total / bucket.readings if bucket else None))
        series.max.append(metric.shown(bucket.high if bucket else None))
    return series


def _read(metric: Metric, uuids: Sequence[str], start: int, end: int, step: int) -> Buckets:
    """The buckets by card and number. Cards that are rolled up equally far, as most always are, are read together.

    The database sums up a day at most: two years of a large card's bytes are more than 64 bits.
    """
    part = min(step, DAY * SECOND)
    found: Buckets = defaultdict(dict)
    together: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for one in GpuSeries.objects.filter(uuid__in=uuids):
        together[one.hours_to, one.minutes_to][one.pk] = one.uuid
    for (hours_to, minutes_to), names in together.items():
        for table, since, until in _parts(start, end, step, hours_to, minutes_to):
            for number, at, low, total, count, high in _aggregate(
                table, metric.column, list(names), since, until, part
            ):
                bucket = Bucket(low, int(total), int(count), high)
                of_card, at_step = found[names[number]], at * part // step
                of_card[at_step] = of_card[at_step] + bucket if at_step in of_card else bucket
    return found


def _parts(
    start: int, end: int, step: int, hours_to: int, minutes_to: int
) -> Iterator[tuple[type[models.Model], int, int]]:
    """Up to three tables that follow each other in time: hours and minutes as far as step and roll-up allow."""
    reach = ((GpuHour, HOUR, hours_to), (GpuMinute, MINUTE, minutes_to), (GpuSample, 1, end))
    for table, period, rolled_to in reach:
        until = min(rolled_to, end)
        if step >= period and start < until:
            yield table, start, until
            start = until


def _aggregate(
    table: type[models.Model], column: str, numbers: list[int], since: int, until: int, step: int
) -> list[tuple[Any, ...]]:
    """(series, bucket, min, sum, count, max) in one statement, without those that hold no value.

    The join is one range of the table's key for each card; CROSS JOIN keeps SQLite from turning it around.
    """
    sql = samples.summary(table, column)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT s.id, (h.id - s.id * {SPAN}) / %s, {sql['min']}, {sql['sum']}, {sql['count']}, {sql['max']}"  # noqa: S608
            f" FROM gpus_gpuseries s CROSS JOIN {table._meta.db_table} h"
            f" WHERE s.id IN ({', '.join(['%s'] * len(numbers))})"
            f" AND h.id >= s.id * {SPAN} + %s AND h.id < s.id * {SPAN} + %s"
            f" GROUP BY 1, 2 HAVING {sql['count']} > 0",
            [step, *numbers, since, until],
        )
        return cursor.fetchall()

"""Keeping the history small: readings become minutes and hours, and what is old goes.

Both are rung by beat and may be rung twice, late, or never: each transaction leaves the tables right, says how far it
came in `GpuSeries`, and the next one goes on from there. None holds the database for more than some 50 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db import connection, models, transaction
from django.db.models import Q
from django.utils import timezone

from gpus import samples
from gpus.models import GpuHour, GpuMinute, GpuSample, GpuSeries
from gpus.samples import HOUR, METRICS, MINUTE
from gpus.timing import scaled

#: Readings of a minute come in until this long after it; later ones set the roll-up back, which is right but work.
GRACE_SECONDS = 10.0
#: A transaction ends after the card during which this is over, so that the agent's beat is not kept waiting.
HOLD_SECONDS = 0.03
#: Of one card in one go: 10 800 readings, 14 400 minutes.
MINUTES_AT_ONCE, HOURS_AT_ONCE = 6 * HOUR, 240 * HOUR
#: Rows of one delete, and the moment after it in which others get their turn.
ROWS_AT_ONCE, BREATH_SECONDS = 2_000, 0.01
#: A task ends within two seconds; what is left is for the next.
TASK_SECONDS = 1.5


# Rolling up -------------------------------------------------------------------------------------------


def roll_up(now: datetime | None = None, seconds: float = TASK_SECONDS) -> bool:
    """Everything up to the last whole minute, or as much as `seconds` allow; returns whether it was all."""
    until = samples.floor(
        samples.milliseconds((now or timezone.now()) - timedelta(seconds=scaled(GRACE_SECONDS))), MINUTE
    )
    deadline = time.monotonic() + seconds
    while not (done := _round(until)) and time.monotonic() < deadline:
        pass
    return done


def _round(until: int) -> bool:
    """One transaction over the cards that are behind; whether none is any more."""
    began = time.monotonic()
    with transaction.atomic():
        behind = Q(minutes_to__lt=until) | Q(hours_to__lt=samples.floor(until, HOUR), minutes_to__gte=until)
        for series in GpuSeries.objects.select_for_update().filter(behind).order_by("pk"):
            _advance(series, until)
            if time.monotonic() - began > HOLD_SECONDS:
                break
    return not GpuSeries.objects.filter(behind).exists()


def _advance(series: GpuSeries, until: int) -> None:
    series.minutes_to = _fill(
        GpuMinute, GpuSample, series.pk, series.minutes_to, until, MINUTE, MINUTES_AT_ONCE
    )
    whole_hours = samples.floor(series.minutes_to, HOUR)
    series.hours_to = _fill(GpuHour, GpuMinute, series.pk, series.hours_to, whole_hours, HOUR, HOURS_AT_ONCE)
    series.save(update_fields=["minutes_to", "hours_to"])


def _fill(
    table: type[models.Model],
    source: type[models.Model],
    number: int,
    since: int,
    until: int,
    period: int,
    at_once: int,
) -> int:
    """Make `table` right from `since` for a stretch with rows in `source`; how far it is right now."""
    rows = source._default_manager.filter(
        pk__gte=samples.key(number, since), pk__lt=samples.key(number, until)
    )
    first = rows.order_by("pk").values_list("pk", flat=True).first()
    if first is None:
        return max(since, until)
    start = samples.floor(samples.time_of(first), period)
    end = min(start + at_once, until)
    _summarize(table, source, samples.key(number, start), samples.key(number, end), period)
    return end


def _summarize(
    table: type[models.Model], source: type[models.Model], low: int, high: int, period: int
) -> None:
    """`INSERT … SELECT … GROUP BY period`, over rows that an earlier run may have left."""
    columns = {
        f"{metric.column}_{part}": sql
        for metric in METRICS.values()
        for part, sql in samples.summary(source, metric.column).items()
    }
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table._meta.db_table} (id, {', '.join(columns)})"  # noqa: S608
            f" SELECT id - id %% {samples.SPAN} %% %s, {', '.join(columns.values())}"
            f" FROM {source._meta.db_table} WHERE id >= %s AND id < %s GROUP BY 1"
            f" ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in columns)}",
            [period, low, high],
        )


# Pruning ----------------------------------------------------------------------------------------------


def prune(now: datetime | None = None, seconds: float = TASK_SECONDS) -> bool:
    """Delete what each table need not keep and what is in the next one; returns whether nothing is left to delete."""
    moment = samples.milliseconds(now or timezone.now())
    deadline = time.monotonic() + seconds
    for table, low, high in _old(moment):
        while _delete_some(table, low, high):
            if time.monotonic() > deadline:
                return False
            time.sleep(BREATH_SECONDS)
    return True


def _old(now: int) -> Iterator[tuple[type[models.Model], int, int]]:
    """(table, first key, key after the last): by whole hours, and never what is not rolled up yet."""
    for number in GpuSeries.objects.order_by("pk").values_list("pk", flat=True):
        series = _close_raw(number, now)
        minutes_from = min(series.hours_to, now - _ms(samples.MINUTES_KEPT))
        ends = {
            GpuSample: series.raw_from,
            GpuMinute: samples.floor(minutes_from, HOUR),
            GpuHour: samples.floor(now - _ms(samples.HOURS_KEPT), HOUR),
        }
        for table, end in ends.items():
            yield table, samples.key(number, 0), samples.key(number, max(0, end))


def _close_raw(number: int, now: int) -> GpuSeries:
    """Say first from when on readings are kept: a late one, written after the others went, would rewrite its minute."""
    with transaction.atomic():
        series = GpuSeries.objects.select_for_update().get(pk=number)
        kept_from = samples.floor(min(series.minutes_to, now - _ms(samples.RAW_KEPT)), HOUR)
        if kept_from > series.raw_from:
            series.raw_from = kept_from
            series.save(update_fields=["raw_from"])
    return series


def _delete_some(table: type[models.Model], low: int, high: int) -> bool:
    """The first rows of a range of keys, in a transaction of their own; whether there may be more."""
    rows = table._default_manager.filter(pk__gte=low, pk__lt=high)
    last = rows.order_by("pk").values_list("pk", flat=True)[ROWS_AT_ONCE - 1 : ROWS_AT_ONCE].first()
    (rows if last is None else rows.filter(pk__lte=last)).delete()
    return last is not None


def _ms(kept: timedelta) -> int:
    return int(kept.total_seconds() * 1000)

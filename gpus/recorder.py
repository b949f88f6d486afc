"""Readings on their way into the history: kept until the database has them, written once.

    sweep ─▶ Unwritten.note ─▶ Unwritten.write ─▶ write ─▶ GpuSample

`note` runs in the agent's loop and only appends; the rest in its database thread, where a slow disk delays no frame.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from django.db import DataError, transaction

from gpus import samples
from gpus.models import GpuSample, GpuSeries
from gpus.samples import HOUR, METRICS, MINUTE

if TYPE_CHECKING:
    from gpus.sampling import Card

logger = logging.getLogger(__name__)
#: What a database that is away may cost in memory: 5 MB. Eight cards at 2 s fill it in 80 minutes.
UNWRITTEN = 20_000
#: In one transaction, so that catching up keeps nobody from writing.
AT_ONCE = 1_000


class Sample(NamedTuple):
    """A reading on its way to the database. `at` in milliseconds, `values` in the order of `METRICS`."""

    uuid: str
    at: int
    values: tuple[int | None, ...]


class Unwritten:
    """Readings that the database has not taken yet: none is lost while it is slow or away for minutes."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()
        self.noted: dict[str, datetime] = {}

    def note(self, cards: Iterable[Card]) -> None:
        """The readings that are new since the last call. When the store is full they are dropped, a gap."""
        for card in cards:
            at = card.sampled_at
            if at is None or at == self.noted.get(card.uuid) or len(self.samples) >= UNWRITTEN:
                continue
            self.noted[card.uuid] = at
            values = tuple(metric.stored(card.reading.get(metric.name)) for metric in METRICS.values())
            self.samples.append(Sample(card.uuid, samples.milliseconds(at), values))

    def write(self) -> None:
        """All of them; what is written leaves the store after its commit."""
        while self.samples:
            # By index: an iterator would not live with a thread that appends.
            part = [self.samples[n] for n in range(min(AT_ONCE, len(self.samples)))]
            try:
                write(part)
            except (DataError, OverflowError):  # would be refused for ever, and all that follow with it
                logger.exception("%d readings cannot be stored and are dropped", len(part))
            for _ in part:
                self.samples.popleft()


def write(readings: Sequence[Sample]) -> None:
    """In one transaction. Writing one again changes nothing; a late one sets its card's roll-up back.

    A reading from before `raw_from` (a clock that was set back by days) is dropped: its minute is history.
    """
    with transaction.atomic():
        series = _locked({reading.uuid for reading in readings})
        kept = [reading for reading in readings if reading.at >= series[reading.uuid].raw_from]
        GpuSample.objects.bulk_create(
            [_row(series[reading.uuid], reading) for reading in kept], ignore_conflicts=True
        )
        _set_back(series, kept)


def _locked(uuids: set[str]) -> dict[str, GpuSeries]:
    """The series of these cards, in key order; locked, so that no roll-up passes a row that it cannot see yet."""
    known = GpuSeries.objects.select_for_update().filter(uuid__in=uuids).order_by("pk")
    series = {one.uuid: one for one in known}
    if new := uuids - set(series):
        GpuSeries.objects.bulk_create([GpuSeries(uuid=uuid) for uuid in sorted(new)], ignore_conflicts=True)
        series |= {one.uuid: one for one in known.all()}
    return series


def _row(series: GpuSeries, reading: Sample) -> GpuSample:
    columns = (metric.column for metric in METRICS.values())
    values = dict(zip(columns, reading.values, strict=True))
    return GpuSample(id=samples.key(series.pk, reading.at), **values)


def _set_back(series: dict[str, GpuSeries], readings: list[Sample]) -> None:
    first: dict[str, int] = {}
    for reading in readings:
        first[reading.uuid] = min(reading.at, first.get(reading.uuid, reading.at))
    for uuid, at in first.items():
        one = series[uuid]
        if at < one.minutes_to:
            hours_to = min(one.hours_to, samples.floor(at, HOUR))
            GpuSeries.objects.filter(pk=one.pk).update(
                minutes_to=samples.floor(at, MINUTE), hours_to=hours_to
            )

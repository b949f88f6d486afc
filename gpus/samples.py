"""Where in the history a reading is found, and what is kept: keys, units, periods.

The key of a row is `number of the card × 10^13 + milliseconds since 1970`. Values are integers: their sums are exact.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import models

from gpus.models import GpuSample

#: Thirteen decimal digits of milliseconds reach the year 2286 and can be read in a shell.
SPAN = 10**13
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
#: How long each table is kept.
RAW_KEPT, MINUTES_KEPT, HOURS_KEPT = timedelta(hours=48), timedelta(days=35), timedelta(days=730)


class Metric(NamedTuple):
    """A reading that has a history: `name` as in `CardReading`, and the column that holds it."""

    name: str
    unit: str
    column: str
    per_unit: int  # how many of the stored integers make one unit

    def stored(self, value: float | None) -> int | None:
        return None if value is None else round(value * self.per_unit)

    def shown(self, value: float | None) -> float | int | None:
        """In the metric's unit; bytes whole, the others to the hundredth."""
        if value is None or self.per_unit == 1:
            return value if value is None else round(value)
        return round(float(value) / self.per_unit, 2)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("utilization_gpu_percent", "percent", "utilization_gpu_permille", 10),
        Metric("memory_used_bytes", "bytes", "memory_used_bytes", 1),
        Metric("temperature_celsius", "celsius", "temperature_decicelsius", 10),
        Metric("power_draw_watts", "watts", "power_draw_deciwatts", 10),
    )
}


def milliseconds(moment: datetime) -> int:
    """Since 1970, UTC."""
    return round(moment.timestamp() * 1000)


def floor(at: int, step: int) -> int:
    return at - at % step


def key(number: int, at: int) -> int:
    """The key of the card with this number at this time (milliseconds)."""
    return number * SPAN + at


def time_of(row_key: int) -> int:
    return row_key % SPAN


def summary(table: type[models.Model], column: str) -> dict[str, str]:
    """SQL that sums up a metric over rows of `table`: what each part of a roll-up is made of."""
    if table is GpuSample:
        return {part: f"{part}({column})" for part in ("min", "sum", "max", "count")}
    again = {"min": "min", "sum": "sum", "max": "max", "count": "sum"}
    return {part: f"{function}({column}_{part})" for part, function in again.items()}

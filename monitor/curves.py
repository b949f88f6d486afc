"""What the charts of the pages are filled with: all cards, all metrics, one time axis, one answer.

A page asks for a window when it opens and when its reader chooses another one, and for its end (`since`) when frames
were missed. Means, and lowest and highest only where a step held different readings: most do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from gpus import history
from gpus.history import Series

#: Minutes of the windows to choose from, and what the buttons say.
WINDOWS = {5: "5 min", 30: "30 min", 60: "1 h", 360: "6 h", 1440: "24 h", 10080: "7 d", 43200: "30 d"}
DEFAULT_MINUTES = 30
#: A chart is some 300 pixels wide; many cards share what an answer may weigh.
MOST_POINTS, LEAST_POINTS, POINTS_TOGETHER = 300, 80, 6_000
#: Names on the pages, and the metric behind each.
METRICS = {
    "utilization": "utilization_gpu_percent",
    "memory": "memory_used_bytes",
    "temperature": "temperature_celsius",
    "power": "power_draw_watts",
}
#: Memory in MiB, whole: a chart shows no more, and bytes are three times as long to send.
MIB = 2**20


def curves(uuids: Sequence[str], minutes: int, since: float | None = None) -> dict[str, Any]:
    """The window that ends now, or what of it follows `since` (seconds since 1970).

    `start` is the first step's and `step` their length, in seconds; memory in MiB, the rest in percent, °C and watts.
    """
    now = timezone.now()
    start = now - timedelta(minutes=minutes)
    step = history.resolution(start, now, points_for(len(uuids)), now)
    if since is not None:
        start = min(max(start, datetime.fromtimestamp(since, UTC)), now - timedelta(seconds=1))
    windows = {
        name: history.query(metric, uuids, start, now, now=now, step=step) for name, metric in METRICS.items()
    }
    longest = max((window.t for window in windows.values()), key=len)
    return {
        "minutes": minutes,
        "step": step,
        "now": now.timestamp(),
        "start": longest[0],
        "count": len(longest),
        "cards": {
            uuid: {
                name: curve(window.series[uuid], 1 / MIB if name == "memory" else 1, len(longest))
                for name, window in windows.items()
            }
            for uuid in uuids
        },
    }


def points_for(cards: int) -> int:
    return min(MOST_POINTS, max(LEAST_POINTS, POINTS_TOGETHER // max(1, cards)))


def curve(series: Series, unit: float, length: int) -> dict[str, list[float | None]] | None:
    """`None` where nothing was read; a metric whose last step holds nothing yet is a step short of the others."""
    if not any(value is not None for value in series.mean):
        return None
    told = {"mean": padded(series.mean, unit, length)}
    if series.min != series.max:
        told |= {"min": padded(series.min, unit, length), "max": padded(series.max, unit, length)}
    return told


def padded(values: Sequence[float | None], unit: float, length: int) -> list[float | None]:
    shown = [None if value is None else short(value * unit) for value in values]
    return shown + [None] * (length - len(shown))


def short(value: float) -> float:
    """To the tenth, and without its point where that is whole."""
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded

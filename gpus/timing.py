"""Periods and time-outs, all under `MISTUDIO_TIME_SCALE` so that tests can live faster."""

from __future__ import annotations

from django.conf import settings

AGENT_SILENT_SECONDS = 15.0
WORKER_SILENT_SECONDS = 30.0
PROCESS_LIST_SECONDS = 6.0


def scaled(seconds: float) -> float:
    """`seconds` under the time scale, never under 0.2 s."""
    return max(0.2, seconds * settings.MISTUDIO_TIME_SCALE)


def sample_seconds() -> float:
    return scaled(settings.MISTUDIO_SAMPLE_SECONDS)


def stale_seconds() -> float:
    """A reading older than this decides nothing any more: three samples missed."""
    return 3 * sample_seconds()

"""A job in one line of text, for terminals and agents; `job` is the shape of REST."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from django.db import InterfaceError, OperationalError

from monitor.templatetags.show import duration

BAR = 24
#: What those who follow say meanwhile.
AWAY = "The database does not answer; looking again."
AWAY_ERRORS = (OperationalError, InterfaceError)


def progress_line(job: Mapping[str, Any], rate: float | None = None) -> str:
    """State, stage, bar, numbers, rate in units per second and what is left, as far as they are known."""
    progress = job["progress"] or {}
    parts = [f"{job['kind']}: {job['status']}"]
    if job["status"] in ("queued", "held"):
        parts.append((job["waiting_for"] or {}).get("detail") or job["error"] or "about to start")
    elif job["status"] in ("starting", "running"):
        parts += running(progress, rate)
    return " · ".join(parts)


def running(progress: Mapping[str, Any], rate: float | None) -> list[str]:
    if progress.get("fraction") is None:
        return [progress.get("stage") or "loading"]
    unit = progress.get("unit") or ""
    numbers = f"{progress['done']:,}/{progress['total']:,} {unit}".replace(",", " ").strip()
    parts = [f"{progress.get('stage') or ''} {bar(progress['fraction'])} {numbers}".strip()]
    if rate:
        parts.append(f"{rate:,.3g} {unit}/s" if rate < 1000 else f"{rate:,.0f} {unit}/s".replace(",", " "))
    if (eta := progress.get("eta_seconds")) is not None:
        parts.append(f"{duration(eta)} left")
    return parts


def bar(fraction: float) -> str:
    full = round(min(1.0, max(0.0, fraction)) * BAR)
    return "█" * full + "·" * (BAR - full)


class Pace:
    """Units per second of a job's stage, between the reports of the last half minute."""

    WINDOW_SECONDS = 30.0

    def __init__(self) -> None:
        self.stage: str | None = None
        self.seen: deque[tuple[float, int]] = deque()

    def rate(self, progress: Mapping[str, Any] | None, now: float) -> float | None:
        """`None` until two reports of one stage have been seen."""
        stage, done = (progress or {}).get("stage"), (progress or {}).get("done")
        if done is None or stage != self.stage:
            self.stage, self.seen = stage, deque()
        if done is not None and (not self.seen or self.seen[-1][1] != done):
            self.seen.append((now, done))
        while len(self.seen) > 2 and now - self.seen[0][0] > self.WINDOW_SECONDS:
            self.seen.popleft()
        if len(self.seen) < 2:
            return None
        (since, first), (until, last) = self.seen[0], self.seen[-1]
        return (last - first) / (until - since) if until > since else None

"""A job in one line of text, for terminals and agents; `job` is the shape of REST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monitor.templatetags.show import duration

BAR = 24


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

"""What the watchdog found and did: a table, the newest first, with what came back."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.db.models import Count, F, QuerySet, Sum
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.models import WatchdogEvent
from monitor import board
from monitor.joblist import more, whole
from monitor.templatetags.show import duration
from monitor.views import Request

PAGE = 50
LATELY = timedelta(days=1)
Finding, State = WatchdogEvent.Finding, WatchdogEvent.State
STRANGERS = (Finding.FOREIGN, Finding.UNKNOWN)
#: What was found, for people.
WORDS = {
    Finding.LEFTOVER: "left by a job",
    Finding.LEASE: "card closed",
    Finding.GHOST: "ghost",
    Finding.FOREIGN: "not ours",
    Finding.UNKNOWN: "unknown",
}
TONES = {State.FOUND: "warn", State.TERM: "busy", State.KILL: "busy", State.FAILED: "bad", State.GONE: "good"}


@login_required
@require_safe
def watchdog(request: Request) -> HttpResponse:
    return render(request, "watchdog/watchdog.html", page(request.GET))


def page(asked: Mapping[str, str]) -> dict[str, Any]:
    """Processes of others are on every card with a desktop: they are shown when asked for."""
    everything, start = asked.get("show") == "all", whole(asked.get("from", ""))
    rows = list(found(everything)[start : start + PAGE + 1])
    chosen = {"show": "all" if everything else ""}
    return {
        "rows": [row(event) for event in rows[:PAGE]],
        "everything": everything,
        "more": more(chosen, start + PAGE) if len(rows) > PAGE else "",
        "here": more(chosen, start),
        "report": settings.MISTUDIO_WATCHDOG == "report",
        "gpus": board.gpu_map(),
    } | lately()


def found(everything: bool) -> QuerySet[WatchdogEvent]:
    rows = WatchdogEvent.objects.select_related("host", "attempt__job").order_by("-found_at", "-id")
    return rows if everything else rows.exclude(finding__in=STRANGERS)


def lately() -> dict[str, Any]:
    """Processes ended in the last day, and the memory that came back with them."""
    ended = WatchdogEvent.objects.filter(finding=Finding.LEFTOVER, closed_at__gte=timezone.now() - LATELY)
    freed = Sum(F("memory_before_bytes") - F("memory_after_bytes"), default=0)
    return ended.exclude(term_at=None).aggregate(ended=Count("pk"), freed_bytes=freed) | {
        "stuck": WatchdogEvent.objects.filter(closed_at=None, state=State.FAILED).count()
    }


def open_findings() -> QuerySet[WatchdogEvent]:
    """For the health page: what is there now and should not be."""
    return found(everything=False).filter(closed_at=None)


def row(event: WatchdogEvent) -> dict[str, Any]:
    return {
        "event": event,
        "job": event.attempt.job if event.attempt else None,
        "what": WORDS[Finding(event.finding)],
        "word": said(event),
        "tone": TONES.get(State(event.state), ""),
        "gone_bytes": event.freed_bytes if event.closed_at else None,
    }


def said(event: WatchdogEvent) -> str:
    """The state in a word or three, with the time of the next step."""
    if event.state == State.FAILED:
        return "stuck"
    if event.state == State.REPORTED:
        return "told only" if event.finding == Finding.LEFTOVER else "told"
    if event.state == State.GONE:
        return "ended" if event.term_at else "gone"
    step = {State.FOUND: "SIGTERM", State.TERM: "SIGKILL"}.get(State(event.state))
    if step is None or event.due_at is None:
        return "SIGKILL sent" if event.state == State.KILL else "waits"
    return f"{step} in {duration(max(0.0, (event.due_at - timezone.now()).total_seconds()))}"

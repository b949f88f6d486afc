"""Since you left: what became of one's jobs, and of the cards, between the last visit and this one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib.auth.models import User
from django.db.models import F, QuerySet

from gpus.models import Gpu, GpuEvent
from jobs.models import Job, Status
from monitor.models import Visit

#: So many of a sort are named; the rest is counted.
NAMED = 5
ENDED_BADLY = (Status.FAILED, Status.REFUSED)


def context(user: User) -> dict[str, Any] | None:
    """`None` when there is nothing to tell: a first visit, one that was read already, or nothing happened."""
    visit = Visit.objects.filter(user=user, dismissed=False).exclude(left_at=None).first()
    if visit is None or visit.left_at is None:
        return None
    away = (visit.left_at, visit.began_at)
    told = {**jobs_of(user, away), "lost": cards_lost(away)}
    return told | {"left_at": visit.left_at} if any(told.values()) else None


def jobs_of(user: User, away: tuple[datetime, datetime]) -> dict[str, Any]:
    mine = Job.objects.filter(owner=user)
    ended = mine.filter(finished_at__range=away).order_by("finished_at")
    stopped = mine.filter(events__event=F("status"), events__at__range=away).distinct().order_by("queued_at")
    return {
        "succeeded": some(ended.filter(status=Status.SUCCEEDED)),
        "failed": some(ended.filter(status__in=ENDED_BADLY)),
        "held": some(stopped.filter(status=Status.HELD)),
        "paused": some(stopped.filter(status=Status.PAUSED)),
    }


def some(jobs: QuerySet[Job]) -> dict[str, Any] | None:
    count = jobs.count()
    return {"count": count, "named": jobs[:NAMED], "more": max(0, count - NAMED)} if count else None


def cards_lost(away: tuple[datetime, datetime]) -> list[dict[str, Any]]:
    """Cards that were lost meanwhile, each once, and whether they are back."""
    events = GpuEvent.objects.filter(event="lost", at__range=away).order_by("at")
    last = {event.uuid: event for event in events}
    cards = Gpu.objects.filter(pk__in=last).select_related("host").order_by("host__name", "index")
    return [
        {"gpu": gpu, "at": last[gpu.uuid].at, "back": not (gpu.lost_at or gpu.removed_at)} for gpu in cards
    ]

"""Whether every part of miStudio is alive: the checks of `system/health` in words, and what the table of jobs adds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from gpus import health as checkup
from gpus.models import Gpu, Host, Pulse
from jobs import postman
from jobs.models import Attempt, Job, Lease, Outcome
from jobs.serializers import may_see
from jobs.tasks import host_queue
from monitor import board, watchdog_page, words
from monitor.templatetags.show import duration
from monitor.views import Request
from monitor.workers import CANARY, PARTS

LATELY = timedelta(hours=1)
LAUNCHES = FINDINGS = 20


@login_required
@require_safe
def health(request: Request) -> HttpResponse:
    return render(request, "health/health.html", context(request.user))


def context(user: User) -> dict[str, Any]:
    state, known = checkup.state(), list(Host.objects.order_by("name"))
    return {
        "ok": state["status"] == "ok",
        "checks": list(checks(state["checks"])),
        "hosts": hosts(known),
        "notices": [words.no_cards(host) for host in known if host.backend_error],
        "cards": board.present(Gpu.objects.exclude(error="").select_related("host")),
        "launches": [launch(attempt, user) for attempt in failed_launches()[:LAUNCHES]],
        "leases": [lease(row) for row in quarantined()],
        "findings": [watchdog_page.row(event) for event in watchdog_page.open_findings()[:FINDINGS]],
        "messages_state": postman.summary(),
        "gpus": board.gpu_map(),
    }


# The checks ---------------------------------------------------------------------------------------------
def checks(found: checkup.Checks) -> Iterator[dict[str, Any]]:
    good, values = checkup.good(found), dict(found)
    for name, (label, meaning) in PARTS.items():
        value = values[name]
        yield {
            "label": label,
            "word": "unknown" if value is None else "ok" if good[name] else "down",
            "tone": "" if value is None else "good" if good[name] else "bad",
            "says": in_words(value),
            "meaning": "" if good[name] else meaning,
        }


def in_words(value: Any) -> str:
    """`ok`, `{"alive": 1, "known": 2}`, a number of jobs, or the seconds since the last sign of life."""
    if value is None:
        return "no sign of life yet"
    if isinstance(value, dict):
        return f"{value['alive']} of {value['known']} alive" if value["known"] else "no host is known"
    if isinstance(value, int):
        return f"{value} jobs failed to start three times or more" if value else "no job fails to start"
    if isinstance(value, float):
        return f"last heard {duration(value)} ago"
    return "answers" if value == "ok" else "does not answer"


def hosts(known: list[Host]) -> list[dict[str, Any]]:
    """Each with the last test message that its worker took."""
    pulses = dict(Pulse.objects.filter(name__startswith=CANARY).values_list("name", "at"))
    return [{"host": host, "canary_at": pulses.get(CANARY + host_queue(host.name))} for host in known]


# What the jobs say --------------------------------------------------------------------------------------
def failed_launches() -> QuerySet[Attempt]:
    """Launches of the last hour that never came up."""
    late = Attempt.objects.filter(outcome=Outcome.NEVER_STARTED, ended_at__gte=timezone.now() - LATELY)
    return late.select_related("job__owner", "host").order_by("-ended_at")


def launch(attempt: Attempt, user: User) -> dict[str, Any]:
    """The detail is a message of the job, and so its owner's."""
    job = attempt.job
    return {
        "attempt": attempt,
        "job": job,
        "detail": attempt.detail if may_see(job, user) else "",
        "again": words.soon(job.not_before) if waits_to_launch(job) else "",
    }


def waits_to_launch(job: Job) -> bool:
    return (job.waiting_for or {}).get("reason") == "launch"


def quarantined() -> QuerySet[Lease]:
    open_ones = Lease.objects.filter(state=Lease.State.QUARANTINED, ended_at=None)
    return open_ones.select_related("attempt__job").order_by("releasing_at")


def lease(row: Lease) -> dict[str, Any]:
    kind, _, name = row.resource.partition(":")
    return {"lease": row, "uuid": name if kind == "gpu" else None, "name": name, "job": row.attempt.job}

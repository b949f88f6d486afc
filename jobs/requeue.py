"""Ends that are none: an attempt is over without a word from its work, and the job goes back to the queue.

Whoever finds that calls one of these; each is one transaction, and a cancel or pause that was asked for counts.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.utils import timezone

from gpus import choice
from gpus.models import Maintenance
from gpus.timing import scaled
from jobs import faults, logs, losses, overtime, registry
from jobs.cardloss import Loss
from jobs.endings import cancelled, fail, give_back
from jobs.memory import gib
from jobs.models import Attempt, Job, Outcome, Status

LAUNCH_BACKOFF_SECONDS = (5.0, 300.0)
TOO_MANY_LAUNCHES = 3


def lost(job: Job, attempt: Attempt, detail: str, *, counted: bool = True) -> bool:
    """The attempt's processes are gone: again, from the last checkpoint.

    `counted` where the job itself may be why. Three such losses in a row without a newer checkpoint end it; those by
    host, card, database or maintenance end nothing.
    """
    job.refresh_from_db()
    counted = counted and Maintenance.of(attempt.host) is None
    if not (job.cancel_requested_at or job.pause_requested_at):
        if overtime.is_up(job):
            return timed_out(job, attempt)
        if counted and (story := losses.story(job, attempt, detail)):
            return fail(job, attempt, "lost", story, losses.HINT, counted=True)
    return give_back(job, attempt, Outcome.LOST, detail, "lost", counted=counted, waiting_for=None)


def timed_out(job: Job, attempt: Attempt) -> bool:
    """The limit of running time is used up. Its checkpoint stays."""
    faults.point("timing_out")
    return fail(job, attempt, "timeout", overtime.sentence(job), overtime.hint(job))


def host_out_of_memory(job: Job, peak_bytes: int) -> tuple[str, str]:
    """Sentence and hint where the kernel ended the work for the host's memory."""
    sentence = (
        f"The host ran out of memory: the kernel ended the work, which held {gib(peak_bytes)} at its peak."
    )
    suggested = registry.get(job.kind).suggest("host_out_of_memory", job.params)
    smaller = f"Retry from the start with params {json.dumps(suggested)}, or run" if suggested else "Run"
    return sentence, f"{smaller} fewer jobs at once."


def card_lost(job: Job, attempt: Attempt, loss: Loss) -> bool:
    """`auto` goes on elsewhere from its checkpoint; a named card is never swapped: the owner decides."""
    job.refresh_from_db()
    if choice.auto_count(job.gpu_wanted) is not None:
        return lost(job, attempt, loss.sentence, counted=False)
    if job.cancel_requested_at:
        return cancelled(job, attempt)
    hint = "Retry from its checkpoint on another card, or on this one once it is back. It was not moved by itself."
    return fail(job, attempt, loss.reason, loss.sentence, hint)


def never_started(job: Job, attempt: Attempt, detail: str) -> bool:
    """The launch never came up; queued again after a pause that doubles."""
    failures = job.events.filter(event="never_started").count()
    first, longest = LAUNCH_BACKOFF_SECONDS
    pause = scaled(min(longest, first * 2 ** min(16, failures)))
    if last := logs.last_line(job):
        detail = f"{detail}; its log ends: {last}"
    waiting = waits_for("launch", detail) | {"eta_seconds": pause, "failures": failures + 1}
    due = timezone.now() + timedelta(seconds=pause)
    return again(job, attempt, detail, "never_started", waiting, not_before=due)


def failed_launches() -> int:
    """Jobs that wait after launches that never came up, three times or more: no accident any more."""
    waiting = Job.objects.filter(status=Status.QUEUED, waiting_for__reason="launch")
    return waiting.filter(waiting_for__failures__gte=TOO_MANY_LAUNCHES).count()


def handed_back(job: Job, attempt: Attempt, detail: str, skip: dict[str, Any]) -> bool:
    """The card had no room when the work arrived: queued at once, for any card but this reading of this one."""
    waiting = waits_for("memory", detail) | {"gpu_uuid": skip["gpu_uuid"], "skip": skip}
    return again(job, attempt, detail, "handed_back", waiting)


def again(
    job: Job, attempt: Attempt, detail: str, event: str, waiting: dict[str, Any], **values: Any
) -> bool:
    """Queue what never ran."""
    values |= {"sources": [Status.STARTING], "waiting_for": waiting}
    return give_back(job, attempt, Outcome.NEVER_STARTED, detail, event, **values)


def waits_for(reason: str, detail: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("gpu_uuid", "job_id", "eta_seconds"))
    return nothing | {"reason": reason, "detail": detail, "since": timezone.now().isoformat()}

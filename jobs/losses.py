"""Attempts that were lost while running: how many in a row came no further, and their story."""

from __future__ import annotations

from itertools import takewhile

from django.utils import timezone

from jobs import paths
from jobs.endings import newest_checkpoint
from jobs.models import Attempt, Job, Outcome

#: Attempts lost in a row without a newer checkpoint that end the job.
MAX_LOST = 3
HINT = "Read the end of its log, then retry from the checkpoint, or with parameters that ask for less."


def progress_mark(job: Job) -> str:
    """Changes whenever a newer checkpoint, or another part of the newest one, is complete."""
    newest = newest_checkpoint(job)
    parts = [p.name for p in (paths.checkpoints(job) / newest).glob("*") if not p.name.startswith(".")]
    return f"{newest}/{len(parts)}"


def story(job: Job, attempt: Attempt, detail: str) -> str:
    """Why the job ends with this loss: which attempts, when and how; empty while it may try again.

    Pauses, hand-overs, launches that never came up, and losses that were not the job's own are passed over.
    """
    attempt.refresh_from_db()
    earlier = job.attempts.filter(outcome=Outcome.LOST, counted=True, number__lt=attempt.number)
    mark = progress_mark(job)
    stuck = list(takewhile(lambda a: a.start_checkpoint == mark, [attempt, *earlier.order_by("-number")]))[
        :MAX_LOST
    ]
    if len(stuck) < MAX_LOST:
        return ""
    where = (
        f"beyond its checkpoint {newest_checkpoint(job)}"
        if newest_checkpoint(job)
        else "before any checkpoint"
    )
    told = "; ".join(_line(a, detail if a == attempt else a.detail) for a in reversed(stuck))
    return f"It was lost {MAX_LOST} times in a row and came no further, {where}: {told}."


def _line(attempt: Attempt, detail: str) -> str:
    """`attempt 2 at 14:03:07 UTC after 12 s on GPU-…: the work was ended by SIGKILL`."""
    ended = attempt.ended_at or timezone.now()
    cards = ", ".join(attempt.gpu_uuids) or f"the CPU of {attempt.host}"
    return f"attempt {attempt.number} at {ended:%H:%M:%S} UTC after {attempt.ran_seconds:.0f} s on {cards}: {detail}"

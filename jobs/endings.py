"""How an attempt ends. Whoever gets here first writes the end; everybody may try.

The work (or its keeper, or recovery) writes `end.json` into the staging folder, then `complete` moves the
results to their places and makes the final state and the artifact rows in one transaction. A crash between
any two steps leaves something that `complete` can go on with.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from gpus import choice
from gpus.models import Maintenance
from gpus.timing import scaled
from jobs import events, faults, paths
from jobs.models import ACTIVE, Artifact, Attempt, Job, JobEvent, Lease, Outcome, Status

#: Attempts lost in a row without a newer checkpoint that end the job.
MAX_LOST = 3
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_HINT = "Free some space on the data disk, then retry from the checkpoint."
MAX_NAME = 150  # of the 160 that the column holds: room for a number
LAUNCH_BACKOFF_SECONDS = (5.0, 300.0)


@dataclass
class End:
    """The content of `end.json`: final state, what to move, what artifacts to make."""

    status: str
    result: dict[str, Any] | None = None
    failure_reason: str = ""
    error: str = ""
    hint: str = ""
    traceback: str = ""
    moves: list[tuple[str, str]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        names = ("result", "failure_reason", "error", "hint", "traceback")
        return {name: getattr(self, name) for name in names}


def write(job: Job, end: End) -> None:
    paths.write_json(paths.staging(job, job.attempt) / "end.json", asdict(end))
    faults.point("end_written")


def written(job: Job, attempt: int) -> End | None:
    """The end that this attempt left, whole or not at all (it was renamed into place)."""
    try:
        return End(**json.loads((paths.staging(job, attempt) / "end.json").read_text()))
    except FileNotFoundError:
        return None


def complete(job: Job, attempt: Attempt) -> bool:
    """Carry out the attempt's `end.json`; False when there is none or the job is not this attempt's."""
    end = written(job, attempt.number)
    job.refresh_from_db()
    if end is None or job.attempt != attempt.number or job.status not in ACTIVE:
        return False
    for source, target in end.moves:
        _move(settings.MISTUDIO_HOME / source, settings.MISTUDIO_HOME / target)
    faults.point("moved")
    values = end.fields()
    if end.status == Status.SUCCEEDED:
        values["progress"] = dict(job.progress or {}) | {"fraction": 1.0, "eta_seconds": None}
    with transaction.atomic():
        if not job.move(ACTIVE, end.status, **values):
            return False
        _make_artifacts(job, end)
        close(attempt, Outcome.ENDED)
        _tell(job, end.status, end.error)
    faults.point("final")
    shutil.rmtree(paths.staging(job, attempt.number), ignore_errors=True)
    return True


def _move(source: Path, target: Path) -> None:
    """Rename into place; what is gone from here was moved before, by us or by whoever came first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        os.rename(source, target)
    paths.sync_folder(target.parent)


def _make_artifacts(job: Job, end: End) -> None:
    for made in end.artifacts:
        name = free_name(job, made["type"], made["name"])
        Artifact.objects.create(**made | {"name": name}, owner=job.owner, job=job)


def free_name(job: Job, type: str, name: str) -> str:
    """`name`, or `name-2`, `name-3`… when its owner already has one of this type."""
    name = name[:MAX_NAME]
    taken = set(
        Artifact.objects.filter(type=type, owner=job.owner, name__startswith=name).values_list(
            "name", flat=True
        )
    )
    candidates = [name, *(f"{name}-{n}" for n in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def close(attempt: Attempt, outcome: str, detail: str = "", **values: Any) -> bool:
    """End the attempt and set its leases `releasing`; they end when card and processes let go."""
    closed = attempt.end(outcome, detail=detail, **values)
    if closed:
        Lease.objects.filter(attempt=attempt, state=Lease.State.ACTIVE).update(
            state=Lease.State.RELEASING, releasing_at=timezone.now()
        )
    return closed


def _tell(job: Job, event: str, detail: str = "") -> None:
    JobEvent.objects.create(job=job, event=event, detail=detail, attempt=job.attempt)
    transaction.on_commit(lambda: events.changed(job))


def fail(job: Job, attempt: Attempt, reason: str, error: str, hint: str = "", **values: Any) -> bool:
    """End the job `failed`, for those who found its work ended without a word."""
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.FAILED, failure_reason=reason, error=error, hint=hint)
        if moved:
            close(attempt, Outcome.ENDED, error, **values)
            _tell(job, Status.FAILED, error)
    return moved


def card_lost(job: Job, attempt: Attempt, sentence: str) -> bool:
    """`auto` goes on elsewhere from its checkpoint; a named card is never swapped: the owner decides."""
    if choice.auto_count(job.gpu_wanted) is not None:
        return lost(job, attempt, sentence)
    job.refresh_from_db()
    if job.cancel_requested_at:
        return cancelled(job, attempt)
    hint = "Retry from its checkpoint on another card, or on this one once it is back. It was not moved by itself."
    return fail(job, attempt, "card_lost", sentence, hint)


def reason_of_end(error: Exception) -> tuple[str, str, str]:
    """Reason, sentence and hint when an end itself cannot be carried out."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return "disk_full", f"The results could not be kept: {error.strerror}.", DISK_HINT
    return "error", f"The results could not be kept: {type(error).__name__}: {error}", ""


def cancelled(job: Job, attempt: Attempt, **values: Any) -> bool:
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.CANCELLED)
        if moved:
            close(attempt, Outcome.ENDED, "cancelled", **values)
            _tell(job, Status.CANCELLED)
    return moved


def paused(job: Job, attempt: Attempt, detail: str, **values: Any) -> bool:
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.PAUSED)
        if moved:
            close(attempt, Outcome.ENDED, detail, **values)
            _tell(job, Status.PAUSED, detail)
    return moved


def lost(job: Job, attempt: Attempt, detail: str, **values: Any) -> bool:
    """The attempt's processes are gone without an end: back to the queue, from the last checkpoint.

    A cancel that was asked for counts; so do three losses in a row without a newer checkpoint.
    """
    job.refresh_from_db()
    if job.cancel_requested_at:
        return cancelled(job, attempt, **values)
    if job.pause_requested_at:
        return paused(job, attempt, detail, **values)
    if not Maintenance.of(attempt.host) and _losses_without_progress(job) >= MAX_LOST:
        sentence = f"Lost {MAX_LOST} times in a row without a newer checkpoint; the last time: {detail}"
        return fail(job, attempt, "lost", sentence, "Read the log, then retry from the checkpoint.", **values)
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.QUEUED, waiting_for=None)
        if moved:
            close(attempt, Outcome.LOST, detail, **values)
            _tell(job, "lost", detail)
    return moved


def newest_checkpoint(job: Job) -> str:
    """Name of the newest checkpoint, empty when there is none; names sort by step."""
    folder = paths.checkpoints(job)
    names = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []
    return max(names, default="")


def _losses_without_progress(job: Job) -> int:
    """How many attempts, this one included, were lost from the checkpoint that still is the newest.

    Pauses, hand-overs, launches that never came up and reboots of the host do not count.
    """
    here = job.attempts.get(number=job.attempt)
    running_or_lost = job.attempts.filter(outcome__in=("", Outcome.LOST), boot_id=here.host.boot_id).order_by(
        "-number"
    )
    mark = progress_mark(job)
    return sum(1 for _ in takewhile(lambda a: a.start_checkpoint == mark, running_or_lost))


def progress_mark(job: Job) -> str:
    """Changes whenever a newer checkpoint, or another part of the newest one, is complete."""
    newest = newest_checkpoint(job)
    parts = [p.name for p in (paths.checkpoints(job) / newest).glob("*") if not p.name.startswith(".")]
    return f"{newest}/{len(parts)}"


def never_started(job: Job, attempt: Attempt, detail: str) -> bool:
    """The launch never came up; queued again after a pause that doubles."""
    job.refresh_from_db()
    if job.cancel_requested_at:
        return cancelled(job, attempt)
    if job.pause_requested_at:
        return paused(job, attempt, detail)
    failures = min(16, job.attempts.filter(outcome=Outcome.NEVER_STARTED).count())
    first, longest = LAUNCH_BACKOFF_SECONDS
    pause = scaled(min(longest, first * 2**failures))
    reason = dict.fromkeys(("gpu_uuid", "job_id")) | {
        "reason": "launch",
        "detail": detail,
        "eta_seconds": pause,
    }
    reason["since"] = timezone.now().isoformat()
    with transaction.atomic():
        moved = job.move(
            [Status.STARTING],
            Status.QUEUED,
            not_before=timezone.now() + timedelta(seconds=pause),
            waiting_for=reason,
        )
        if moved:
            close(attempt, Outcome.NEVER_STARTED, detail)
            _tell(job, "never_started", detail)
    return moved


def handed_back(job: Job, attempt: Attempt, detail: str, skip: dict[str, Any]) -> bool:
    """The card had no room when the work arrived: queued again at once, for any card but this reading of this one."""
    job.refresh_from_db()
    if job.cancel_requested_at:
        return cancelled(job, attempt)
    if job.pause_requested_at:
        return paused(job, attempt, detail)
    waiting = {"reason": "memory", "detail": detail, "gpu_uuid": skip["gpu_uuid"], "skip": skip}
    waiting |= {"job_id": None, "eta_seconds": None, "since": timezone.now().isoformat()}
    with transaction.atomic():
        moved = job.move([Status.STARTING], Status.QUEUED, waiting_for=waiting)
        if moved:
            close(attempt, Outcome.NEVER_STARTED, detail)
            _tell(job, "handed_back", detail)
    return moved

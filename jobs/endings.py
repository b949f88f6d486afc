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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from gpus import choice
from jobs import events, faults, paths
from jobs.models import ACTIVE, Artifact, Attempt, Job, JobEvent, Lease, Outcome, Status

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_HINT = "Free some space on the data disk, then retry from the checkpoint."
MAX_NAME = 150  # of the 160 that the column holds: room for a number


@dataclass
class End:
    """The content of `end.json`: final state, what to move, what artifacts to make."""

    status: str
    result: dict[str, Any] | None = None
    failure_reason: str = ""
    error: str = ""
    hint: str = ""
    traceback: str = ""
    stage: str = ""  # of a hand-over, whose status is `queued`
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
    if end.status == Status.QUEUED:
        moved = hand_over(job, attempt, end.stage)
        shutil.rmtree(paths.staging(job, attempt.number), ignore_errors=True)
        return moved
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
        close(attempt, Outcome.ENDED, "" if end.status == Status.SUCCEEDED else end.error or end.status)
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


def fail(
    job: Job, attempt: Attempt, reason: str, error: str, hint: str = "", *, counted: bool = False
) -> bool:
    """End the job `failed`, for those who found its work ended without a word."""
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.FAILED, failure_reason=reason, error=error, hint=hint)
        if moved:
            close(attempt, Outcome.ENDED, error, counted=counted)
            _tell(job, Status.FAILED, error)
    return moved


def cancelled(job: Job, attempt: Attempt) -> bool:
    with transaction.atomic():
        moved = job.move(ACTIVE, Status.CANCELLED)
        if moved:
            close(attempt, Outcome.ENDED, "cancelled")
            _tell(job, Status.CANCELLED)
    return moved


def give_back(
    job: Job,
    attempt: Attempt,
    outcome: str,
    detail: str,
    event: str,
    *,
    sources: Iterable[str] = ACTIVE,
    counted: bool = False,
    **values: Any,
) -> bool:
    """Back to the queue, or to where its owner wants it meanwhile; `values` are for the queue."""
    with transaction.atomic():
        to = _wanted_meanwhile(job)
        if to != Status.QUEUED:
            outcome, event, counted = Outcome.ENDED, to, False
            values |= {"waiting_for": None, "not_before": None}
        moved = job.move(sources, to, **values)
        if moved:
            close(attempt, outcome, detail, counted=counted)
            _tell(job, event, detail)
    return moved


def _wanted_meanwhile(job: Job) -> Status:
    """Cancelled, paused, or queued where nobody asked for anything. The row is held: who asks after this finds the
    job where it went."""
    row = Job.objects.select_for_update().get(pk=job.pk)
    if row.cancel_requested_at:
        return Status.CANCELLED
    return Status.PAUSED if row.pause_requested_at else Status.QUEUED


def hand_over(job: Job, attempt: Attempt, stage: str) -> bool:
    """The stage before is done and kept; the same run goes on from there on the card that it is granted.

    What the job needs there is judged anew by dispatch, as it is when inputs have just been made.
    """
    device = choice.device(needs_card=True)
    values: dict[str, Any] = {"stage": stage, "needs_card": True, "device": device, "estimate": None}
    faults.point("handing_over")
    moved = give_back(
        job, attempt, Outcome.HANDED_OVER, f"goes on with “{stage}” on a card", "handed_over", **values
    )
    faults.point("handed_over")
    return moved


def reason_of_end(error: Exception) -> tuple[str, str, str]:
    """Reason, sentence and hint when an end itself cannot be carried out."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return "disk_full", f"The results could not be kept: {error.strerror}.", DISK_HINT
    return "error", f"The results could not be kept: {type(error).__name__}: {error}", ""


def newest_checkpoint(job: Job) -> str:
    """Name of the newest checkpoint, empty when there is none; names sort by step."""
    folder = paths.checkpoints(job)
    names = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []
    return max(names, default="")

"""What people may do to a job. Each verb answers with the job or raises `Conflict`."""

from __future__ import annotations

import os
import shutil
from typing import Any

from django.db import transaction
from django.utils import timezone
from rest_framework import serializers

from gpus import choice
from jobs import chains, endings, events, lease, paths, registry, submit, tasks
from jobs.exceptions import Conflict
from jobs.kind import FINALIZE
from jobs.models import ACTIVE, FINAL, WAITING, Attempt, Job, JobEvent, Outcome, Status
from jobs.people import Person

#: Why a job that waits cannot be paused.
NOT_RUNNING: dict[str, str] = {
    Status.QUEUED: "Only a running job can be paused; this one is queued. Hold it to keep it from starting.",
    Status.HELD: "Only a running job can be paused; this one is held, and starts when it is released.",
    Status.PAUSED: "The job is paused already; resume it to go on.",
}
#: From where a training can be finalized: it has a checkpoint and nobody works on it.
EARLY_ENDS = (Status.PAUSED, Status.CANCELLED, Status.FAILED)


def cancel(job: Job, user: Person) -> Job:
    """End the job. Waiting jobs and unclaimed starts end here; a keeper ends the others."""
    with transaction.atomic():
        _ask(job, "cancel_requested_at", user)
        done = job.move(WAITING, Status.CANCELLED) or _end_unclaimed(job, Status.CANCELLED)
    return _asked(job, user, Status.CANCELLED, done)


def _asked(job: Job, user: Person, to: Status, done: bool) -> Job:
    if done:
        _story(job, to, user)
        tasks.ring_dispatch()
    else:
        tasks.ring_nudge(job)
    return job


def _ask(job: Job, field: str, user: Person) -> None:
    """Write the request on the row, where keepers read it, and hold the row until all is done."""
    now = timezone.now()
    asked = Job.objects.filter(pk=job.pk).exclude(status__in=FINAL).update(**{field: now})
    job.refresh_from_db()
    transaction.on_commit(lambda: events.changed(job))
    if not asked:
        raise Conflict(f"The job has ended already: {job.status}.")
    JobEvent.objects.create(
        job=job, event=field.removesuffix("_at"), detail=f"by {user}", attempt=job.attempt
    )


def _end_unclaimed(job: Job, to: Status) -> bool:
    """A start that no keeper has claimed: close the attempt first, then nobody can claim it any more."""
    attempt = job.attempts.filter(number=job.attempt, keeper_pid=None, ended_at=None).first()
    if attempt is None or job.status != Status.STARTING:
        return False
    closed = Attempt.objects.filter(pk=attempt.pk, keeper_pid=None, ended_at=None).update(
        ended_at=timezone.now(), outcome=Outcome.ENDED, detail=f"{to} before it was claimed"
    )
    if not closed or not job.move([Status.STARTING], to):
        return False
    lease.end_unused(attempt)
    return True


def hold(job: Job, user: Person) -> Job:
    """Keep a queued job from starting until it is released; what it waits for then still is another job, no pause
    after a launch."""
    waiting_for = job.waiting_for if job.waits_on_id else None
    if not job.move([Status.QUEUED], Status.HELD, waiting_for=waiting_for, not_before=None):
        job.refresh_from_db()
        raise Conflict(f"Only a queued job can be held; this one is {job.status}.")
    _story(job, Status.HELD, user)
    return job


def release(job: Job, user: Person) -> Job:
    """Queue a held job; what held it is forgotten, and judged again. A job that it was only to come after, and that
    will not succeed any more, holds it no longer; an input that will not be made does (`Conflict`)."""
    with transaction.atomic():  # no link is dropped of a job that was released, or ended, by somebody else
        if not job.move([Status.HELD], Status.QUEUED, error="", failure_reason="", hint=""):
            job.refresh_from_db()
            raise Conflict(f"Only a held job can be released; this one is {job.status}.")
        chains.let_go(job)
    _story(job, "released", user)
    tasks.ring_dispatch()
    return job


def pause(job: Job, user: Person) -> Job:
    """Ask a running job to write a checkpoint and leave its card; a start that nobody claimed is paused here."""
    with transaction.atomic():
        _ask(job, "pause_requested_at", user)
        if job.status not in ACTIVE:  # the request is taken back with the transaction
            raise Conflict(NOT_RUNNING.get(job.status, "Only a running job can be paused."))
        done = _end_unclaimed(job, Status.PAUSED)
    return _asked(job, user, Status.PAUSED, done)


def resume(job: Job, user: Person, gpu: Any = None) -> Job:
    """Queue a paused job again, on the card it had unless another is named; a failed or cancelled one with a
    checkpoint is retried from it."""
    if job.status in (Status.FAILED, Status.CANCELLED):
        return retry(job, user, gpu=gpu, start="checkpoint")
    wanted = same_card(job, gpu)
    forgotten = {"pause_requested_at": None, "waiting_for": None}
    if not job.move([Status.PAUSED], Status.QUEUED, gpu_wanted=wanted, **forgotten):
        raise Conflict(f"Only a paused job can be resumed; this one is {job.status}.")
    _story(job, "resumed", user)
    tasks.ring_dispatch()
    return job


def same_card(job: Job, gpu: Any) -> str:
    """The cards of the last attempt if it ever ran, else what was asked for; the caller may name another."""
    kind = registry.get(job.kind)
    asked = gpu if gpu is not None else (_last_cards(job) or _listed(job.gpu_request))
    return choice.parse(asked, max_gpus=kind.max_gpus, needs_card=job.needs_card)


def _last_cards(job: Job) -> list[str]:
    """Those of the last attempt that ran; a grant that was never taken up decides nothing."""
    ran = job.attempts.exclude(started_at=None).order_by("-number").first()
    return list(ran.gpu_uuids) if ran else []


def retry(
    job: Job,
    user: Person,
    gpu: Any = None,
    start: str | None = None,
    params: dict[str, Any] | None = None,
) -> Job:
    """A new job with the old one's parameters, on the same card unless another is named.

    From the old one's checkpoint by default, where there is one and the parameters are unchanged. Jobs that wait for
    the old one wait for the new one instead (`jobs.chains`).
    """
    if job.status not in FINAL:
        raise Conflict(f"The job has not ended; it is {job.status}.")
    start = start or ("checkpoint" if endings.newest_checkpoint(job) and not params else "start")
    if start not in ("checkpoint", "start"):
        raise serializers.ValidationError({"from": ["A retry begins from “checkpoint” or “start”."]})
    if start == "checkpoint" and not endings.newest_checkpoint(job):
        raise Conflict("This job left no checkpoint; retry from the start.")
    if start == "checkpoint" and params:
        raise Conflict("Changed parameters cannot go on from a checkpoint; retry from the start.")
    data = job.params | (params or {}) | {"gpu": _listed(same_card(job, gpu))}
    return _follow(job, data, start, stage=job.stage if start == "checkpoint" else "")


def finalize(job: Job, user: Person) -> Job:
    """A new job, without a card, that makes the artifact of a training which ended early from its checkpoint."""
    if not registry.get(job.kind).can_finalize():
        raise Conflict(f"A job of the kind {job.kind} makes nothing from a checkpoint; only a training does.")
    if job.status not in EARLY_ENDS:
        raise Conflict(
            f"Only a paused, cancelled or failed training can be finalized; this one is {job.status}."
        )
    if not endings.newest_checkpoint(job):
        raise Conflict("The training left no checkpoint, so there is nothing to make an artifact from.")
    return _follow(job, dict(job.params), FINALIZE, stage=FINALIZE)


def _follow(job: Job, data: dict[str, Any], start: str, stage: str) -> Job:
    """A new job of the same owner, wherever the button was pressed, with the old one's place in queue, group and
    chain."""
    data |= {"name": job.name, "time_limit_seconds": job.time_limit_seconds}
    data["after"] = list(job.after.exclude(status=Status.SUCCEEDED).values_list("pk", flat=True))
    row = {"retry_of": job, "retry_from": start, "priority": job.priority, "group_id": job.group_id}
    with transaction.atomic():
        again = submit.submit(job.owner, job.kind, data, stage=stage, **row)
        chains.take_over(job, again)
        if start != "start":
            copy_checkpoints(job, again)
    return again


def _listed(request: str) -> Any:
    return request.split(",") if "," in request else request


def copy_checkpoints(source: Job, target: Job) -> None:
    """The newest one, and the hidden files beside it that hold for all steps (`.measured.json`). Hard links where the
    disk allows them: checkpoints are never written in place."""
    old, new = paths.checkpoints(source), paths.checkpoints(target)
    new.mkdir(parents=True, exist_ok=True)
    newest = endings.newest_checkpoint(source)
    shutil.copytree(old / newest, new / newest, copy_function=_link)
    for beside in old.glob(".*.json"):
        if not beside.name.startswith(".tmp-"):  # half written when the work was killed
            _link(str(beside), str(new / beside.name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _story(job: Job, event: str, user: Person) -> None:
    JobEvent.objects.create(job=job, event=event, detail=f"by {user}", attempt=job.attempt)
    events.changed(job)

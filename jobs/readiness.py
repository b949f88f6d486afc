"""Whether a queued job could start at all: its inputs exist, its parameters fit them, some card could hold it.

What was not known at submit is judged here, once, when the inputs are there.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction
from rest_framework.serializers import ValidationError

from gpus.rest import ApiError, flattened
from jobs import chains, estimates, events, registry
from jobs.artifacts import as_input, settle_inputs
from jobs.exceptions import JobRejected
from jobs.models import FINAL, Job, JobEvent, Status
from jobs.waits import Wait, for_job


def not_ready(job: Job) -> Wait | None:
    """The job that this one waits for; None when its inputs exist and its parameters were found good.

    Raises `JobRejected` when it never can start.
    """
    if before := forerunner(job):
        return for_job("after", before)
    if source := source_pending(job):
        return for_job("input", source)
    if job.estimate is None:
        appraise(job)
    return None


def forerunner(job: Job) -> Job | None:
    """The first job of `after` that has not succeeded yet. Raises `JobRejected` when it never will."""
    for before in job.after.all():
        if before.status == Status.SUCCEEDED:
            continue
        if before.final:
            raise chains.broken("It was to start after", before, chains.AFTER)
        return before
    return None


def source_pending(job: Job) -> Job | None:
    """The job that makes an input which is not there yet. Raises `JobRejected` when it never will."""
    waiting = [row for row in job.inputs.all() if row.artifact_id is None]
    for row in waiting:
        source = row.source_job
        if source is not None and source.status in FINAL and source.status != Status.SUCCEEDED:
            raise chains.broken(f"Its input {row.parameter} was to come from", source, chains.INPUT)
    return waiting[0].source_job if waiting and not settle_inputs(job) else None


def appraise(job: Job) -> None:
    """Check the parameters against the inputs, estimate, and hold the estimate against the cards."""
    kind = registry.get(job.kind)
    rows = job.inputs.select_related("artifact").exclude(artifact=None)
    inputs = {row.parameter: as_input(row.artifact) for row in rows if row.artifact}
    try:
        kind.check(job.params, inputs)
        estimate = estimates.estimate(kind, job.params, inputs, job.stage)
        if job.needs_card:
            estimates.refuse_too_large(estimate.memory_bytes, job.gpu_wanted)
    except ValidationError as error:
        raise JobRejected(sentence_of(error), reason="invalid_input") from error
    except ApiError as error:
        raise JobRejected(str(error.detail), reason=error.code, hint=error.extra.get("hint", "")) from error
    job.estimate = estimate.as_dict()
    Job.objects.filter(pk=job.pk).update(estimate=job.estimate)


def refuse_full_disk(job: Job) -> None:
    """A job whose files would not fit beside the reserve does not start. Raises `JobRejected`."""
    need = (job.estimate or {}).get("disk_bytes")
    if need is not None:
        estimates.refuse_short_disk(settings.MISTUDIO_HOME, need, "The job writes about")


def sentence_of(error: ValidationError) -> str:
    """`field: what is wrong`, for people."""
    return " ".join(f"{field}: {' '.join(messages)}" for field, messages in flattened(error.detail))


def turn_away(job: Job, why: JobRejected) -> None:
    """A failed input holds the job, so that its owner may decide; what can never run is refused."""
    if why.reason == "input_failed":
        leave_queue(job, Status.HELD, error=str(why), failure_reason=why.reason, hint=why.hint)
    else:
        leave_queue(job, Status.REFUSED, error=str(why), failure_reason=why.reason, hint=why.hint)


def leave_queue(job: Job, to: str, error: str, **values: Any) -> None:
    with transaction.atomic():
        if job.move([Status.QUEUED], to, error=error, **values):
            JobEvent.objects.create(job=job, event=to, detail=error, attempt=job.attempt)
            transaction.on_commit(lambda: events.changed(job))

"""Chains: jobs that wait for others, and what becomes of them when one of those does not succeed.

A link that ends badly holds those that waited for it (`held`, `input_failed`), and they hold theirs by not succeeding.
Its retry takes its place: whoever waited for the failed job waits for the retry, and is queued again.
"""

from __future__ import annotations

from django.db import transaction

from jobs import events, waits
from jobs.exceptions import Conflict, JobRejected
from jobs.models import FINAL, Job, JobEvent, JobInput, Status

SAID_LENGTH = 200
INPUT = (
    "Retry that job: this one then waits for the retry and takes its result. "
    "Or cancel this one and run it again with another input."
)
AFTER = "Retry that job: this one then waits for the retry. Or release this one to start it all the same."


# Broken links -------------------------------------------------------------------------------------------
def broken(waited: str, link: Job, hint: str) -> JobRejected:
    """The refusal of a job whose link will not succeed any more; it names the link and what became of it."""
    why = f": {shortened(link.error)}" if link.error else "."
    sentence = f"{waited} {link}, which ended {link.status} (job {link.pk}){why}"
    return JobRejected(sentence, reason="input_failed", hint=hint)


def shortened(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= SAID_LENGTH else f"{line[: SAID_LENGTH - 1]}…"


def fell_through(job: Job) -> bool:
    return job.status in FINAL and job.status != Status.SUCCEEDED


def newest(job: Job) -> Job:
    """The retry that stands for a job that did not succeed, and its retry; the job itself where there is none."""
    while fell_through(job) and (again := job.retries.order_by("-queued_at").first()):
        job = again
    return job


# Going on -----------------------------------------------------------------------------------------------
def take_over(old: Job, again: Job) -> None:
    """Whoever waits for `old` waits for its retry from now on, in the transaction that makes it."""
    links = Job.after.through.objects.filter(to_job=old).exclude(from_job__status__in=FINAL)
    inputs = JobInput.objects.filter(source_job=old, artifact=None).exclude(job__status__in=FINAL)
    followers = [*links.values_list("from_job", flat=True), *inputs.values_list("job", flat=True)]
    links.update(to_job=again)
    inputs.update(source_job=again)
    waits.wait_instead(old, again)
    # Only those that the broken link held are queued again; who is held by a person stays so.
    for job in Job.objects.filter(pk__in=followers, status=Status.HELD, failure_reason="input_failed"):
        go_on(job, f"its link {old} is retried as {again.pk}")


def go_on(job: Job, why: str) -> None:
    if job.move([Status.HELD], Status.QUEUED, error="", failure_reason="", hint=""):
        JobEvent.objects.create(job=job, event="released", detail=why, attempt=job.attempt)
        transaction.on_commit(lambda: events.changed(job))


def let_go(job: Job) -> None:
    """For a release: links that only said "after" and will not succeed are dropped. Raises `Conflict` where what is
    missing is an input, without which the job cannot run."""
    for row in job.inputs.filter(artifact=None).select_related("source_job"):
        if row.source_job and fell_through(row.source_job):
            refusal = broken(f"Its input {row.parameter} was to come from", row.source_job, INPUT)
            raise Conflict(f"{refusal} {refusal.hint}")
    gone = [before for before in job.after.exclude(status=Status.SUCCEEDED) if before.final]
    if gone:
        job.after.remove(*gone)
        names = ", ".join(str(before) for before in gone)
        JobEvent.objects.create(job=job, event="unlinked", detail=f"no longer after {names}")

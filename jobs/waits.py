"""Why a queued job does not start now, as its row keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from jobs import events
from jobs.models import FINAL, Job, Status

#: What a row remembers from one look to the next, whatever it waits for: the reading of a card that its work found
#: too full, and since when others have been starting on the card that it waits for.
REMEMBERED = ("skip", "passed_at")
#: Reasons that end with another job, not with a free card: who waits so stands in no line.
FOR_A_JOB = ("after", "input")


@dataclass(frozen=True)
class Wait:
    """Why a queued job does not start now; stored as `waiting_for`."""

    reason: str
    detail: str = ""
    gpu_uuid: str | None = None
    job_id: str | None = None
    eta_seconds: float | None = None
    short: dict[str, str] | None = None  # by card: when it was first seen too full because of others

    def as_dict(self) -> dict[str, Any]:
        entry = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return entry if self.short else {k: v for k, v in entry.items() if k != "short"}

    def beginning(self) -> dict[str, Any]:
        """The entry of a job that has not waited before."""
        return self.as_dict() | {"since": timezone.now().isoformat()}


def note_wait(job: Job, wait: Wait) -> None:
    """Store why the job waits, when the reason is another than before."""
    before = job.waiting_for or {}
    told = wait.as_dict()
    if all(before.get(k) == v for k, v in told.items() if k != "eta_seconds") and not steps_aside(job, wait):
        return
    same = before.get("reason") == wait.reason and before.get("since")
    entry = told | {"since": before["since"] if same else timezone.now().isoformat()}
    entry |= {name: before[name] for name in REMEMBERED if name in before}
    values: dict[str, Any] = {"waiting_for": entry}
    if wait.reason in FOR_A_JOB:
        values["waits_on_id"] = wait.job_id
    if Job.objects.filter(pk=job.pk, status=Status.QUEUED, attempt=job.attempt).update(**values):
        job.waiting_for = entry
        events.changed(job)


def wait_instead(old: Job, again: Job) -> None:
    """Whoever stood aside for `old`, ended or not, does so for `again`: two statements, however many they are."""
    for reason in FOR_A_JOB:
        waiting = Job.objects.filter(waits_on=old, waiting_for__reason=reason).exclude(status__in=FINAL)
        waiting.update(waits_on=again, waiting_for=for_job(reason, again).beginning())


def for_job(reason: str, job: Job) -> Wait:
    return Wait(reason, f"after {job}", job_id=str(job.pk))


def steps_aside(job: Job, wait: Wait) -> bool:
    """Whether it leaves its line only now to wait for another job."""
    return wait.reason in FOR_A_JOB and str(job.waits_on_id) != wait.job_id


def remember(job: Job, **facts: Any) -> None:
    """Add what later looks go by; nobody is told."""
    job.waiting_for = (job.waiting_for or {}) | facts
    Job.objects.filter(pk=job.pk, status=Status.QUEUED, attempt=job.attempt).update(
        waiting_for=job.waiting_for
    )

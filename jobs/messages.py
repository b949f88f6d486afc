"""What is told to the outside, and to whom: rows of an outbox, written with what they tell (`jobs.postman` delivers).

A message holds nothing that others may not see of a job: no parameters, results, errors or paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction

from gpus.models import GpuEvent
from gpus.shapes import iso

if TYPE_CHECKING:
    from jobs.models import Job, Message

#: Ends that somebody has to look at. A job that a person holds is told to nobody, one that is held for an error is.
FAILURES = ("failed", "refused", "held")


def tell_of(job: Job) -> None:
    """The job has come to an end, or is held because another one ended badly."""
    held_for_cause = job.status == "held" and bool(job.error)
    if job.final or held_for_cause:
        post(f"job.{job.status}", {"job": about(job)}, _who_wants(job))


def about(job: Job) -> dict[str, Any]:
    seconds = (
        (job.finished_at - job.started_at).total_seconds() if job.started_at and job.finished_at else None
    )
    return {
        "id": str(job.pk),
        "kind": job.kind,
        "name": job.name,
        "owner": job.owner.get_username(),
        "status": str(job.status),
        "failure_reason": job.failure_reason,
        "host": job.host.name if job.host else None,
        "gpu_uuids": job.gpu_uuids,
        "simulated": job.simulated,
        "queued_at": iso(job.queued_at),
        "started_at": iso(job.started_at),
        "finished_at": iso(job.finished_at),
        "duration_s": seconds and round(seconds, 3),
        "url": f"{settings.MISTUDIO_PUBLIC_URL.rstrip('/')}/jobs/{job.pk}/",
    }


def _who_wants(job: Job) -> Iterator[str]:
    from jobs.models import MailChoice

    if not job.owner.is_active:
        return
    choice = MailChoice.objects.filter(user=job.owner).first()
    when = choice.when if choice else MailChoice.When.FAILURE
    if when == MailChoice.When.ALWAYS or (when == MailChoice.When.FAILURE and job.status in FAILURES):
        yield job.owner.email


def tell_of_cards(events: list[GpuEvent]) -> None:
    """A lost card is the operator's to look after."""
    for event in events:
        if event.event == "lost":
            card = {"uuid": event.uuid, "host": event.host.name, "detail": event.detail}
            post("card.lost", {"card": card}, operators())


def operators() -> Iterable[str]:
    users = get_user_model().objects.filter(is_superuser=True, is_active=True)
    return users.exclude(email="").values_list("email", flat=True)


def post(event: str, payload: dict[str, Any], mail_to: Iterable[str]) -> None:
    """Into the outbox, for every channel that is set up."""
    from jobs import tasks
    from jobs.models import Message

    rows = (
        [Message(channel=Message.Channel.WEBHOOK, event=event, payload=payload)]
        if settings.MISTUDIO_WEBHOOK_URL
        else []
    )
    if settings.MISTUDIO_EMAIL_URL:
        rows += [mail(event, payload, address) for address in mail_to if address]
    if rows:
        Message.objects.bulk_create(rows)
        transaction.on_commit(lambda: tasks.ring(tasks.deliver, queue="cpu"))


def mail(event: str, payload: dict[str, Any], address: str) -> Message:
    from jobs.models import Message

    return Message(channel=Message.Channel.EMAIL, event=event, payload=payload, address=address)

"""Work on the machine itself: nothing new starts, what runs ends or pauses, and it is said when that is so."""

from __future__ import annotations

from typing import NamedTuple

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from rest_framework.exceptions import APIException

from gpus import rest
from gpus.models import Gpu, Host, Maintenance
from jobs import tasks, verbs
from jobs.exceptions import Conflict
from jobs.models import ACTIVE, Job, Lease, Status
from jobs.people import Person


def begin(host: Host | None, user: Person, note: str = "") -> Maintenance:
    """From its commit on nothing is granted there. One that is in force already goes on."""
    with transaction.atomic():
        # A grant looks under the lock of its host or card: it comes before all of this, or sees it. `no_key`: with a
        # card in its hand, it writes rows that point at the host.
        list(Host.objects.select_for_update(no_key=True).order_by("pk"))
        list(Gpu.objects.select_for_update(no_key=True).order_by("pk"))
        known = Maintenance.in_force().filter(host=host).first()
        return known or Maintenance.objects.create(host=host, by=str(user), note=note)


def pause(maintenance: Maintenance, user: Person) -> list[Job]:
    """Ask every running job that can go on later to pause, and remember which; interactive ones end by themselves."""
    asked = []
    for job in running(maintenance.host).filter(interactive=False, pause_requested_at=None):
        maintenance.paused[str(job.pk)] = job.attempt
        maintenance.save(
            update_fields=["paused"]
        )  # first: one that paused and is not remembered stays paused
        try:
            asked.append(verbs.pause(job, user))
        except Conflict:  # it has just ended
            continue
    return asked


def end(maintenance: Maintenance) -> None:
    Maintenance.objects.filter(pk=maintenance.pk).update(ended_at=timezone.now())
    tasks.ring_dispatch()


class Resumed(NamedTuple):
    jobs: list[Job]
    pausing: list[Job]  # still on the way to a pause
    refused: list[tuple[Job, str]]  # such as one whose card was taken out; and why


def resume(maintenance: Maintenance, user: Person) -> Resumed:
    """Queue again what it paused, but not what was resumed (or ended) since."""
    found = Resumed([], [], [])
    for job in Job.objects.filter(pk__in=maintenance.paused).select_related("owner", "host"):
        if job.attempt != maintenance.paused[str(job.pk)] or job.pause_requested_at is None:
            continue
        if job.status == Status.PAUSED:
            resume_one(job, user, found)
        elif job.status in ACTIVE:
            found.pausing.append(job)
    return found


def resume_one(job: Job, user: Person, found: Resumed) -> None:
    try:
        found.jobs.append(verbs.resume(job, user))
    except Conflict:  # somebody else was first
        return
    except APIException as error:
        found.refused.append((job, rest.body(error)["detail"]))


def running(host: Host | None = None) -> QuerySet[Job]:
    """Jobs that have processes now, oldest first."""
    jobs = Job.objects.filter(status__in=ACTIVE).select_related("owner", "host").order_by("queued_at")
    return jobs if host is None else jobs.filter(host=host)


def held_cards(host: Host | None = None) -> int:
    """Leases whose job has ended and whose memory is not back yet; one in quarantine may never be."""
    leases = Lease.objects.filter(state=Lease.State.RELEASING)
    return (leases if host is None else leases.filter(attempt__host=host)).count()

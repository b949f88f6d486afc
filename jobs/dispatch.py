"""Which job starts next: the queue in order, and the grant. Any process may call `schedule` at any time.

The grant is one transaction: it locks the resource rows in key order, counts, and writes attempt, leases and
`queued → starting` together. The unique constraint on open leases makes the database the judge of races.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from gpus.models import Gpu, Host, Maintenance
from jobs import events, faults, readiness, tasks
from jobs.board import Board, Slots
from jobs.exceptions import JobRejected
from jobs.models import Attempt, Job, JobEvent, Lease, Status
from jobs.patience import AWAY
from jobs.placement import Wait, job_class, need_bytes, note_wait, place

logger = logging.getLogger(__name__)


def schedule() -> int:
    """Start every queued job that can start now, highest priority first, then oldest; how many started.

    A blocked job never blocks jobs for other cards, and one that cannot be judged blocks nobody.
    """
    board, granted = Board(), 0
    for job in queued():
        while (plan := judged(job, board)) is not None:
            started = grant(job, plan)
            board, granted = Board(), granted + started
            if started or not still_queued(job):
                break  # else somebody else was first on these cards, and the new board has another answer
    return granted


def judged(job: Job, board: Board) -> list[Slots] | None:
    """The slots that take the job now; None when it waits or was turned away."""
    try:
        plan = place(job, board)
        if not isinstance(plan, Wait):
            return plan
        note_wait(job, plan)
    except JobRejected as why:
        readiness.turn_away(job, why)
    except AWAY:
        raise
    except Exception as error:
        logger.exception("%s cannot be placed", job)
        readiness.leave_queue(
            job, Status.HELD, error=f"It could not be judged: {type(error).__name__}: {error}"
        )
    return None


def still_queued(job: Job) -> bool:
    job.refresh_from_db()
    return job.status == Status.QUEUED and job.cancel_requested_at is None


def queued() -> Iterator[Job]:
    now = timezone.now()
    ready = Job.objects.filter(status=Status.QUEUED, cancel_requested_at=None)
    ready = ready.filter(Q(not_before=None) | Q(not_before__lte=now))
    yield from ready.select_related("owner").order_by("-priority", "queued_at")


def grant(job: Job, plan: list[Slots]) -> bool:
    """Give the job its slots: attempt, leases and `starting` in one transaction; False if someone was first."""
    try:
        with transaction.atomic():
            attempt = _grant(job, plan)
            if attempt is None:
                return False
            faults.point("granting")
    except IntegrityError:
        logger.info("%s: another dispatch took the slot first", job)
        return False
    faults.point("granted")
    return True


def _grant(job: Job, plan: list[Slots]) -> Attempt | None:
    picked = {s.resource: _lock_and_pick(job, s) for s in sorted(plan, key=lambda s: s.resource)}
    slots = {resource: slot for resource, slot in picked.items() if slot is not None}
    if len(slots) < len(plan) or Maintenance.of(plan[0].host):  # under the locks that its begin takes, too
        return None
    uuids = [s.gpu.uuid for s in plan if s.gpu is not None]
    host, number = plan[0].host, job.attempt + 1
    moved = Job.objects.filter(
        pk=job.pk, status=Status.QUEUED, attempt=job.attempt, cancel_requested_at=None
    ).update(
        status=Status.STARTING,
        attempt=number,
        host=host,
        gpu_uuids=uuids,
        gpu_uuid=uuids[0] if uuids else None,
        simulated=any(s.gpu.simulated for s in plan if s.gpu is not None),
        waiting_for=None,
        not_before=None,
        pause_requested_at=None,
    )
    return _write_attempt(job, plan, slots, host, number) if moved else None


def _lock_and_pick(job: Job, slots: Slots) -> int | None:
    """Under the lock of the resource's row, the lowest free slot as the database has it now.

    None as well when the leases are not those that the job was placed by: their memory was not counted.
    """
    if slots.gpu is not None:
        gpu = Gpu.objects.select_for_update().get(pk=slots.gpu.pk)
        limits = {"batch": gpu.max_jobs if gpu.enabled else 0, "interactive": gpu.interactive_slots}
    else:
        Host.objects.select_for_update().get(pk=slots.host.pk)
        limits = slots.limits
    leases = list(Lease.objects.filter(resource=slots.resource, ended_at=None))
    if {lease.pk for lease in leases} - {lease.pk for lease in slots.leases}:
        return None
    now = Slots(slots.resource, slots.host, limits, slots.gpu, leases)
    slot = now.free_slot(job_class(job))
    return None if slot and slots.gpu is None and job.needs_card else slot


def _write_attempt(job: Job, plan: list[Slots], picked: dict[str, int], host: Host, number: int) -> Attempt:
    cards = [s.gpu for s in plan if s.gpu is not None]
    attempt = Attempt.objects.create(
        job=job,
        number=number,
        host=host,
        boot_id=host.boot_id,
        gpu_uuids=[g.uuid for g in cards],
        gpu_names=[g.name for g in cards],
    )
    for resource, slot in picked.items():
        Lease.objects.create(
            resource=resource,
            job_class=job_class(job),
            slot=slot,
            attempt=attempt,
            estimate_bytes=need_bytes(job),
        )
    where = ", ".join(f"card {g.index} ({g.uuid})" for g in cards) or f"the CPU of {host}"
    JobEvent.objects.create(job=job, event="granted", detail=where, attempt=number)
    transaction.on_commit(lambda: _announce(job, attempt))
    return attempt


def _announce(job: Job, attempt: Attempt) -> None:
    tasks.ring_run(attempt)
    job.refresh_from_db()
    events.gpu_assigned(job)
    events.changed(job)

"""Which job starts next, and where. Any process may call `schedule` at any time.

The grant is one transaction: it locks the resource rows in key order, counts, and writes attempt, leases and
`queued → starting` together. The unique constraint on open leases makes the database the judge of races.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from gpus import choice
from gpus.models import Gpu, Host
from jobs import events, faults, readiness, tasks
from jobs.board import Board, Slots
from jobs.exceptions import JobRejected
from jobs.models import Attempt, Job, JobEvent, Lease, Status
from jobs.patience import AWAY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wait:
    """Why a queued job does not start now; stored as `waiting_for`."""

    reason: str
    detail: str = ""
    gpu_uuid: str | None = None
    job_id: str | None = None
    eta_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def schedule() -> int:
    """Start every queued job that can start now, highest priority first, then oldest; how many started.

    A blocked job never blocks jobs for other cards, and one that cannot be judged blocks nobody.
    """
    board, granted = Board(), 0
    for job in queued():
        if try_to_start(job, board):
            granted += 1
            board = Board()
    return granted


def try_to_start(job: Job, board: Board) -> bool:
    try:
        plan = place(job, board)
        if not isinstance(plan, Wait):
            return grant(job, plan)
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
    return False


def queued() -> Iterator[Job]:
    now = timezone.now()
    ready = Job.objects.filter(status=Status.QUEUED, cancel_requested_at=None)
    ready = ready.filter(Q(not_before=None) | Q(not_before__lte=now))
    yield from ready.select_related("owner").order_by("-priority", "queued_at")


def place(job: Job, board: Board) -> list[Slots] | Wait:
    """The resources that take this job now, or why none does."""
    if source := readiness.source_pending(job):
        return Wait("input", f"after {source}", job_id=str(source.pk))
    if not job.needs_card or job.device == "cpu":
        return place_on_cpu(job, board)
    wanted = choice.wanted(job.gpu_wanted)
    if isinstance(wanted, int):
        return place_auto(job, board)
    return place_named(job, board, wanted)


def place_on_cpu(job: Job, board: Board) -> list[Slots] | Wait:
    """A job without a card; one whose kind would need a card takes slot 0 alone."""
    for slots in (s for s in board.slots.values() if s.gpu is None):
        closed = board.closed.get(slots.resource)
        if closed:
            continue
        slot = slots.free_slot("batch")
        if slot is None or (slot and job.needs_card):
            continue
        if not slots.host_fits(need_bytes(job)):
            return Wait("memory", f"{slots.host} has too little free memory now")
        return [slots]
    closed_all = [
        board.closed[s.resource] for s in board.slots.values() if s.gpu is None and s.resource in board.closed
    ]
    return Wait("host", closed_all[0]) if closed_all else Wait("slot", "all CPU slots are taken")


def need_bytes(job: Job) -> int | None:
    return (job.estimate or {}).get("memory_bytes")


def job_class(job: Job) -> str:
    return "interactive" if job.interactive else "batch"


def place_named(job: Job, board: Board, wanted: list[str]) -> list[Slots] | Wait:
    chosen = []
    for uuid in wanted:
        slots = board.slots.get(f"gpu:{uuid}")
        if slots is None:
            return Wait("card", f"{uuid} is not known", gpu_uuid=uuid)
        if wait := blocked(job, slots, board):
            return wait
        chosen.append(slots)
    return chosen


def blocked(job: Job, slots: Slots, board: Board) -> Wait | None:
    """What keeps this job from this card now."""
    assert slots.gpu is not None
    uuid = slots.gpu.uuid
    if closed := board.closed.get(slots.resource):
        return Wait("card", closed, gpu_uuid=uuid)
    if slots.free_slot(job_class(job)) is None:
        return behind(slots, job_class(job))
    if not slots.fits_now(need_bytes(job)):
        return Wait("memory", f"card {slots.gpu.index} has too little free memory now", gpu_uuid=uuid)
    return None


def behind(slots: Slots, job_class: str) -> Wait:
    """Waiting for the job that holds the card; its own remaining time is the wait."""
    assert slots.gpu is not None
    holders = [le for le in slots.leases if le.job_class == job_class] or slots.leases
    holder = holders[0].attempt.job if holders else None
    releasing = all(le.state != Lease.State.ACTIVE for le in holders)
    detail = f"card {slots.gpu.index} is being released" if releasing else f"after {holder}"
    eta = (holder.progress or {}).get("eta_seconds") if holder else None
    return Wait("lease", detail, slots.gpu.uuid, str(holder.pk) if holder else None, eta)


def place_auto(job: Job, board: Board) -> list[Slots] | Wait:
    """Of the cards that can take the job now, the one with the most free memory."""
    waits = []
    for slots in board.by_preference():
        wait = blocked(job, slots, board)
        if wait is None:
            return [slots]
        waits.append(wait)
    if not waits:
        return Wait("card", "no card is known")
    soonest = min(waits, key=lambda w: (w.reason != "lease", w.eta_seconds is None, w.eta_seconds or 0))
    return Wait(soonest.reason, soonest.detail, None, soonest.job_id, soonest.eta_seconds)


def note_wait(job: Job, wait: Wait) -> None:
    """Store why the job waits, when the reason is another than before."""
    before = job.waiting_for or {}
    if all(before.get(k) == v for k, v in wait.as_dict().items() if k != "eta_seconds"):
        return
    entry = wait.as_dict() | {"since": timezone.now().isoformat()}
    if Job.objects.filter(pk=job.pk, status=Status.QUEUED).update(waiting_for=entry):
        job.waiting_for = entry
        events.changed(job)


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
    if len(slots) < len(plan):
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
    """Under the lock of the resource's row, the lowest free slot as the database has it now."""
    if slots.gpu is not None:
        gpu = Gpu.objects.select_for_update().get(pk=slots.gpu.pk)
        limits = {"batch": gpu.max_jobs if gpu.enabled else 0, "interactive": gpu.interactive_slots}
    else:
        Host.objects.select_for_update().get(pk=slots.host.pk)
        limits = slots.limits
    leases = list(Lease.objects.filter(resource=slots.resource, ended_at=None))
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

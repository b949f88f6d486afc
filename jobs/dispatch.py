"""Which job starts next: the queue line by line, and the grant. Any process may call `schedule` at any time.

The grant is one transaction: it locks the resource rows in key order, counts, and writes attempt, leases and
`queued → starting` together. The unique constraint on open leases makes the database the judge of races.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from gpus.models import Gpu, Host, Maintenance
from jobs import events, faults, limits, lines, readiness, tasks, waits
from jobs.board import Board, Slots
from jobs.exceptions import JobRejected
from jobs.lines import Standing
from jobs.models import FINAL, Attempt, Job, JobEvent, Lease, Status
from jobs.patience import AWAY
from jobs.placement import SHUT, beyond, job_class, keep, need_bytes, passed_over, place, room
from jobs.waits import Wait

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: After so long a round leaves the rest to the next, which it rings for: nobody waits for a doorbell (contract, 6).
ROUND_SECONDS = 1.5
CHUNK = 20


def schedule() -> int:
    """Start every queued job that can start now, highest priority first, then oldest; how many started.

    A blocked job never blocks jobs for other cards, and one that cannot be judged blocks nobody.
    """
    until, granted = time.monotonic() + ROUND_SECONDS, 0
    call_up(until)
    board = Board()
    while (leases := start_next(board, until)) is not None:
        granted += bool(leases)
        board = board.after(leases) if leases else Board()
    if time.monotonic() > until:
        tasks.ring_dispatch()
    return granted


def start_next(board: Board, until: float) -> list[Lease] | None:
    """Start the first job of the queue that can start now; its leases. Empty when somebody else was first on its
    cards, so that a new board has another answer; None when no job can start, or the time is up."""
    found = lines.standing()
    waiting: list[Job] = []
    keep(board, [standing.first for standing in found])
    for job in heapq.merge(*(in_turn(standing, board) for standing in found), key=lines.place_in_order):
        if time.monotonic() > until:
            return None
        if (plan := judged(job, board)) is not None:
            if leases := grant(job, plan):
                not_forgetting(waiting, job, plan)
            return leases
        waiting.append(job)
    return None


# Who is asked -------------------------------------------------------------------------------------------------


def call_up(until: float) -> None:
    """Those whose forerunners have ended step into their lines, wait for the next one, or are held."""
    waiting = Job.objects.filter(status=Status.QUEUED, waits_on__isnull=False)  # as the index has them
    ended = waiting.filter(cancel_requested_at=None, waits_on__status__in=FINAL)
    if not ended.exists():
        return
    simple = ended.filter(waits_on__status=Status.SUCCEEDED, need_bytes__isnull=False)
    Job.objects.filter(pk__in=simple.values("pk")).update(waits_on=None, waiting_for=None)
    for pk in ended.values_list("pk", flat=True):
        if time.monotonic() > until:
            return
        step_up(lines.whole(Job.objects.filter(pk=pk, status=Status.QUEUED)).first())


def step_up(job: Job | None) -> None:
    if job and answer(job, lambda: readiness.not_ready(job) or True):
        Job.objects.filter(pk=job.pk, status=Status.QUEUED).update(waits_on=None, waiting_for=None)


def in_turn(standing: Standing, board: Board) -> Iterator[Job]:
    """The first of a line, and those behind it whose answer may be another, in the order of the queue."""
    yield standing.first
    others = answerable(standing, board)
    if others is not None:
        rows = lines.startable().filter(others, line=standing.line.name).exclude(pk=standing.first.pk)
        yield from in_chunks(rows.order_by(*lines.ORDER))


def answerable(standing: Standing, board: Board) -> Q | None:
    """Who of a line could start by its room, or is too large for every card that it may have; None for nobody."""
    line, found = standing.line, []
    if (now := room(line, board)) > SHUT and standing.has_at_most(now):
        found.append(needs(at_most=now))
    if board.kept and (ahead := room(line, board, ahead=True)) > SHUT:
        found.append(needs(at_most=ahead) & lines.any_of(map(lines.ahead_of, board.kept.values())))
    if (limit := beyond(line, board)) == SHUT:
        found.append(Q(line__isnull=False))
    elif standing.has_over(limit):
        found.append(Q(need_bytes__gt=limit))
    return lines.any_of(found) if found else None


def needs(at_most: float) -> Q:
    return Q(need_bytes=None) | Q(need_bytes__lte=int(min(at_most, 2**62)))


def in_chunks(rows: QuerySet[Job]) -> Iterator[Job]:
    """Row by row, fetched a few at a time: a statement that stays open would not see, nor on SQLite survive, what is
    written meanwhile."""
    seen: set[UUID] = set()
    chunk = list(lines.whole(rows)[:CHUNK])
    while new := [job for job in chunk if job.pk not in seen]:
        seen.update(job.pk for job in new)
        yield from new
        last = new[-1]
        chunk = list(lines.whole(rows.exclude(lines.ahead_of(last)))[: CHUNK + 1])


# The answer ---------------------------------------------------------------------------------------------------


def judged(job: Job, board: Board) -> list[Slots] | None:
    """The slots that take the job now; None when it waits or was turned away."""
    return answer(job, lambda: place(job, board))


def answer(job: Job, question: Callable[[], T | Wait]) -> T | None:
    """What was found; None when the job waits, which is written down, or has left the queue."""
    try:
        found = question()
        if not isinstance(found, Wait):
            return found
        waits.note_wait(job, found)
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


def not_forgetting(waiting: Iterable[Job], started: Job, plan: list[Slots]) -> None:
    """Write down for those before the started job that wait for the memory of its cards that they were passed."""
    for job in waiting if not started.interactive else ():
        told = job.waiting_for or {}
        if (
            told.get("reason") == "memory"
            and "passed_at" not in told
            and any(passed_over(job, s) for s in plan)
        ):
            waits.remember(job, passed_at=timezone.now().isoformat())


def grant(job: Job, plan: list[Slots]) -> list[Lease]:
    """Give the job its slots: attempt, leases and `starting` in one transaction; no lease if someone was first."""
    try:
        with transaction.atomic():
            leases = _grant(job, plan)
            if not leases:
                return []
            faults.point("granting")
    except IntegrityError:
        logger.info("%s: another dispatch took the slot first", job)
        return []
    faults.point("granted")
    return leases


def _grant(job: Job, plan: list[Slots]) -> list[Lease]:
    if not limits.may_run_another(job.owner):
        return []
    picked = {s.resource: _lock_and_pick(job, s) for s in sorted(plan, key=lambda s: s.resource)}
    slots = {resource: slot for resource, slot in picked.items() if slot is not None}
    if len(slots) < len(plan) or Maintenance.of(plan[0].host):  # under the locks that its begin takes, too
        return []
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
    return _write_attempt(job, plan, slots, host, number) if moved else []


def _lock_and_pick(job: Job, slots: Slots) -> int | None:
    """Under the lock of the resource's row, the lowest free slot as the database has it now.

    None as well when the leases are not those that the job was placed by: their memory was not counted.
    """
    if slots.gpu is not None:
        gpu = Gpu.objects.select_for_update(no_key=True).get(pk=slots.gpu.pk)
        most = {"batch": gpu.max_jobs, "interactive": gpu.interactive_slots} if gpu.enabled else {}
    else:
        Host.objects.select_for_update(no_key=True).get(pk=slots.host.pk)
        most = slots.limits
    leases = list(Lease.objects.filter(resource=slots.resource, ended_at=None))
    if {lease.pk for lease in leases} - {lease.pk for lease in slots.leases}:
        return None
    now = Slots(slots.resource, slots.host, most, slots.gpu, leases)
    slot = now.free_slot(job_class(job))
    return None if slot and slots.gpu is None and job.needs_card else slot


def _write_attempt(
    job: Job, plan: list[Slots], picked: dict[str, int], host: Host, number: int
) -> list[Lease]:
    cards = [s.gpu for s in plan if s.gpu is not None]
    attempt = Attempt.objects.create(
        job=job,
        number=number,
        host=host,
        boot_id=host.boot_id,
        gpu_uuids=[g.uuid for g in cards],
        gpu_names=[g.name for g in cards],
    )
    facts = {"job_class": job_class(job), "attempt": attempt, "estimate_bytes": need_bytes(job)}
    leases = [Lease.objects.create(resource=name, slot=slot, **facts) for name, slot in picked.items()]
    where = ", ".join(f"card {g.index} ({g.uuid})" for g in cards) or f"the CPU of {host}"
    JobEvent.objects.create(job=job, event="granted", detail=where, attempt=number)
    transaction.on_commit(lambda: _announce(job, attempt))
    return leases


def _announce(job: Job, attempt: Attempt) -> None:
    tasks.ring_run(attempt)
    job.refresh_from_db()
    events.gpu_assigned(job)
    events.changed(job)

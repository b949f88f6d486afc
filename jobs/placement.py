"""Where a queued job would go now: its slots, the reason why it waits, or why it never can run.

A named card is never swapped. `auto` takes the card with the most free memory of those that can take the job now.
A job is refused for memory that others hold only when two fresh readings, 2 s apart, say that it would not fit
even without our own jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.utils import timezone

from gpus import choice
from gpus.timing import scaled
from jobs import readiness
from jobs.board import Board, Closed, Slots
from jobs.exceptions import JobRejected
from jobs.lines import Line, place_in_order
from jobs.memory import gib, holders, reserve_bytes
from jobs.models import Job, Lease
from jobs.waits import Wait

#: Between the two readings that refuse a job.
SHORT_SECONDS = 2.0
#: A named card that is lost comes back, or is given up.
LOST_SECONDS = 600.0
#: So long others may start on a card that a larger job waits for; then it is kept for that one.
PASSED_SECONDS = 600.0
#: Less than any job needs: nobody of a line can start.
SHUT = -1.0


def place(job: Job, board: Board) -> list[Slots] | Wait:
    """The resources that take this job now, or why none does. Raises `JobRejected` when none ever will."""
    if wait := readiness.not_ready(job):
        return wait
    found = place_now(job, board)
    if not isinstance(found, Wait) and job.attempt == 0:  # later attempts have their files there already
        readiness.refuse_full_disk(job)
    return found


def place_now(job: Job, board: Board) -> list[Slots] | Wait:
    if not job.needs_card or job.device == "cpu":
        return place_on_cpu(job, board)
    wanted = choice.wanted(job.gpu_wanted)
    if isinstance(wanted, int):
        return place_auto(job, board)
    return place_named(job, board, wanted)


def need_bytes(job: Job) -> int | None:
    return (job.estimate or {}).get("memory_bytes")


def job_class(job: Job) -> str:
    return "interactive" if job.interactive else "batch"


def place_on_cpu(job: Job, board: Board) -> list[Slots] | Wait:
    """A job without a card; one whose kind would need a card takes slot 0 alone."""
    resources = [slots for slots in board.slots.values() if slots.gpu is None]
    free = [
        s
        for s in resources
        if s.resource not in board.closed and has_cpu_slot(s, job_class(job), job.needs_card)
    ]
    for slots in free:
        if slots.host_fits(need_bytes(job)):
            return [slots]
    if free:
        return Wait("memory", f"{free[0].host} has too little free memory now")
    closed = [board.closed[s.resource] for s in resources if s.resource in board.closed]
    return waits_for(closed[0], "host") if closed else Wait("slot", "all CPU slots are taken")


def waits_for(closed: Closed, otherwise: str, gpu_uuid: str | None = None) -> Wait:
    reason = closed.word if closed.word in ("driver", "maintenance") else otherwise
    return Wait(reason, closed.detail, gpu_uuid)


def has_cpu_slot(slots: Slots, job_class: str, whole: bool) -> bool:
    slot = slots.free_slot(job_class)
    return slot == 0 if whole else slot is not None


# Named cards ------------------------------------------------------------------------------------------


def place_named(job: Job, board: Board, wanted: list[str]) -> list[Slots] | Wait:
    chosen = [named(uuid, board) for uuid in wanted]
    for slots in chosen:
        if is_short(job, slots, board):
            return short(job, [slots], board)
        if wait := blocked(job, slots, board):
            return wait
    return chosen


def named(uuid: str, board: Board) -> Slots:
    """The card of this UUID. Raises `JobRejected` when it has gone since the job was submitted."""
    slots = board.slots.get(f"gpu:{uuid}")
    if slots is None:
        raise unavailable(f"Card {uuid} is not known any more.")
    closed = board.closed.get(slots.resource)
    if closed and not may_open(slots, closed):
        raise unavailable(f"{closed.detail[0].upper()}{closed.detail[1:]}.")
    return slots


def may_open(slots: Slots, closed: Closed) -> bool:
    """Whether a closed card may open by itself: a lost one does so soon, or is given up."""
    lost_at = slots.gpu.lost_at if slots.gpu else None
    lately = lost_at is not None and timezone.now() - lost_at < timedelta(seconds=scaled(LOST_SECONDS))
    return closed.passing or (closed.word == "lost" and lately)


def unavailable(sentence: str) -> JobRejected:
    hint = "Retry on another card, or with gpu: auto; nothing was moved by itself."
    return JobRejected(sentence, reason="card_unavailable", hint=hint)


def blocked(job: Job, slots: Slots, board: Board) -> Wait | None:
    """What keeps this job from this card now."""
    assert slots.gpu is not None
    uuid, index, need = slots.gpu.uuid, slots.gpu.index, need_bytes(job)
    if closed := board.closed.get(slots.resource):
        return waits_for(closed, "card", uuid)
    if handed_back(job, slots):
        return Wait("memory", f"card {index} was fuller than its reading said", gpu_uuid=uuid)
    if slots.free_slot(job_class(job)) is None:
        return behind(slots, job_class(job))
    if wait := kept_from(job, slots, board):
        return wait
    if not slots.fits_now(need):
        mine = "; the card is kept for it" if board.kept.get(slots.resource) == job else ""
        return Wait("memory", too_full(slots, need) + mine, gpu_uuid=uuid)
    return None


def too_full(slots: Slots, need: int | None) -> str:
    """Why a job of this size does not fit beside what is there now: the card, or the host of a simulated one."""
    if slots.memory.holds(need):
        return f"needs {gib(need)} of the memory of {slots.host}, which has less free now"
    return f"needs {gib(need)}, card {slots.gpu.index if slots.gpu else '?'} has {gib(slots.free_bytes())} free now"


def haunted(slots: Slots) -> Wait | None:
    """`auto` passes by a card that uses memory or computes for nobody who is listed; by name it may be had."""
    if not slots.haunted or slots.gpu is None:
        return None
    detail = f"card {slots.gpu.index} holds memory or computes for no process (a ghost): name it to use it all the same"
    return Wait("card", detail, gpu_uuid=slots.gpu.uuid)


def handed_back(job: Job, slots: Slots) -> bool:
    """Whether the work of this job, on arrival, found the card too full; until a newer reading says otherwise."""
    skip = (job.waiting_for or {}).get("skip") or {}
    sampled_at = slots.gpu.sampled_at if slots.gpu else None
    return bool(
        slots.gpu
        and skip.get("gpu_uuid") == slots.gpu.uuid
        and sampled_at
        and sampled_at <= datetime.fromisoformat(skip["at"])
    )


def behind(slots: Slots, job_class: str) -> Wait:
    """Waiting for the job that holds the card; its own remaining time is the wait."""
    assert slots.gpu is not None
    holders = [le for le in slots.leases if le.job_class == job_class] or slots.leases
    holder = holders[0].attempt.job if holders else None
    releasing = all(le.state != Lease.State.ACTIVE for le in holders)
    detail = f"card {slots.gpu.index} is being released" if releasing else f"after {holder}"
    eta = (holder.progress or {}).get("eta_seconds") if holder else None
    return Wait("lease", detail, slots.gpu.uuid, str(holder.pk) if holder else None, eta)


# Auto ---------------------------------------------------------------------------------------------------


def place_auto(job: Job, board: Board) -> list[Slots] | Wait:
    """Of the cards that can take the job now, the one with the most free memory."""
    cards = board.by_preference()
    waits = []
    for slots in cards:
        wait = blocked(job, slots, board) or haunted(slots)
        if wait is None:
            return [slots]
        waits.append(wait)
    if not waits:
        return Wait("card", "no card is known")
    could_open = [
        s for s in cards if not (c := board.closed.get(s.resource)) or c.passing or c.word == "lost"
    ]
    if could_open and all(is_short(job, slots, board) for slots in could_open):
        return short(job, could_open, board)
    return soonest(waits)


def soonest(waits: list[Wait]) -> Wait:
    """The wait of the card that may come first: behind a job before anything else."""
    order = {"lease": 0, "memory": 1, "maintenance": 2, "driver": 3, "card": 4}
    first = min(waits, key=lambda w: (order.get(w.reason, 5), w.eta_seconds is None, w.eta_seconds or 0))
    return Wait(first.reason, first.detail, None, first.job_id, first.eta_seconds)


# Memory in other hands ----------------------------------------------------------------------------------


def is_short(job: Job, slots: Slots, board: Board) -> bool:
    """Whether the open card would be too full even if all our jobs on it had ended."""
    return slots.resource not in board.closed and not slots.memory.would_hold(need_bytes(job))


def short(job: Job, cards: Sequence[Slots], board: Board) -> Wait:
    """The first sight of such cards is a wait; the second of each, from newer readings, raises `JobRejected`."""
    now, before = timezone.now().isoformat(), (job.waiting_for or {}).get("short") or {}
    since = {slots.resource: before.get(slots.resource, now) for slots in cards}
    if all(_short_again(job, slots, datetime.fromisoformat(since[slots.resource])) for slots in cards):
        raise insufficient(job, cards, board)
    numbers = "; ".join(card_and_outside(slots) for slots in cards)
    uuid = cards[0].gpu.uuid if len(cards) == 1 and cards[0].gpu else None
    return Wait("outside", numbers, uuid, short=since)


def _short_again(job: Job, slots: Slots, since: datetime) -> bool:
    due = since + timedelta(seconds=scaled(SHORT_SECONDS))
    listed_at = slots.gpu.processes_at if slots.gpu else None
    newer = (listed_at is not None and listed_at >= due) or (timezone.now() >= due and slots.look_again())
    return newer and not slots.memory.would_hold(need_bytes(job))


def outside_of(slots: Slots) -> str:
    """`20.0 of 24.0 GiB are used outside miStudio by python (pid 4242, 20.0 GiB)`."""
    memory = slots.memory
    share = f"{gib(memory.outside).removesuffix(' GiB')} of {gib(memory.total)}"
    return f"{share} are used outside miStudio by {holders(memory)}"


def card_and_outside(slots: Slots) -> str:
    return f"card {slots.gpu.index if slots.gpu else '?'}: {outside_of(slots)}"


def insufficient(job: Job, cards: Sequence[Slots], board: Board) -> JobRejected:
    """The refusal with its numbers: what is needed, what is there, who has the rest, which cards would do."""
    need = need_bytes(job)
    free = max((slots.memory.without_ours or 0 for slots in cards), default=0)
    kept = gib(max(reserve_bytes(slots.memory.total or 0) for slots in cards))
    where = f"Card {cards[0].gpu.index}" if len(cards) == 1 and cards[0].gpu else "No card"
    verb = f"has {gib(free)}" if len(cards) == 1 else f"has that; the emptiest has {gib(free)}"
    sentence = f"The job needs {gib(need)} beside a reserve of {kept}. {where} {verb} for us; "
    tell = outside_of if len(cards) == 1 else card_and_outside
    sentence += "; ".join(tell(slots) for slots in cards) + "."
    return JobRejected(sentence, reason="insufficient_gpu_memory", hint=_advice(need, board))


def _advice(need: int | None, board: Board) -> str:
    fits = [
        str(s.gpu.index)
        for s in board.cards()
        if s.gpu and s.resource not in board.closed and s.memory.would_hold(need)
    ]
    if not fits:
        return "Free a card, or make the job smaller; then retry."
    return (
        f"It would fit on card {', '.join(fits)}: retry there or with gpu: auto. It was not moved by itself."
    )


# Who was passed over --------------------------------------------------------------------------------------------


def passed_over(job: Job, slots: Slots) -> bool:
    """Whether a job that starts in this slot passes one that waits for the card's memory."""
    could = slots.gpu is not None and not job.interactive and slots.memory.would_hold(need_bytes(job))
    wanted = Line.of(job).uuids
    return could and (not wanted or slots.gpu.uuid in wanted)  # type: ignore[union-attr]


def keep(board: Board, waiting: Iterable[Job]) -> None:
    """Keep a card for each of those that others have passed for too long, in the order of the queue."""
    long_ago = timezone.now() - timedelta(seconds=scaled(PASSED_SECONDS))
    board.kept.clear()
    for job in waiting:
        passed_at = (job.waiting_for or {}).get("passed_at")
        if passed_at is None or datetime.fromisoformat(passed_at) > long_ago:
            continue
        cards = [s for s in board.cards() if s.resource not in board.closed and passed_over(job, s)]
        if cards := [s for s in cards if s.resource not in board.kept]:
            board.kept[min(cards, key=soonest_free).resource] = job


def soonest_free(slots: Slots) -> tuple[float, int]:
    """By what its jobs say they have left; then in the order of the list."""
    left = [(lease.attempt.job.progress or {}).get("eta_seconds") for lease in slots.leases]
    assert slots.gpu is not None
    return max((math.inf if seconds is None else seconds for seconds in left), default=0.0), slots.gpu.index


def kept_from(job: Job, slots: Slots, board: Board) -> Wait | None:
    """A card that is kept for a job takes nobody who stands behind it; a short question passes."""
    first = board.kept.get(slots.resource)
    if first is None or job.interactive or place_in_order(job) <= place_in_order(first):
        return None
    return kept_for(first, slots)


def kept_for(first: Job, slots: Slots) -> Wait:
    """What a kept card says to those behind."""
    assert slots.gpu is not None
    why = f"which needs {gib(need_bytes(first))} and was passed by others"
    detail = f"card {slots.gpu.index} is kept for {first}, {why}"
    return Wait("kept", detail, slots.gpu.uuid, str(first.pk))


# Whole lines ----------------------------------------------------------------------------------------------------


def room(line: Line, board: Board, *, ahead: bool = False) -> float:
    """The largest job, in bytes, that could start in this line now; `SHUT` while none can.

    `ahead`: of those who stand before the jobs that cards are kept for.
    """
    if line.on_cpu:
        whole = line.asks == "cpu-whole"
        cpus = [s for s in board.slots.values() if s.gpu is None and s.resource not in board.closed]
        return max((s.room() for s in cpus if has_cpu_slot(s, line.job_class, whole)), default=SHUT)
    rooms = [room_on(slots, line, board, ahead) for slots in asked(line, board)]
    return (min if line.uuids else max)(rooms, default=SHUT)


def room_on(slots: Slots, line: Line, board: Board, ahead: bool) -> float:
    kept = slots.resource in board.kept and not ahead and line.job_class == "batch"
    shut = slots.resource in board.closed or slots.free_slot(line.job_class) is None or kept
    ghost = slots.haunted and not line.uuids
    return SHUT if shut or ghost else slots.room()


def asked(line: Line, board: Board) -> list[Slots]:
    """The cards of a line that are known; all of them for `auto`."""
    cards = board.cards()
    return [s for s in cards if s.gpu and s.gpu.uuid in line.uuids] if line.uuids else cards


def beyond(line: Line, board: Board) -> float:
    """The need, in bytes, over which a job of this line is to be refused; infinite while that is open."""
    if line.on_cpu:
        return math.inf
    cards = asked(line, board)
    gone = [s for s in cards if (closed := board.closed.get(s.resource)) and not may_open(s, closed)]
    if line.uuids:
        if gone or len(cards) < len(line.uuids):
            return SHUT
        return min(
            (s.memory.room_without_ours for s in cards if s.resource not in board.closed), default=math.inf
        )
    could_open = [s for s in cards if s not in gone]
    if not could_open or any(s.resource in board.closed for s in could_open):
        return math.inf
    return max(s.memory.room_without_ours for s in could_open)

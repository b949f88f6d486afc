"""Which cards would take a job, with the numbers: for the form and for `system/gpu-fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from gpus import choice
from gpus.rest import ApiError, flattened
from jobs import lines
from jobs.board import Board, Slots
from jobs.memory import gib, reserve_bytes
from jobs.models import Job
from jobs.people import Person
from jobs.placement import (
    behind,
    handed_back,
    job_class,
    keep,
    kept_for,
    kept_from,
    need_bytes,
    outside_of,
    too_full,
)
from jobs.submit import Plan, check, get_kind
from jobs.waits import Wait

Card = dict[str, Any]
Errors = dict[str, list[str]]

#: Parts of an estimate that are about the card.
ON_CARD = ("memory_bytes", "breakdown", "basis")


def fit(user: Person, kind_name: str, params: Mapping[str, Any], gpu: Any = None) -> dict[str, Any]:
    """The estimate, and for every card whether the job fits it now, later or never; `chosen` is the answer for
    what `gpu` asks. Incomplete parameters give an estimate of null and the `errors` that explain it, so that a
    half-filled form shows the cards. Raises `ApiError` 400 for a `gpu` that could not be submitted.
    """
    kind, board = get_kind(kind_name), Board()
    plan, errors, need = attempt(user, kind_name, params)
    needs_card = plan.needs_card or bool(kind.card_stages(plan.params)) if plan else kind.needs_gpu != "never"
    slot_class = "interactive" if kind.interactive else "batch"
    keep(board, [line.first for line in lines.standing()])
    cards = [
        verdict(slots, need, slot_class, board, kept=kept(slots, slot_class, board))
        for slots in board.cards()
    ]
    auto = of_auto(cards)
    request = "auto" if gpu is None else choice.parse(gpu, max_gpus=kind.max_gpus, needs_card=needs_card)
    return {
        "kind": kind_name,
        "needs_card": needs_card,
        "estimate": told(plan),
        "errors": errors,
        "cards": cards,
        "auto": auto,
        "chosen": chosen(request, cards, auto),
    }


def of_job(job: Job, board: Board) -> list[Card]:
    """What every card says to this job now; `asked` where the job may take that one."""
    wanted = choice.wanted(job.gpu_wanted)
    keep(board, [line.first for line in lines.standing()])
    return [
        to_job(job, slots, board) | {"asked": isinstance(wanted, int) or slots.gpu.uuid in wanted}
        for slots in board.cards()
        if slots.gpu is not None
    ]


def to_job(job: Job, slots: Slots, board: Board) -> Card:
    card = verdict(slots, need_bytes(job), job_class(job), board, kept=kept_from(job, slots, board))
    if card["verdict"] == "now" and handed_back(job, slots):
        card |= {"verdict": "later", "detail": "was fuller than its reading said; the next reading decides"}
    return card


def attempt(
    user: Person, kind_name: str, params: Mapping[str, Any]
) -> tuple[Plan | None, Errors, int | None]:
    """The plan of a submit to any card, or why there is none; and the bytes on the card, where they are known."""
    try:
        plan = check(user, kind_name, {k: v for k, v in params.items() if k != "gpu"})
        return plan, {}, plan.on_card.memory_bytes if plan.on_card else None
    except serializers.ValidationError as error:
        return None, dict(flattened(error.detail)), None
    except ApiError as error:  # larger than every card, among others
        return None, {"non_field_errors": [str(error.detail)]}, error.extra.get("need_bytes")


def told(plan: Plan | None) -> dict[str, Any] | None:
    """The estimate of what is on the card, with the disk and the time of the stage that is first."""
    if plan is None or plan.estimate is None:
        return None
    found = plan.estimate.as_dict()
    if plan.on_card:
        found |= {key: value for key, value in plan.on_card.as_dict().items() if key in ON_CARD}
    return found


def kept(slots: Slots, job_class: str, board: Board) -> Wait | None:
    """For a job that is not queued yet, and so would stand behind all."""
    first = board.kept.get(slots.resource)
    return kept_for(first, slots) if first and job_class == "batch" else None


def verdict(slots: Slots, need: int | None, job_class: str, board: Board, kept: Wait | None) -> Card:
    gpu, memory = slots.gpu, slots.memory
    assert gpu is not None
    word, detail, eta = judged(slots, need, job_class, board)
    if word == "now" and kept:
        word, detail = "later", kept.detail
    return {
        "uuid": gpu.uuid,
        "gpu_id": gpu.index,
        "name": gpu.name,
        "verdict": word,
        "detail": detail,
        "eta_seconds": eta,
        "need_bytes": need,
        "free_bytes": memory.free_for_jobs,
        "promised_bytes": memory.promised,
        "outside_bytes": memory.outside,
        "total_bytes": memory.total,
        "reserve_bytes": reserve_bytes(memory.total or 0),
    }


def judged(slots: Slots, need: int | None, job_class: str, board: Board) -> tuple[str, str, float | None]:
    """`now`, `later` or `never`, why, and how long at least."""
    memory = slots.memory
    if need is not None and memory.capacity is not None and memory.capacity < need:
        return "never", f"needs {gib(need)}, this card can give {gib(memory.capacity)}", None
    if closed := board.closed.get(slots.resource):
        return "later" if closed.passing else "never", closed.detail, None
    if not memory.would_hold(need):
        return "never", f"needs {gib(need)}; {outside_of(slots)}", None
    if slots.free_slot(job_class) is None:
        wait = behind(slots, job_class)
        return "later", wait.detail, wait.eta_seconds
    if not slots.fits_now(need):
        return "later", too_full(slots, need), None
    return "now", "now", None


def of_auto(cards: list[Card]) -> Card:
    """Where `auto` would go now, or the shortest wait."""
    now = [card for card in cards if card["verdict"] == "now"]
    later = sorted(
        (card for card in cards if card["verdict"] == "later"), key=lambda c: c["eta_seconds"] or 1e12
    )
    if now:
        best = max(now, key=lambda card: (card["free_bytes"] or 0, -card["gpu_id"]))
        return {"verdict": "now", "detail": f"card {best['gpu_id']} now", "uuid": best["uuid"]}
    if later:
        return {"verdict": "later", "detail": later[0]["detail"], "uuid": None}
    return {"verdict": "never", "detail": _nowhere(cards), "uuid": None}


def _nowhere(cards: list[Card]) -> str:
    return "no card can hold this job" if cards else "no card is known"


def chosen(request: str, cards: list[Card], auto: Card) -> Card:
    """The answer for a stored request: that of its cards together, the worst one speaking."""
    wanted = choice.wanted(request)
    if isinstance(wanted, int):
        return auto
    worst = max(
        (card for card in cards if card["uuid"] in wanted),
        key=lambda card: ("now", "later", "never").index(card["verdict"]),
    )
    return {key: worst[key] for key in ("verdict", "detail", "uuid")}

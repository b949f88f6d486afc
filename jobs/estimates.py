"""Bytes and seconds of a job before it runs, and which cards would hold it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpus import choice
from gpus.readings import is_split
from gpus.rest import ApiError
from jobs import experience
from jobs.artifacts import Resolved, as_input
from jobs.board import Board, Slots
from jobs.kind import Estimate, Input, JobKind
from jobs.memory import gib

#: Private memory of a work process with torch and transformers imported and nothing loaded: measured with
#: `bench/work_base_cost.py` (simulated cards and CPU only; a CUDA context is the kind's own line).
WORK_BASE_BYTES = 160 * 2**20


def estimate(
    kind: JobKind, params: Mapping[str, Any], inputs: Mapping[str, Input], stage: str = ""
) -> Estimate:
    """The kind's formula of a stage with the base cost of its process, corrected by what earlier jobs took."""
    found = formula(kind, params, inputs, stage)
    return found if stage else experience.corrected(found, kind, kind.needs_card(params))


def formula(
    kind: JobKind, params: Mapping[str, Any], inputs: Mapping[str, Input], stage: str = ""
) -> Estimate:
    """The kind's estimate of a stage with the base cost of its process."""
    own = kind.estimate_stage(stage, params, inputs) if stage else kind.estimate(params, inputs)
    if own.memory_bytes is None:
        return own
    parts = dict(own.breakdown) | {"process": WORK_BASE_BYTES}
    return replace(own, memory_bytes=own.memory_bytes + WORK_BASE_BYTES, breakdown=parts)


def estimate_resolved(
    kind: JobKind, params: Mapping[str, Any], resolved: list[Resolved], stage: str = ""
) -> Estimate | None:
    """None while an input is still to be made: nobody can know yet."""
    if any(item.artifact is None for item in resolved):
        return None
    inputs = {item.parameter: as_input(item.artifact) for item in resolved if item.artifact is not None}
    return estimate(kind, params, inputs, stage)


def refuse_too_large(need: int | None, request: str, board: Board | None = None) -> None:
    """400 when the estimate exceeds what the named card, or for `auto` every card, can ever hold."""
    cards = [s for s in (board or Board()).cards() if s.gpu is not None and not is_split(s.gpu.info)]
    wanted = choice.wanted(request)
    if isinstance(wanted, list):
        cards = [s for s in cards if s.gpu is not None and s.gpu.uuid in wanted]
    if need is None or not cards or any(could_hold(slots, need) for slots in cards):
        return
    largest = max((s.memory.capacity or 0 for s in cards), default=0)
    raise ApiError(
        400,
        "model_too_large",
        f"The job needs about {gib(need)}; {'the card' if isinstance(wanted, list) else 'the largest card'} "
        f"can give {gib(largest)}.",
        need_bytes=need,
        largest_bytes=largest,
        hint="Choose a larger card, a smaller batch, or a narrower model.",
    )


def could_hold(slots: Slots, need: int) -> bool:
    capacity = slots.memory.capacity
    return capacity is None or capacity >= need

"""Bytes and seconds of a job before it runs, and which cards would hold it. No torch here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from gpus import choice
from gpus.models import Gpu
from gpus.readings import is_split
from gpus.rest import ApiError
from jobs import experience
from jobs.artifacts import Resolved, as_input
from jobs.exceptions import JobRejected
from jobs.kind import Estimate, Input, JobKind
from jobs.memory import CardMemory, disk_reserve_bytes, gib

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


def refuse_too_large(need: int | None, request: str) -> None:
    """400 when the estimate exceeds what the named card, or for `auto` every card, can ever hold."""
    if need is None:
        return
    wanted = choice.wanted(request)
    capacities = [capacity(gpu) for gpu in cards(wanted)]
    if not capacities or any(most is None or most >= need for most in capacities):
        return
    largest = max(most for most in capacities if most is not None)
    raise ApiError(
        400,
        "model_too_large",
        f"The job needs about {gib(need)}; {'the card' if isinstance(wanted, list) else 'the largest card'} "
        f"can give {gib(largest)}.",
        need_bytes=need,
        largest_bytes=largest,
        hint="Choose a larger card, a smaller batch, or a narrower model.",
    )


def runs_on_cpu() -> bool:
    """Whether the mathematics runs on the CPU whatever the card, so that its memory is the host's."""
    return settings.MISTUDIO_GPU_BACKEND == "simulated" or settings.MISTUDIO_TORCH_DEVICE == "cpu"


def refuse_short_disk(folder: Path, need: int, what: str) -> None:
    """Raises `JobRejected` when `need` bytes would not fit beside the reserve of the disk that holds `folder`."""
    disk = shutil.disk_usage(folder)
    kept = disk_reserve_bytes(disk.total)
    if need > disk.free - kept:
        raise JobRejected(
            f"{what} {gib(need)}; {gib(disk.free)} of the disk are free, {gib(kept)} stay so.",
            reason="disk_full",
            hint="Delete artifacts or free the disk, then retry.",
        )


def nearest(folder: Path) -> Path:
    """The folder, or the part of its path that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def cards(wanted: list[str] | int) -> list[Gpu]:
    """Those that a request may mean, whatever they do now; one query, for a sweep asks for each of its jobs."""
    known = Gpu.objects.filter(pk__in=wanted) if isinstance(wanted, list) else Gpu.objects.all()
    found = known.only("memory_total_bytes", "reading", "info")
    return [gpu for gpu in found if not is_split(gpu.info)]


def capacity(gpu: Gpu) -> int | None:
    """What a job could ever have of this card, in bytes; None where the driver does not say."""
    driver = gpu.reading.get("memory_reserved_bytes") or 0
    return CardMemory(gpu.memory_total_bytes, None, driver=driver).capacity

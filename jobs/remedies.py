"""What broke a work, in words for a person: the reason, the numbers, and parameters that may do better."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from django.conf import settings

from jobs import endings, registry
from jobs.memory import gib
from jobs.models import Job

#: By name: torch and the mathematics are not loaded for this.
REASONS = {
    "CardMismatch": "card_mismatch",
    "NonFinite": "non_finite",
    "OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
}


class CardMismatch(Exception):
    """The card that the process sees is not the card of its lease."""


def of(job: Job, error: BaseException) -> tuple[str, str, str]:
    """Failure reason, sentence and hint."""
    reason = reason_of(error)
    if reason == "out_of_memory":
        return (
            reason,
            f"{sentence(error)} {memory_now(job)}",
            tried_next(job, reason, "a card with more memory"),
        )
    if reason == "disk_full":
        return reason, f"{sentence(error)}. {disk_now()}", endings.DISK_HINT
    if reason == "non_finite":
        return reason, sentence(error), tried_next(job, reason, "float32")
    if reason == "card_mismatch":
        return reason, sentence(error), "Retry; if it happens again, run manage.py doctor on the host."
    hint = "A retry goes the same way unless something changes; the traceback says where it ended."
    return reason, sentence(error), hint


def reason_of(error: BaseException) -> str:
    for cls in type(error).__mro__:
        if cls.__name__ in REASONS:
            return REASONS[cls.__name__]
    if isinstance(error, OSError) and error.errno in endings.DISK_FULL:
        return "disk_full"
    return "error"


def sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:  # where a file lies is nobody else's business
        name = Path(str(error.filename)).name
        return f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}: {name}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def tried_next(job: Job, reason: str, otherwise: str) -> str:
    """The parameters that the kind suggests, as a retry takes them."""
    suggested = registry.get(job.kind).suggest(reason, job.params)
    if not suggested:
        return f"Try {otherwise}."
    return f"Retry from the start with params {json.dumps(suggested)}, or try {otherwise}."


def memory_now(job: Job) -> str:
    """`It was estimated at 3.1 GiB; 0.4 GiB are free now, and it held 22.9 GiB at its peak.`"""
    estimate = (job.estimate or {}).get("memory_bytes")
    free, peak = on_card() or on_host()
    told = f"It was estimated at {gib(estimate)}" if estimate is not None else "Nobody could estimate it"
    return f"{told}; {gib(free)} are free now, and it held {gib(peak)} at its peak."


def on_card() -> tuple[int, int] | None:
    """Free bytes and our peak on `cuda:0`; None where the work has not touched CUDA, or CUDA no longer answers."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    with suppress(RuntimeError):
        return torch.cuda.mem_get_info()[0], torch.cuda.max_memory_reserved()
    return None


def on_host() -> tuple[int, int]:
    return psutil.virtual_memory().available, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def disk_now() -> str:
    disk = shutil.disk_usage(settings.MISTUDIO_HOME)
    return f"Of the data disk's {gib(disk.total)}, {gib(disk.free)} are free now."

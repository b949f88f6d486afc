"""The most that a work had of its card, as the work itself can tell: what torch's allocator reserved at its widest,
and beside it what the driver lists for the process: the CUDA context, libraries and their workspaces."""

from __future__ import annotations

import os
import sys

from gpus import agent_client
from jobs.interp.sizes import CUDA_BYTES
from jobs.models import Attempt


def note(attempt: Attempt) -> None:
    """Keep the peak of this process with its attempt, where it has touched CUDA."""
    if (peak := on_cards(attempt.gpu_uuids)) is not None:
        Attempt.objects.filter(pk=attempt.pk).update(peak_memory_bytes=peak)


def on_cards(uuids: list[str]) -> int | None:
    """Bytes of the card that was used most; None without CUDA. `cuda:N` is the Nth card of the lease."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    reserved = [(torch.cuda.memory_reserved(n), torch.cuda.max_memory_reserved(n)) for n in range(len(uuids))]
    return max(most + beside(uuid, now) for uuid, (now, most) in zip(uuids, reserved, strict=True))


def beside(uuid: str, reserved: int) -> int:
    """What the driver lists for this process beyond its allocator; the usual context where it lists nothing."""
    answer = agent_client.fresh(uuid) or {"processes": []}
    listed = [p["memory_used_bytes"] for p in answer["processes"] if p["pid"] == os.getpid()]
    known = [size for size in listed if size is not None]
    return max(0, max(known) - reserved) if known else CUDA_BYTES

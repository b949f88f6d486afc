"""The last look before a work loads anything: since the grant, somebody else may have filled its card."""

from __future__ import annotations

import time
from typing import Any

from django.utils import timezone

from gpus import agent_client, choice
from gpus.models import Gpu
from gpus.owners import owner_of
from gpus.timing import scaled
from jobs.board import Board
from jobs.memory import CardMemory, card_memory, gib, observed
from jobs.models import Attempt, Job, Lease
from jobs.placement import SHORT_SECONDS, insufficient, need_bytes


class HandedBack(Exception):
    """The card has no room for the job after all; it waits in the queue again, past this reading of this card."""

    def __init__(self, gpu: Gpu, memory: CardMemory, need: int | None) -> None:
        super().__init__(
            f"On arrival, card {gpu.index} had {gib(memory.free_for_jobs)} free; the job needs {gib(need)}."
        )
        self.skip = {"gpu_uuid": gpu.uuid, "at": timezone.now().isoformat()}


def check_room(job: Job, attempt: Attempt) -> None:
    """Read each card of the attempt once more; without an answer, the reading of the grant stands.

    Raises `JobRejected` for a named card that strangers hold, in two readings; `HandedBack` for all else.
    """
    need = need_bytes(job)
    for gpu in Gpu.objects.select_related("host").filter(pk__in=attempt.gpu_uuids):
        memory = memory_now(gpu, attempt)
        if memory is None or memory.holds(need):
            continue
        if choice.auto_count(job.gpu_wanted) is None and not memory.would_hold(need):
            refuse_if_still_short(job, gpu, attempt)
        raise HandedBack(gpu, memory, need)


def refuse_if_still_short(job: Job, gpu: Gpu, attempt: Attempt) -> None:
    time.sleep(scaled(SHORT_SECONDS))
    again = memory_now(gpu, attempt)
    if again is not None and not again.would_hold(need_bytes(job)):
        board = Board()
        slots = board.slots[gpu.resource]
        slots.memory = again
        raise insufficient(job, [slots], board)


def memory_now(gpu: Gpu, attempt: Attempt) -> CardMemory | None:
    """The card as this attempt finds it: what its own process has already counts as free for it."""
    fresh = agent_client.fresh(gpu.uuid)
    if fresh is None:
        return None
    listed: list[dict[str, Any]] = fresh["processes"]
    owners = owner_of(gpu.host.name, gpu.uuid, listed)
    leases = list(Lease.objects.filter(resource=gpu.resource, ended_at=None).select_related("attempt__job"))
    mine = [lease for lease in leases if lease.attempt_id == attempt.pk]
    others = [lease for lease in leases if lease.attempt_id != attempt.pk]
    reading = dict(fresh["reading"])
    if reading.get("memory_free_bytes") is not None:
        reading["memory_free_bytes"] += sum(observed(lease, listed, owners) for lease in mine)
    return card_memory(gpu.memory_total_bytes, reading, listed, owners, others, lately_ours=True)

"""A card's memory as admission sees it: free now, promised to our jobs, and in the hands of others.

What counts as outside (contract, section 2): processes that the card lists and that are provably not ours, or of
whom nothing is proven; and memory that nobody is listed for, unless a lease of ours is open or has just ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpus.owners import Owner
from jobs.models import Lease

MIB, GIB = 2**20, 2**30


def reserve_bytes(total: int) -> int:
    """What stays free on a card whatever is asked: max(256 MiB, 2 %)."""
    return max(256 * MIB, total // 50)


def disk_reserve_bytes(total: int) -> int:
    """What stays free on the data disk whatever is written: max(2 GiB, 5 %)."""
    return max(2 * GIB, total // 20)


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


@dataclass(frozen=True)
class CardMemory:
    """Bytes of one card; `None` where the driver does not say. `strangers` are listed processes not ours."""

    total: int | None
    free: int | None
    promised: int = 0
    outside: int = 0
    driver: int = 0
    strangers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def free_for_jobs(self) -> int | None:
        """Sampled free memory less what running jobs have still to take."""
        return None if self.free is None else self.free - self.promised

    @property
    def without_ours(self) -> int | None:
        """What would be free if every lease of ours ended now."""
        return None if self.total is None else self.total - self.driver - self.outside

    @property
    def capacity(self) -> int | None:
        """What a job could ever have of this card."""
        return None if self.total is None else self.total - self.driver - reserve_bytes(self.total)

    @property
    def room_now(self) -> float:
        """The largest job that fits beside what is there now; infinite where the card does not say."""
        return self._room(self.free_for_jobs)

    @property
    def room_without_ours(self) -> float:
        """The largest that would fit once all leases of ours have ended."""
        return self._room(self.without_ours)

    def holds(self, need: int | None) -> bool:
        return need is None or need <= self.room_now

    def would_hold(self, need: int | None) -> bool:
        return need is None or need <= self.room_without_ours

    def _room(self, free: int | None) -> float:
        return math.inf if free is None else free - reserve_bytes(self.total or 0)


def card_memory(
    total: int | None,
    reading: dict[str, Any],
    listed: Sequence[dict[str, Any]],
    owners: Sequence[Owner],
    leases: Sequence[Lease],
    lately_ours: bool,
) -> CardMemory:
    """`listed` and `owners` go together, process by process; `lately_ours`: a lease is open or ended just now.
    The agent itself, which some drivers list on every card, is no use of it."""
    uses = [(p, owner) for p, owner in zip(listed, owners, strict=True) if owner["owner"] != "self"]
    listed, owners = [p for p, _ in uses], [owner for _, owner in uses]
    strangers = [p for p, owner in uses if owner["owner"] in ("foreign", "unknown")]
    seen = [observed(lease, listed, owners) for lease in leases]
    return CardMemory(
        total=total,
        free=reading.get("memory_free_bytes"),
        promised=sum(still_to_take(lease, seen) for lease, seen in zip(leases, seen, strict=True)),
        outside=outside(reading.get("memory_used_bytes"), listed, strangers, leases, seen, lately_ours),
        driver=reading.get("memory_reserved_bytes") or 0,
        strangers=strangers,
    )


def observed(lease: Lease, listed: Sequence[dict[str, Any]], owners: Sequence[Owner]) -> int:
    """What the job of this lease has on the card, as the card lists it; else as its keeper last measured."""
    job = str(lease.attempt.job_id)
    held = [p["memory_used_bytes"] for p, owner in zip(listed, owners, strict=True) if owner["job_id"] == job]
    known = [bytes_ for bytes_ in held if bytes_ is not None]
    return sum(known) if known else lease.observed_bytes or 0


def still_to_take(lease: Lease, seen: int) -> int:
    """Estimate less what was seen, while the job runs; one that ends takes nothing more."""
    return max(0, (lease.estimate_bytes or 0) - seen) if lease.state == Lease.State.ACTIVE else 0


def outside(
    used: int | None,
    listed: Sequence[dict[str, Any]],
    strangers: Sequence[dict[str, Any]],
    leases: Sequence[Lease],
    seen: Sequence[int],
    lately_ours: bool,
) -> int:
    """Bytes that are not ours. Where a process' memory is not told, all that our leases cannot account for."""
    told = [p["memory_used_bytes"] for p in listed]
    if None in told:
        ours = sum(max(lease.estimate_bytes or 0, bytes_) for lease, bytes_ in zip(leases, seen, strict=True))
        return max(0, (used or 0) - ours)
    unlisted = 0 if lately_ours else max(0, (used or 0) - sum(told))
    return sum(p["memory_used_bytes"] for p in strangers) + unlisted


def holders(memory: CardMemory) -> str:
    """Who has the memory that is not ours, largest first, for a sentence."""
    largest = sorted(memory.strangers, key=lambda p: -(p["memory_used_bytes"] or 0))[:3]
    named = [
        f"{p.get('name') or 'a process'} (pid {p['pid']}, {gib(p['memory_used_bytes'])})" for p in largest
    ]
    return ", ".join(named) or "memory that the driver lists nobody for"

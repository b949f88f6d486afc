"""What a round of the watchdog sees: one `Sight` per finding. It reads cards, processes and rows, and changes nothing.

A sight of a process says whose it is and why (`jobs.processes`). Nothing here goes by age, load, name or memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.db.models import Q
from django.utils import timezone

from gpus import agent_client
from gpus.models import Host
from gpus.timing import scaled
from jobs import lease, ownership, processes
from jobs.models import Attempt, Lease, WatchdogEvent
from jobs.processes import Census, Process

Finding = WatchdogEvent.Finding
#: A card that computes so much and lists nobody does it for somebody.
BUSY_PERCENT = 50.0
PROOFS = {
    "recorded": "its keeper recorded it",
    "descendant": "it descends from a process that was recorded",
    "session": "it is in the session of the job",
    "token": "it was started with the token of the attempt",
}
UNSEEN = "No process with this number can be seen from here, so nothing can be proven."
UNREADABLE = "Its environment cannot be read, so nothing can be proven."
COPIED = "It carries the token of a job, which does not prove that it is one of its processes."
FOREIGN = "It belongs to no job of ours."
LEASE = "The job has ended, its processes or its memory are still there: the card takes no job until they have gone."
GHOST = (
    "The card holds memory or computes, and lists no process for it. There is nobody to signal: unless a container or "
    "a desktop uses it, reset the card (nvidia-smi --gpu-reset) or reboot."
)
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Sight:
    """What no open attempt accounts for. `process` is None for cards, leases, and pids that cannot be seen."""

    finding: Finding
    gpu_uuid: str
    reason: str
    process: Process | None = None
    attempt: Attempt | None = None
    proof: str = ""
    memory_bytes: int | None = None
    listed: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else self.listed.get("pid")

    @property
    def start_ticks(self) -> int | None:
        return self.process.start if self.process else None

    @property
    def key(self) -> Key:
        """Seen again, it has the same."""
        lease_of = self.attempt.pk if self.attempt and self.finding == Finding.LEASE else None
        return str(self.finding), self.gpu_uuid, self.pid, self.start_ticks, lease_of


def quarantined(host: Host) -> list[Lease]:
    held = Lease.objects.filter(ended_at=None, state=Lease.State.QUARANTINED, attempt__host=host)
    return list(held.select_related("attempt__job"))


def card_of(held: Lease) -> str:
    """UUID of the card; empty for a job without one."""
    kind, _, name = held.resource.partition(":")
    return name if kind == "gpu" else ""


class Look:
    """One look at a host. First the cards are read, then the processes: one that is listed and has died since is not
    found, and whoever has its number by then is asked for proofs of its own."""

    def __init__(self, host: Host, only: set[str] | None = None, suspects: Iterable[int] = ()) -> None:
        """`only`: cards to look at, the empty name standing for jobs without one. `suspects`: attempts of whom
        somebody was found before."""
        cards = host.gpus.filter(removed_at=None, lost_at=None).values_list("uuid", flat=True)
        answers = ((uuid, agent_client.fresh(uuid)) for uuid in cards if only is None or uuid in only)
        self.host, self.suspects = host, list(suspects)
        self.cards = {uuid: answer for uuid, answer in answers if answer}
        self.leases = [held for held in quarantined(host) if self.reaches(card_of(held))]
        self.census = Census()
        self.ours = set(self.census.lineage(ownership.ourselves()))

    def reaches(self, uuid: str) -> bool:
        """A card that does not answer is left as it is until it does; jobs without a card need no reading."""
        return uuid in self.cards or not uuid

    def sights(self) -> Iterator[Sight]:
        for uuid, card in self.cards.items():
            for entry in lease.others(card["processes"]):
                if found := self.of_process(uuid, entry):
                    yield found
            if found := self.of_card(uuid):
                yield found
        for held in self.leases:
            yield Sight(
                Finding.LEASE, card_of(held), LEASE, None, held.attempt, "", self.alone(card_of(held))
            )
            yield from self.of_members(held)

    # Processes that a card lists -----------------------------------------------------------------------

    def of_process(self, uuid: str, entry: dict[str, Any]) -> Sight | None:
        """None for those of open attempts, for ourselves, and while a keeper still sees to the end of the lease."""
        memory, process = entry.get("memory_used_bytes"), self.census.find(entry["pid"])
        if process is None:
            return self.unseen(uuid, entry)
        attempt, proof = self.attempt_of(process)
        if attempt is None:
            return self.stranger(uuid, entry, process)
        spared = self.ours | {ownership.keeper_of(attempt)}
        if attempt.ended_at is None or process in spared or being_released(attempt):
            return None
        return Sight(Finding.LEFTOVER, uuid, left_by(attempt, proof), process, attempt, proof, memory, entry)

    @cached_property
    def known(self) -> ownership.Known:
        """Read once: a card of another PID namespace lists many that cannot be seen."""
        return ownership.known_members(self.host.name)

    def unseen(self, uuid: str, entry: dict[str, Any]) -> Sight | None:
        """A pid of another namespace, hidden from us, or dead; a card may be slow to forget those of our own jobs."""
        if self.known.job_recorded(entry["pid"]):
            return None
        memory = entry.get("memory_used_bytes")
        return Sight(Finding.UNKNOWN, uuid, UNSEEN, memory_bytes=memory, listed=entry)

    def stranger(self, uuid: str, entry: dict[str, Any], process: Process) -> Sight:
        """Foreign where we looked and found nothing of ours; unknown where we cannot, or what we find is no proof."""
        finding, reason, carried = Finding.FOREIGN, FOREIGN, self.census.tokens(process)
        if carried:
            finding, reason = Finding.UNKNOWN, COPIED
        elif carried is None and processes.user_id(process) == os.geteuid():
            finding, reason = Finding.UNKNOWN, UNREADABLE
        return Sight(
            finding, uuid, reason, process, memory_bytes=entry.get("memory_used_bytes"), listed=entry
        )

    def attempt_of(self, process: Process) -> tuple[Attempt | None, str]:
        """The attempt that the process belongs to, and the proof; an open one before any that has ended."""
        proven = [(a, proof) for a in self.candidates(process) if (proof := self.census.proof(process, a))]
        open_last = sorted(proven, key=lambda pair: (pair[0].ended_at is None, pair[0].granted_at))
        return open_last[-1] if open_last else (None, "")

    def candidates(self, process: Process) -> Iterable[Attempt]:
        """Attempts that could own it. The recorded members of one whose leases have ended are gone, or they would not
        have; of such an attempt only token and session can still speak, and these can be looked up."""
        family = [ancestor.pid for ancestor in self.census.lineage(process)]
        open_leases = [state for state in Lease.State if state != Lease.State.ENDED]
        may_own = Q(ended_at=None) | Q(leases__state__in=open_leases) | Q(pk__in=self.suspects)
        may_own |= Q(keeper_pid__in=family) | Q(work_pid__in=family)
        may_own |= Q(session_id=self.census.session(process))
        may_own |= Q(token_hash__in=self.census.tokens(process) or [])
        here = Attempt.objects.filter(may_own, host=self.host, boot_id=processes.boot_id())
        return here.select_related("job").distinct()

    # Cards and leases ----------------------------------------------------------------------------------

    def of_card(self, uuid: str) -> Sight | None:
        """Memory, or load, that nobody is listed for and no lease of ours explains."""
        card, alone = self.cards[uuid], self.alone(uuid) or 0
        load = card["reading"].get("utilization_gpu_percent") or 0
        busy = load >= BUSY_PERCENT and not lease.others(card["processes"])
        if not card["lists"] or held_lately(uuid) or not (alone > lease.TOLERANCE_BYTES or busy):
            return None
        return Sight(Finding.GHOST, uuid, GHOST, memory_bytes=alone)

    def alone(self, uuid: str) -> int | None:
        """Memory of the card that nobody is listed for."""
        card = self.cards.get(uuid)
        return lease.unaccounted_bytes(card["reading"], lease.others(card["processes"])) if card else None

    def of_members(self, held: Lease) -> Iterator[Sight]:
        """Members hold the card through their lease, whether it lists them or not."""
        uuid, attempt = card_of(held), held.attempt
        listed = {entry["pid"]: entry for entry in self.cards[uuid]["processes"]} if uuid else {}
        for member in ownership.members(attempt, self.census):
            entry, proof = listed.get(member.pid, {}), self.census.proof(member, attempt)
            memory = entry.get("memory_used_bytes", 0)
            yield Sight(
                Finding.LEFTOVER, uuid, left_by(attempt, proof), member, attempt, proof, memory, entry
            )


def left_by(attempt: Attempt, proof: str) -> str:
    return f"It belongs to attempt {attempt.number} of {attempt.job}, which has ended: {PROOFS[proof]}."


def being_released(attempt: Attempt) -> bool:
    return attempt.leases.filter(state__in=[Lease.State.ACTIVE, Lease.State.RELEASING]).exists()


def held_lately(uuid: str) -> bool:
    since = timezone.now() - timedelta(seconds=scaled(ownership.LATELY_SECONDS))
    held = Q(ended_at=None) | Q(ended_at__gt=since)
    return Lease.objects.filter(held, resource=f"gpu:{uuid}").exists()

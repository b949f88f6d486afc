"""The cards of this host as the agent knows them, and the sweep that reads them."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gpus import backends
from gpus.backends.base import BackendUnavailable, CardLost
from gpus.readers import START_SECONDS, CardHung, Readers, ReadFailed
from gpus.shapes import finite

logger = logging.getLogger(__name__)
#: A card that hangs or fails this often in a row counts as lost; one slow answer does not.
FAILURES_TO_LOSE = 3
#: How long a tick waits for cards with readers of their own: frames keep their beat, late answers make the next.
PATIENCE_SECONDS = 0.15


@dataclass
class Card:
    """A card's last known state: `info`, `reading` and `processes` as plain data."""

    info: dict[str, Any]
    reading: dict[str, Any] = field(default_factory=dict)
    sampled_at: datetime | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)
    processes_at: datetime | None = None
    lists: bool = True  # whether it says who uses it
    error: str = ""
    failures: int = 0
    lost: bool = False

    @property
    def uuid(self) -> str:
        return self.info["uuid"]

    @property
    def index(self) -> int:
        return self.info["index"]

    def answered(self, reading: dict[str, Any]) -> None:
        self._tell_silence(reading["missing"])
        self.reading, self.sampled_at = finite(reading), datetime.now(UTC)
        self.error, self.failures, self.lost = "", 0, False

    def answered_since(self, moment: datetime) -> bool:
        """Whether it was read since then and, where it lists its processes at all, listed them."""
        at = self.processes_at if self.lists else self.sampled_at
        return at is not None and at >= moment and not (self.error and self.lists)

    def _tell_silence(self, missing: dict[str, str]) -> None:
        """A line for the values that a card stops giving, or never gave; not one at every sample."""
        news = [name for name in missing if name not in self.reading.get("missing", {})]
        if news and not self.info["simulated"]:
            said = ", ".join(f"{name} ({missing[name]})" for name in news)
            logger.info("Card %s does not say its %s", self.index, said)

    def failed(self, error: Exception) -> None:
        self.error = str(error)
        self.failures += 1
        self.lost = self.lost or isinstance(error, CardLost) or self.failures >= FAILURES_TO_LOSE


class Sampler:
    """Asks the readers; never blocks longer than a call may last, and never raises for what a driver does."""

    def __init__(self, spec: backends.Spec) -> None:
        self.readers = Readers(spec)
        self.cards: dict[str, Card] = {}
        self.backend_error = ""
        self.complete = False  # whether the last list was answered and had every card
        self.late: dict[str, asyncio.Task[None]] = {}

    async def discover(self) -> None:
        """Which cards there are now. When the driver does not say, the known ones stay, unread."""
        try:
            # Nothing is read before the first list, so that one may take its time.
            found = await self.readers.call("list", seconds=None if self.cards else START_SECONDS)
        except (BackendUnavailable, CardHung, ReadFailed) as error:
            self._unlisted(error)
            return
        if self.backend_error:
            logger.info("The cards can be read again")
        self.backend_error, self.complete = "", not found["unreadable"]
        # With a card missing from the list, the known ones stay, that one among them, and nobody is renumbered.
        unseen = {} if self.complete else self.cards
        infos = in_pci_order(found["cards"]) if self.complete else found["cards"]
        self.cards = unseen | {info["uuid"]: self._known(info) for info in infos}

    def _known(self, info: dict[str, Any]) -> Card:
        card = self.cards.get(info["uuid"])
        return replace(card, info=info) if card else Card(info)

    def _unlisted(self, error: Exception) -> None:
        """Of known cards, the one that hangs is found by reading them; the others must not suffer for it."""
        if isinstance(error, CardHung) and self.cards:
            self.complete = False
        else:
            self._unavailable(error)

    def _unavailable(self, error: Exception) -> None:
        if str(error) != self.backend_error:  # a line per change, not one per question
            logger.warning("No cards can be read: %s", error)
        self.backend_error, self.complete = str(error), False

    async def sweep(self, with_processes: bool) -> None:
        """Read every card: the shared reader's one after the other, the others beside them."""
        if self.backend_error:
            return
        alone = [card for card in self.cards.values() if self.readers.alone(card.uuid)]
        tasks = [self._start_late(card, with_processes) for card in alone]
        for card in list(self.cards.values()):
            if not self.readers.alone(card.uuid) and not self.backend_error:
                await self.read(card.uuid, with_processes)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)

    def _start_late(self, card: Card, with_processes: bool) -> asyncio.Task[None]:
        """One question at a time to a card that may hang."""
        task = self.late.get(card.uuid)
        if task is None or task.done():
            task = asyncio.create_task(self.read(card.uuid, with_processes))
            self.late[card.uuid] = task
        return task

    async def read(self, uuid: str, with_processes: bool) -> None:
        """One card now. What goes wrong is written on the card."""
        card = self.cards[uuid]
        try:
            card.answered(await self.readers.call("read", uuid))
            if with_processes:
                await self._list_processes(card)
        except BackendUnavailable as error:
            self._unavailable(error)
        except (CardHung, CardLost, ReadFailed) as error:
            card.failed(error)

    async def _list_processes(self, card: Card) -> None:
        """A card that does not list its processes is still a card that can be read."""
        try:
            listed = finite(await self.readers.call("processes", card.uuid))
            card.processes = [
                entry | {"own": True} if self.is_own(entry["pid"]) else entry for entry in listed
            ]
            card.processes_at, card.lists = datetime.now(UTC), True
        except ReadFailed as error:
            card.processes, card.processes_at, card.lists = [], None, False
            card.error = f"The processes of this card cannot be listed: {error}"

    def is_own(self, pid: int) -> bool:
        """Whoever reads a card may be listed on it; that is no use of it."""
        return pid == os.getpid() or pid in self.readers.pids()

    async def fresh(self, uuid: str, seconds: float) -> Card | None:
        """Read and list one card now; `None` when it did not answer in time or in order."""
        alone = self.readers.alone(uuid)
        task = (
            self._start_late(self.cards[uuid], True) if alone else asyncio.create_task(self.read(uuid, True))
        )
        began = datetime.now(UTC)
        done, _ = await asyncio.wait([task], timeout=seconds)  # a call under way is not cut off
        card = self.cards.get(uuid)
        return card if done and card and card.answered_since(began) else None

    def state(self) -> list[Card]:
        """Copies that another thread may keep."""
        return [replace(card) for card in self.cards.values()]

    async def close(self) -> None:
        for task in self.late.values():
            task.cancel()
        await self.readers.close()


def in_pci_order(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbered by PCI address, as `nvidia-smi` and `CUDA_DEVICE_ORDER=PCI_BUS_ID` number them."""
    ordered = sorted(infos, key=lambda info: (info["pci_bus_id"].upper(), info["index"]))
    return [info | {"index": index} for index, info in enumerate(ordered)]

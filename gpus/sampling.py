"""The cards of this host as the agent knows them, and the sweep that reads them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gpus import backends
from gpus.backends.base import BackendUnavailable, CardLost
from gpus.readers import START_SECONDS, CardHung, Readers, ReadFailed
from gpus.shapes import finite
from gpus.timing import scaled

logger = logging.getLogger(__name__)
#: A card that hangs or fails so long counts as lost, though the driver does not say so; a driver under load may
#: keep one waiting for half a minute.
SILENT_SECONDS = 60.0
#: A driver that is away is asked again after this, doubled from time to time up to the longest.
AGAIN_SECONDS, LONGEST_SECONDS = 5.0, 60.0
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
    failing_since: float | None = None  # on the monotonic clock
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
        self.error, self.failing_since, self.lost = "", None, False

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
        now = time.monotonic()
        self.error, self.failing_since = str(error), self.failing_since or now
        silent = now - self.failing_since >= scaled(SILENT_SECONDS)
        self.lost = self.lost or isinstance(error, CardLost) or silent


class Sampler:
    """Asks the readers; never blocks longer than a call may last, and never raises for what a driver does."""

    def __init__(self, spec: backends.Spec) -> None:
        self.readers = Readers(spec)
        self.cards: dict[str, Card] = {}
        self.away: Exception | None = None  # why no cards can be read
        self.pause, self.ask_at = 0.0, 0.0  # of a driver that does not list its cards
        self.complete = False  # whether the last list was answered and had every card
        self.listed: set[str] = set()
        self.gaps = 0  # cards that the driver counts and does not open
        self.strangers = 0  # those of them that nobody ever knew
        self.lost: set[str] = set()  # as of the last round
        self.late: dict[str, asyncio.Task[None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # reads under way beside a sweep

    @property
    def backend_error(self) -> str:
        return str(self.away or "")

    async def discover(self) -> None:
        """Which cards there are now. When the driver does not say, the known ones stay."""
        if time.monotonic() < self.ask_at:
            return
        try:
            # Nothing is read before the first list, so that one may take its time.
            found = await self.readers.call("list", seconds=None if self.cards else START_SECONDS)
        except (BackendUnavailable, CardHung, ReadFailed) as error:
            self._unlisted(error)
            return
        if self.away:
            logger.info("The cards can be read again")
        self.away, self.pause = None, 0.0
        self._match(found["cards"], found["unreadable"])
        await self.readers.keep(self.cards)

    def _match(self, infos: list[dict[str, Any]], gaps: int) -> None:
        """With a card missing from the list, the known ones stay, that one among them, and nobody is renumbered."""
        self.listed = {info["uuid"] for info in infos}
        self.gaps, self.strangers = gaps, min(self.strangers, gaps)
        self.complete = gaps <= self.strangers
        unseen = {} if self.complete else self.cards
        infos = in_pci_order(infos) if self.complete else infos
        self.cards = unseen | {info["uuid"]: self._known(info) for info in infos}

    def _known(self, info: dict[str, Any]) -> Card:
        card = self.cards.get(info["uuid"]) or Card(info)
        card.info = info
        return card

    def recall(self, infos: list[dict[str, Any]]) -> None:
        """Cards of the database that the list lacks while the driver could not open all: they are asked by name.

        More gaps than such cards are strangers: cards that this user never could open. They hide nobody.
        """
        if self.complete or (self.away and not isinstance(self.away, CardHung)):
            return
        for info in infos:
            self.cards.setdefault(info["uuid"], Card(info))
        self.strangers = max(0, self.gaps - len(self.cards.keys() - self.listed))
        if self.cards:
            self.away = None

    def _unlisted(self, error: Exception) -> None:
        """Of known cards, the one that hangs is found by reading them; the others must not suffer for it."""
        self.complete = False
        self.pause = min(2 * self.pause or scaled(AGAIN_SECONDS), scaled(LONGEST_SECONDS))
        self.ask_at = time.monotonic() + self.pause
        if not (isinstance(error, CardHung) and self.cards):
            self._unavailable(error)

    def _unavailable(self, error: Exception) -> None:
        if str(error) != self.backend_error:  # a line per change, not one per question
            logger.warning("No cards can be read: %s", error)
        self.away, self.complete = error, False

    async def sample(self, lists: bool) -> None:
        """One round: every 6 s which cards there are and who is on them, and every value each time."""
        if lists:
            await self.discover()
        await self.sweep(with_processes=lists)
        if self.now_lost() - self.lost:  # in this sweep, or when somebody asked for a fresh reading
            await self.discover()  # or was it taken out, or an instance unmade?
        self.lost = self.now_lost()

    def now_lost(self) -> set[str]:
        return {card.uuid for card in self.cards.values() if card.lost}

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
            task = self.late[card.uuid] = self._beside(card.uuid, with_processes)
        return task

    def _beside(self, uuid: str, with_processes: bool) -> asyncio.Task[None]:
        task = asyncio.create_task(self.read(uuid, with_processes))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
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
        task = self._start_late(self.cards[uuid], True) if alone else self._beside(uuid, True)
        began = datetime.now(UTC)
        done, _ = await asyncio.wait([task], timeout=seconds)  # a call under way is not cut off
        card = self.cards.get(uuid)
        return card if done and card and card.answered_since(began) else None

    def state(self) -> list[Card]:
        """Copies that another thread may keep."""
        return [replace(card) for card in self.cards.values()]

    async def close(self) -> None:
        await ended(self.tasks)
        await self.readers.close()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cut off, and waited for: an event loop that ends while a process is being made may never end (Python 3.11)."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_pci_order(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbered by PCI address, as `nvidia-smi` and `CUDA_DEVICE_ORDER=PCI_BUS_ID` number them; MIG instances after
    all cards, so that none is renumbered when one is made."""
    ordered = sorted(infos, key=lambda i: (bool(i.get("mig_parent")), i["pci_bus_id"].upper(), i["index"]))
    return [info | {"index": index} for index, info in enumerate(ordered)]

"""Readers under supervision: a card that hangs or is lost costs itself, not the others.

    all cards ──▶ the shared reader ──a call hangs──▶ killed and replaced
                                    └─ that card, or one that is lost ──▶ a reader of its own

The card is asked again, less and less often, by a new process each time: a driver's library does not find a card
again that it lost. When it has answered for a while, its reader becomes the shared one. The agent never calls a
backend itself; it awaits these.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus import backends
from gpus.backends.base import BackendUnavailable, CardLost
from gpus.timing import scaled

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
MODULE = "gpus.reader"
#: Not scaled: how long a driver may take is its own affair.
CALL_SECONDS = 1.5
#: Starting Python on a machine that is busy with jobs; a driver is not touched yet.
START_SECONDS = 15.0
#: A killed process that is not gone by then hangs in the kernel.
DEATH_SECONDS = 0.5
#: So long a card must answer from its own reader before the others share it.
PROVEN_SECONDS = 60.0
#: A card that hung or was lost is asked again after this, doubled from time to time up to the longest.
AGAIN_SECONDS, LONGEST_SECONDS = 2.0, 30.0
#: So many killed processes may hang in the kernel before a reader starts no more of them.
MOST_UNDEAD = 2
MAX_LINE = 2**22


class CardHung(Exception):
    """The driver did not answer for this card in time; its reader was killed."""


class ReadFailed(Exception):
    """The backend failed for this call; the reader goes on."""


class Reader:
    """One reader process, started at its first call and after each end."""

    def __init__(self, spec: backends.Spec) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.undead: list[Process] = []
        self.turn = asyncio.Lock()

    async def call(self, call: str, uuid: str | None = None, seconds: float | None = None) -> Any:
        """The backend's answer. Raises `CardHung`, `CardLost`, `BackendUnavailable`, `ReadFailed`."""
        seconds = seconds or CALL_SECONDS
        async with self.turn:
            process = await self._running()
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._ask(process, {"call": call, "uuid": uuid})
            except TimeoutError:
                await self._end()
                raise CardHung(f"The driver did not answer within {seconds:g} s.") from None
            except asyncio.CancelledError:
                await self._end()  # an answer nobody read would be taken for the next one
                raise
            if answer.get("stale_library"):
                await self._end()  # the next call starts a process that loads the library anew
        return outcome(answer)

    async def _ask(self, process: Process, request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            await self._end()
            return {"error": "failed", "reason": f"The reader process ended ({process.returncode})."}
        return json.loads(line)

    async def _running(self) -> Process:
        if self.process is None or self.process.returncode is not None:
            self._count_undead()
            self.process = await self._start()
        return self.process

    def _count_undead(self) -> None:
        self.undead = [process for process in self.undead if process.returncode is None]
        if len(self.undead) >= MOST_UNDEAD:
            pids = ", ".join(str(process.pid) for process in self.undead)
            raise CardHung(f"Readers {pids} hang in the driver and cannot be killed: reboot.")

    async def _start(self) -> Process:
        command = [sys.executable, "-m", MODULE, json.dumps(self.spec)]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdin=PIPE, stdout=PIPE, limit=MAX_LINE
        )
        self.process = process
        assert process.stdout
        try:
            async with asyncio.timeout(START_SECONDS):
                hello = await process.stdout.readline()
        except TimeoutError:
            hello = b""
        except asyncio.CancelledError:
            await self._end()
            raise
        if not hello:
            await self._end()
            raise ReadFailed("The reader process did not start; its error is in the log.")
        return process

    async def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.kill()
            # A process inside a dead driver may not even die; it is left to the kernel.
            try:
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)
            except TimeoutError:
                self.undead.append(process)
                logger.error("Reader %s hangs in the kernel and cannot be killed", process.pid)

    async def close(self) -> None:
        async with self.turn:
            await self._end()


def outcome(answer: dict[str, Any]) -> Any:
    if "ok" in answer:
        return answer["ok"]
    if answer["error"] == "unavailable":
        raise BackendUnavailable(answer["reason"], answer["repair"])
    if answer["error"] == "lost":
        raise CardLost(answer["reason"])
    raise ReadFailed(answer["reason"])


@dataclass
class Own:
    """The reader of one card that hung or was lost, and when it is asked again."""

    reader: Reader
    said: Exception
    since: float = 0.0  # its last failure
    pause: float = 0.0

    def failed(self, error: Exception) -> None:
        self.said, self.since = error, time.monotonic()
        self.pause = min(2 * self.pause or scaled(AGAIN_SECONDS), scaled(LONGEST_SECONDS))

    def proven(self) -> bool:
        return time.monotonic() - self.since > PROVEN_SECONDS

    async def call(self, call: str, uuid: str, seconds: float | None) -> Any:
        """As `Reader.call`; while it is not asked, what it said last."""
        if self.pause and time.monotonic() < self.since + self.pause:
            raise type(self.said)(str(self.said))
        try:
            answer = await self.reader.call(call, uuid, seconds)
        except (CardHung, CardLost, ReadFailed, BackendUnavailable) as error:
            await self.reader.close()
            # Only the shared reader can say that the driver is away: a new process may be too new for it.
            mine = ReadFailed(str(error)) if isinstance(error, BackendUnavailable) else error
            self.failed(mine)
            raise mine from None
        self.pause = 0.0
        return answer


class Readers:
    """The shared reader, and those of cards that hung or were lost."""

    def __init__(self, spec: backends.Spec) -> None:
        self.spec = spec
        self.shared = Reader(spec)
        self.own: dict[str, Own] = {}
        self.over = False

    def alone(self, uuid: str) -> bool:
        return uuid in self.own

    async def keep(self, uuids: Iterable[str]) -> None:
        """The readers of all other cards end: those cards are gone."""
        for uuid in self.own.keys() - set(uuids):
            await self.own.pop(uuid).reader.close()

    async def call(self, call: str, uuid: str | None = None, seconds: float | None = None) -> Any:
        if self.over:
            raise ReadFailed("The agent ends.")
        if uuid in self.own:
            return await self._call_alone(self.own[uuid], call, uuid, seconds)
        try:
            return await self.shared.call(call, uuid, seconds)
        except (CardHung, CardLost) as error:
            if uuid:
                logger.warning("Card %s gets a reader of its own: %s", uuid, error)
                own = self.own.setdefault(uuid, Own(Reader(self.spec), error))
                own.failed(error)
            raise

    async def _call_alone(self, own: Own, call: str, uuid: str, seconds: float | None) -> Any:
        answer = await own.call(call, uuid, seconds)
        if own.proven() and self.own.get(uuid) is own:
            try:
                await self._share(uuid, own)
            except (CardHung, ReadFailed, BackendUnavailable) as error:
                own.failed(error)
        return answer

    async def _share(self, uuid: str, own: Own) -> None:
        """Its reader takes over: the library in the old one may still take the card for lost."""
        # A driver lets go of a card that nobody has open; so the others are opened before they are let go.
        await own.reader.call("list", seconds=START_SECONDS)
        logger.info("Card %s answers again; it shares a reader", uuid)
        self.own.pop(uuid, None)
        old, self.shared = self.shared, own.reader
        await old.close()

    def pids(self) -> set[int]:
        """The reader processes that run now."""
        readers = [self.shared, *(own.reader for own in self.own.values())]
        return {reader.process.pid for reader in readers if reader.process is not None}

    async def close(self) -> None:
        """For good."""
        self.over = True
        readers = [self.shared, *(own.reader for own in self.own.values())]
        await asyncio.gather(*(reader.close() for reader in readers))

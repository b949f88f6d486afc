"""Readers under supervision: a call that hangs costs one card, not the others.

    all cards ──▶ the shared reader ──a call hangs──▶ killed and replaced
                                    └─ that card ──▶ a reader of its own, until it has answered for a while

The agent never calls a backend itself; it awaits these.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpus import backends
from gpus.backends.base import BackendUnavailable, CardLost

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
MODULE = "gpus.reader"
#: Not scaled: how long a driver may take is its own affair.
CALL_SECONDS = 1.5
#: Starting Python on a machine that is busy with jobs; a driver is not touched yet.
START_SECONDS = 15.0
#: So long a card must answer from its own reader before it goes back to the others.
PROVEN_SECONDS = 60.0
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
            self.process = await self._start()
        return self.process

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            json.dumps(self.spec),
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE,
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
                await asyncio.wait_for(process.wait(), 0.2)
            except TimeoutError:
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
    """A reader that serves one card, which once hung."""

    reader: Reader
    since: float = field(default_factory=time.monotonic)


class Readers:
    """The shared reader, and those of cards that hung."""

    def __init__(self, spec: backends.Spec) -> None:
        self.spec = spec
        self.shared = Reader(spec)
        self.own: dict[str, Own] = {}

    def alone(self, uuid: str) -> bool:
        return uuid in self.own

    async def call(self, call: str, uuid: str | None = None, seconds: float | None = None) -> Any:
        own = self.own.get(uuid) if uuid else None
        try:
            answer = await (own.reader if own else self.shared).call(call, uuid, seconds)
        except CardHung:
            if uuid:
                self._isolate(uuid)
            raise
        if own and time.monotonic() - own.since > PROVEN_SECONDS:
            await self._rejoin(uuid)
        return answer

    def _isolate(self, uuid: str) -> None:
        if uuid not in self.own:
            logger.warning("Card %s hangs; it gets a reader of its own", uuid)
            self.own[uuid] = Own(Reader(self.spec))
        self.own[uuid].since = time.monotonic()

    async def _rejoin(self, uuid: str | None) -> None:
        own = self.own.pop(uuid, None) if uuid else None
        if own:
            logger.info("Card %s answers again; it shares a reader", uuid)
            await own.reader.close()

    def pids(self) -> set[int]:
        """The reader processes that run now."""
        readers = [self.shared, *(own.reader for own in self.own.values())]
        return {reader.process.pid for reader in readers if reader.process is not None}

    async def close(self) -> None:
        for reader in [self.shared, *(own.reader for own in self.own.values())]:
            await reader.close()

"""One subscription per server process feeds all its WebSockets: the cost of a frame does not grow with readers' speed.

Each socket has an `Outbox`. Of metrics and progress a slow reader gets the newest; changes, logs and events
wait in line, and when the line is too long the reader is told to fetch everything anew (`resync`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from channels.layers import get_channel_layer

log = logging.getLogger(__name__)
# The layer logs a traceback per second while the broker is away; the hub says the same in one line.
logging.getLogger("channels_redis.pubsub").setLevel(logging.CRITICAL)

GROUP = "frames"
NEWEST_WINS = frozenset({"system:metrics", "job:progress", "job:metric"})
QUEUE_LENGTH = 200
#: channels_redis waits 1 s after a broken read; at two pings per second each break loses at least one, so that
#: a missing number means that frames may be missing too.
PING_SECONDS = 0.5
SILENT_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 10.0

Frame = dict[str, Any]


def sorts(frame: Frame) -> Hashable:
    """Frames of one sort replace each other: same channel and event, from the same host, about the same metric."""
    data = frame.get("data")
    data = data if isinstance(data, dict) else {}
    return frame["channel"], frame["event"], data.get("host"), data.get("metric_type")


class Outbox:
    """What one socket still has to be sent, in order of arrival."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, str] = OrderedDict()
        self._waiting = 0  # lines that may not be replaced
        self._count = 0
        self._held: dict[str, list[tuple[Frame, str]]] = {}
        self._filled = asyncio.Event()

    def put(self, frame: Frame, line: str) -> None:
        if frame["channel"] in self._held:
            self._held[frame["channel"]].append((frame, line))
        elif frame["event"] in NEWEST_WINS:
            self._lines.pop(sorts(frame), None)
            self._add(sorts(frame), line)
        else:
            self.queue(line)

    def queue(self, line: str) -> None:
        """A line that must not be replaced by a later one."""
        if self._waiting >= QUEUE_LENGTH:
            return self.resync()
        self._waiting += 1
        self._count += 1
        self._add(self._count, line)

    def resync(self) -> None:
        """Forget what waits in line; the reader fetches rows, which are the truth, anew."""
        self._lines.clear()
        self._waiting = 0
        self._add("resync", json.dumps({"event": "resync"}))

    def hold(self, channel: str) -> None:
        """Keep frames of this channel back until its snapshot is there."""
        self._held.setdefault(channel, [])

    def release(self, channel: str) -> None:
        for frame, line in self._held.pop(channel, []):
            self.put(frame, line)

    def _add(self, key: Hashable, line: str) -> None:
        self._lines[key] = line
        self._filled.set()

    async def get(self) -> str:
        while not self._lines:
            self._filled.clear()
            await self._filled.wait()
        key, line = self._lines.popitem(last=False)
        self._waiting -= isinstance(key, int)
        return line


class Hub:
    """The process's only reader of the channel layer."""

    def __init__(self) -> None:
        self.sockets: Counter[Any] = Counter()  # open sockets by user
        self._readers: defaultdict[str, set[Outbox]] = defaultdict(set)
        self._connected = asyncio.Event()
        self._broken = False
        self._task: asyncio.Task[None] | None = None

    async def ready(self, seconds: float = 2.0) -> None:
        """Wait for the subscription, but not long: without a broker, pages still get their snapshots."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="hub")
        try:
            async with asyncio.timeout(seconds):
                await self._connected.wait()
        except TimeoutError:
            log.debug("no broker yet")

    def subscribe(self, channel: str, outbox: Outbox) -> None:
        self._readers[channel].add(outbox)

    def unsubscribe(self, channel: str, outbox: Outbox) -> None:
        self._readers[channel].discard(outbox)
        if not self._readers[channel]:
            del self._readers[channel]

    def deliver(self, frame: Frame) -> None:
        readers = self._readers.get(frame["channel"])
        if readers:
            line = json.dumps(frame)
            for outbox in readers:
                outbox.put(frame, line)

    def resync(self) -> None:
        for outbox in set().union(*self._readers.values()):
            outbox.resync()

    async def _run(self) -> None:
        pause = 0.5
        while True:
            try:
                await self._listen()
            except Exception as error:  # the broker may fail in any way; pages are served on
                log.warning(
                    "The subscription to live frames broke (%s); trying again.", error or type(error).__name__
                )
            pause = 0.5 if self._connected.is_set() else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._connected.clear()
            self._broken = True
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _listen(self) -> None:
        """Subscribe, then deliver until something breaks or nothing, not even our own ping, comes any more."""
        layer = get_channel_layer()
        await layer.flush()  # closes what is left of a broken connection
        name = await layer.new_channel()
        await layer.group_add(GROUP, name)
        self._open()
        pings = asyncio.create_task(self._ping(layer, name))
        try:
            await self._receive(layer, name)
        finally:
            pings.cancel()

    def _open(self) -> None:
        if self._broken:
            log.info("The subscription to live frames is back.")
            self.resync()
        self._broken = False
        self._connected.set()

    async def _receive(self, layer: Any, name: str) -> None:
        expected = None
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                message = await layer.receive(name)
            if message["type"] == "frame":
                self.deliver(message["frame"])
                continue
            if expected is not None and message["number"] != expected:
                self.resync()
            expected = message["number"] + 1

    async def _ping(self, layer: Any, name: str) -> None:
        number = 0
        while True:
            number += 1
            try:
                await layer.send(name, {"type": "ping", "number": number})
            except Exception as error:  # the reader notices the gap
                log.debug("ping: %s", error)
            await asyncio.sleep(PING_SECONDS)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def current() -> Hub:
    """The hub of this process (strictly: of its event loop; a server has one)."""
    return _hubs.setdefault(asyncio.get_running_loop(), Hub())

"""The agent: one per host, the only one who has its cards read. Every 2 s the latest values go to the database
and its history and, as frames, to the pages; whoever cannot wait asks on the socket.

    tick ─▶ discover (6 s) ─▶ sweep ─▶ frames ─▶ latest values and history, aside
    socket: `fresh <uuid>` ─▶ read and list that card now

A database or a broker that is away stops neither the sampling nor each other. A card that hangs holds up a sweep,
not the frames: the beat does not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import connection

from gpus import agent_client, backends, host, inventory, shapes
from gpus.publish import flush, publish
from gpus.quiet import Outage
from gpus.recorder import Unwritten
from gpus.sampling import Card, Sampler, ended
from gpus.timing import PROCESS_LIST_SECONDS, sample_seconds, scaled

logger = logging.getLogger(__name__)
FRESH_SECONDS = 0.5
#: How long a tick waits for the sweep and the host's own numbers, which take milliseconds, unless a card hangs or a
#: network disk is dead: a frame is then on time with the readings that there are.
PATIENCE_SECONDS = 0.4


class Aside:
    """A thread for calls that may take long; one at a time, and none keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self.last: asyncio.Future[Any] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def offer(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Start `call`, unless the last one still runs; the future of the one that runs."""
        if self.last is None or self.last.done():
            self.last = asyncio.get_running_loop().create_future()
            self.calls.put((call, self.last))
        return self.last

    def _run(self) -> None:
        while True:
            call, future = self.calls.get()
            try:
                result = call()
            except Exception:
                logger.exception("A call of the agent failed")
                result = None
            try:
                future.get_loop().call_soon_threadsafe(_finish, future, result)
            except RuntimeError:  # the loop has ended
                return


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Agent:
    def __init__(self) -> None:
        self.host = settings.MISTUDIO_HOST_NAME
        self.boot_id = host.boot_id()
        self.spec = backends.spec()
        self.sampler = Sampler(self.spec)
        self.host_reader = host.HostReader([settings.BASE_DIR, settings.MISTUDIO_HOME, settings.HF_HOME])
        self.host_reading: dict[str, Any] = {}
        self.writer, self.host_aside = Aside("database"), Aside("host")
        self.unwritten = Unwritten()
        self.database = Outage(logger, "The database does not take readings; sampling goes on")
        self.lists_due = 0.0
        self.sweep: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. The beat is a grid: a late tick is not made up, and does not shift the next."""
        server = await listen(self.fresh)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._beat()), asyncio.create_task(stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            server.close()
            await ended([*tasks, self.sweep] if self.sweep else tasks)
            await self.sampler.close()
            flush(0.5)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        start, period, tick = loop.time(), sample_seconds(), 0
        while True:
            await self.tick()
            tick = max(tick + 1, int((loop.time() - start) / period) + 1)
            await asyncio.sleep(start + tick * period - loop.time())

    async def tick(self) -> None:
        host = self.host_aside.offer(self.host_reader.read)
        first = self.sweep is None
        sweep = self._sweep()
        if first:  # before it nothing is known, and nothing is told
            await asyncio.wait([sweep])
        await asyncio.wait([sweep, host], timeout=scaled(PATIENCE_SECONDS))
        self._keep_host(host)
        self.unwritten.note(self.sampler.cards.values())
        self._publish()
        self._recall()
        self.writer.offer(self._recorder())

    def _sweep(self) -> asyncio.Task[None]:
        """The round under way, or a new one."""
        if self.sweep is None or self.sweep.done():
            if self.sweep:
                self.sweep.result()  # what is not a driver's doing is ours, and must be seen
            self.sweep = asyncio.create_task(self.sampler.sample(self._lists_due()))
        return self.sweep

    def _recall(self) -> None:
        """What the last record found missing."""
        last = self.writer.last
        if last and last.done() and last.result() is not None:
            self.sampler.recall(last.result())

    def _lists_due(self) -> bool:
        now = asyncio.get_running_loop().time()
        due = now >= self.lists_due
        if due:
            # Half a beat early, so that rounding never skips a list to the next tick.
            self.lists_due = now + scaled(PROCESS_LIST_SECONDS) - sample_seconds() / 2
        return due

    def _keep_host(self, reading: asyncio.Future[Any]) -> None:
        if reading.done() and reading.result():
            self.host_reading = {
                "sampled_at": shapes.iso(datetime.now(UTC)),
                **shapes.finite(reading.result()),
            }

    def _recorder(self) -> Callable[[], list[dict[str, Any]] | None]:
        sight = inventory.Sight(
            host=self.host,
            boot_id=self.boot_id,
            reading=self.host_reading,
            backend=self.spec["backend"],
            backend_error=self.sampler.backend_error,
            complete=self.sampler.complete,
            cards=self.sampler.state(),
        )
        return lambda: self._record(sight)

    def _record(self, sight: inventory.Sight) -> list[dict[str, Any]] | None:
        """Written; the cards that the database knows and the sight lacks, or `None` when it could not say."""
        try:
            inventory.record(sight)
            self.unwritten.write()
            unseen = [] if sight.complete else inventory.unseen(sight)
            self.database.over()
            return unseen
        except Exception as error:  # whatever it is, the cards go on being read
            self.database.note(error)
            connection.close()
            return None

    # Frames

    def _publish(self) -> None:
        cards = [metrics_of(card) for card in self.sampler.cards.values()]
        for card in cards:
            publish(
                f"system/gpu/{card['uuid']}",
                "system:metrics",
                {"metric_type": "gpu", "host": self.host, **card},
            )
        publish("system/gpus", "system:metrics", self._all_cards(cards))
        for name in ("cpu", "memory", "disk", "network"):
            if name in self.host_reading:
                publish(f"system/{name}", "system:metrics", self._of_host(name))

    def _all_cards(self, cards: list[shapes.Metrics]) -> dict[str, Any]:
        return {
            "metric_type": "gpus",
            "host": self.host,
            "gpus": cards,
            "aggregate": shapes.aggregate(cards),
            "errors": {card.uuid: card.error for card in self.sampler.cards.values() if card.error},
            "backend_error": self.sampler.backend_error or None,
        }

    def _of_host(self, name: str) -> dict[str, Any]:
        sampled_at = self.host_reading["sampled_at"]
        return {"metric_type": name, "host": self.host, "sampled_at": sampled_at, **self.host_reading[name]}

    # The socket

    async def fresh(self, uuid: str) -> dict[str, Any]:
        """Read and list one card now, in at most half a second."""
        if uuid not in self.sampler.cards:
            return {"error": "unknown_gpu"}
        card = await self.sampler.fresh(uuid, FRESH_SECONDS)
        if card is None:
            return {"error": "no answer"}
        return {
            "uuid": uuid,
            "reading": card.reading,
            "processes": card.processes,
            "lists": card.lists,
            "unified": bool(card.info.get("unified_memory")),
            "sampled_at": shapes.iso(card.sampled_at),
        }


def metrics_of(card: Card) -> shapes.Metrics:
    return shapes.metrics(card.index, card.uuid, card.reading, card.sampled_at)


async def listen(fresh: Callable[[str], Any]) -> asyncio.Server:
    """The socket that answers `fresh <uuid>`, for this user only."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), 5)
            verb, _, uuid = line.decode(errors="replace").strip().partition(" ")
            reply = await fresh(uuid) if verb == "fresh" else {"error": "unknown verb"}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    path = agent_client.socket_path()
    if os.path.exists(path):
        os.unlink(path)
    umask = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(answer, path)
    finally:
        os.umask(umask)

"""The one function that publishes a frame: `publish(channel, event, data)`.

It never blocks and never raises. A daemon thread per process takes frames from a bounded queue, numbers them
with Redis `INCR` (so that several publishers of one channel count together) and sends them to the group
`frames`. While the broker is away frames are dropped: the database row is the truth, a frame is a nudge.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

from channels.layers import get_channel_layer
from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gpus.quiet import Outage
from gpus.shapes import finite, iso

logger = logging.getLogger(__name__)
GROUP = "frames"
MAX_WAITING = 1000
BROKER_SECONDS = 1.0
#: Of these, a frame that still waits is replaced by a newer one of its channel.
NEWEST_WINS = frozenset({"system:metrics", "job:progress", "job:metric"})
Frame = dict[str, Any]


def publish(channel: str, event: str, data: dict[str, Any]) -> None:
    """Send a frame to every page that listens to `channel`; at once, or never."""
    try:
        plain = json.loads(DjangoJSONEncoder().encode(finite(data)))
        _publishers.get().put(
            {"channel": channel, "event": event, "ts": iso(datetime.now(UTC)), "data": plain}
        )
    except Exception:  # a page without a frame must never cost a job
        logger.exception("A frame of %s was not published", channel)


def flush(timeout: float = 1.0) -> bool:
    """Wait until what was published is sent or dropped; whether it was in time."""
    return _publishers.get().flush(timeout)


class Publisher:
    """The queue, and the thread that empties it."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[Any, Frame] = OrderedDict()
        self.changed = threading.Condition()
        self.sending = 0
        self.numbers = itertools.count()
        self.outage = Outage(logger, "The broker does not answer; frames are dropped until it does")
        threading.Thread(target=self._run, name="publish", daemon=True).start()

    def put(self, frame: Frame) -> None:
        key = (frame["channel"], frame["event"]) if frame["event"] in NEWEST_WINS else next(self.numbers)
        with self.changed:
            self.waiting.pop(key, None)
            self.waiting[key] = frame
            if len(self.waiting) > MAX_WAITING:
                self.waiting.popitem(last=False)
            self.changed.notify_all()

    def flush(self, timeout: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not self.waiting and not self.sending, timeout)

    def _take(self) -> list[Frame]:
        with self.changed:
            self.sending = 0
            self.changed.notify_all()
            self.changed.wait_for(lambda: bool(self.waiting))
            frames = list(self.waiting.values())
            self.waiting.clear()
            self.sending = len(frames)
            return frames

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        sender = Sender()
        while True:
            frames = self._take()
            try:
                loop.run_until_complete(sender.send(frames))
                self.outage.over()
            except Exception as error:
                self.outage.note(error)


class Sender:
    """The broker's side: a number from Redis, then the group."""

    def __init__(self) -> None:
        self.redis = redis.Redis.from_url(
            settings.REDIS_URL,
            socket_timeout=BROKER_SECONDS,
            socket_connect_timeout=BROKER_SECONDS,
            retry=Retry(NoBackoff(), 0),  # redis-py 8 would try for seconds; a dropped frame is cheaper
        )

    async def send(self, frames: list[Frame]) -> None:
        numbers = self.redis.pipeline(transaction=False)
        for frame in frames:
            numbers.incr(f"mistudio:seq:{frame['channel']}")
        layer = get_channel_layer()
        for frame, number in zip(frames, await numbers.execute(), strict=True):
            message = {"type": "frame", "frame": frame | {"seq": number}}
            await asyncio.wait_for(layer.group_send(GROUP, message), BROKER_SECONDS)


class Publishers:
    """One publisher per process: threads do not survive a fork, so a child makes its own at first use."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.publisher: Publisher | None = None

    def get(self) -> Publisher:
        with self.lock:
            self.publisher = self.publisher or Publisher()
            return self.publisher


_publishers = Publishers()

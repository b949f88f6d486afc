"""Frames: at once or never, numbered per channel, and no cost to whoever publishes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import redis
from channels.layers import channel_layers, get_channel_layer

from gpus import publish as module
from gpus.publish import MAX_WAITING, Publisher, publish


@pytest.fixture(autouse=True)
def own_publisher() -> Iterator[None]:
    module._publishers.forget()
    yield
    module._publishers.forget()


@pytest.fixture
def no_broker(settings: Any, tmp_path: Any) -> None:
    use(settings, f"unix://{tmp_path}/nobody.sock")


@pytest.fixture
def with_broker(settings: Any, broker: str) -> str:
    use(settings, broker)
    return broker


def use(settings: Any, url: str) -> None:
    settings.REDIS_URL = url
    backend = "channels_redis.pubsub.RedisPubSubChannelLayer"
    settings.CHANNEL_LAYERS = {
        "default": {"BACKEND": backend, "CONFIG": {"hosts": [url], "prefix": "mistudio"}}
    }
    channel_layers.backends.clear()


class Listener:
    """A consumer of the group, as the server processes have one."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self.ready.wait(5)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(5)

    async def _run(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.ensure_future(self._listen())
        await asyncio.wait([self.task])
        await get_channel_layer().flush()

    async def _listen(self) -> None:
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(module.GROUP, channel)
        await asyncio.sleep(0.2)
        self.ready.set()
        while True:
            message = await layer.receive(channel)
            assert message["type"] == "frame"
            self.frames.append(message["frame"])

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 5
        while len(self.frames) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.frames


@pytest.fixture
def listen() -> Iterator[Callable[[], Listener]]:
    listeners: list[Listener] = []

    def start() -> Listener:
        listeners.append(Listener())
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.close()


def test_a_frame_arrives_with_channel_event_number_and_time(
    with_broker: str, listen: Callable[[], Listener]
) -> None:
    listener = listen()
    publish("jobs", "job:changed", {"id": "x", "loss": float("nan")})
    (frame,) = listener.wait(1)
    assert sorted(frame) == ["channel", "data", "event", "seq", "ts"]
    assert (frame["channel"], frame["event"], frame["seq"]) == ("jobs", "job:changed", 1)
    assert frame["data"] == {"id": "x", "loss": None}
    assert datetime.fromisoformat(frame["ts"]).tzinfo


def test_several_publishers_of_a_channel_count_together(
    with_broker: str, listen: Callable[[], Listener]
) -> None:
    listener = listen()
    others = redis.Redis.from_url(with_broker)
    publish("jobs", "job:changed", {})
    listener.wait(1)
    others.incr("mistudio:seq:jobs")
    publish("jobs", "job:changed", {})
    publish("jobs/1", "job:changed", {})
    assert [(frame["channel"], frame["seq"]) for frame in listener.wait(3)] == [
        ("jobs", 1),
        ("jobs", 3),
        ("jobs/1", 1),
    ]


def test_it_sends_what_json_does_not_know_as_text(with_broker: str, listen: Callable[[], Listener]) -> None:
    listener = listen()
    at, ident = datetime(2026, 1, 2, tzinfo=UTC), UUID(int=7)
    publish("jobs", "job:changed", {"at": at, "id": ident, "pair": (1, 2)})
    assert listener.wait(1)[0]["data"] == {"at": "2026-01-02T00:00:00Z", "id": str(ident), "pair": [1, 2]}


def test_a_forked_child_publishes_by_itself(with_broker: str, listen: Callable[[], Listener]) -> None:
    listener = listen()
    publish("jobs", "job:changed", {"from": "parent"})
    listener.wait(1)
    pid = os.fork()
    if pid == 0:
        publish("jobs", "job:changed", {"from": "child"})
        os._exit(0 if module.flush(3) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    publish("jobs", "job:changed", {"from": "parent again"})
    frames = listener.wait(3)
    assert [(frame["seq"], frame["data"]["from"]) for frame in frames] == [
        (1, "parent"),
        (2, "child"),
        (3, "parent again"),
    ]


def test_it_never_blocks_nor_raises_without_a_broker(
    no_broker: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        start = time.monotonic()
        for number in range(500):
            publish("jobs", "job:changed", {"n": number})
        assert time.monotonic() - start < 0.5
        assert module.flush(5)
        publish("jobs", "job:changed", {})
        assert module.flush(5)
    assert len([record for record in caplog.records if "broker" in record.message]) == 1


def test_it_goes_on_when_the_broker_comes_back(
    no_broker: None, broker: str, tmp_path: Any, listen: Callable[[], Listener]
) -> None:
    (tmp_path / "nobody.sock").unlink(missing_ok=True)
    publish("jobs", "job:changed", {"lost": True})
    assert module.flush(5)
    (tmp_path / "nobody.sock").symlink_to(tmp_path / "broker.sock")
    listener = listen()
    publish("jobs", "job:changed", {"lost": False})
    assert [frame["data"] for frame in listener.wait(1)] == [{"lost": False}]


def test_a_broker_that_accepts_and_never_answers_costs_nobody_a_wait(settings: Any, tmp_path: Any) -> None:
    import socket

    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "mute.sock"))
    server.listen()
    use(settings, f"unix://{tmp_path}/mute.sock")
    start = time.monotonic()
    publish("jobs", "job:changed", {})
    assert time.monotonic() - start < 0.2
    assert not module.flush(0.3)
    assert module.flush(5)


def test_data_that_cannot_be_sent_is_logged_and_harms_nobody(
    no_broker: None, caplog: pytest.LogCaptureFixture
) -> None:
    publish("jobs", "job:changed", {"what": object()})
    assert "was not published" in caplog.text


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher whose thread never takes anything."""
    monkeypatch.setattr(Publisher, "_run", lambda self: None)
    return Publisher()


def frame(event: str, value: int, channel: str = "c") -> dict[str, Any]:
    return {"channel": channel, "event": event, "data": value}


def test_of_metrics_that_wait_the_newest_of_a_channel_wins(idle: Publisher) -> None:
    for value in range(3):
        idle.put(frame("system:metrics", value))
        idle.put(frame("system:metrics", value, "d"))
    assert [(f["channel"], f["data"]) for f in idle.waiting.values()] == [("c", 2), ("d", 2)]


def test_changes_are_all_kept_in_order_until_the_queue_is_full(idle: Publisher) -> None:
    for value in range(MAX_WAITING + 5):
        idle.put(frame("job:changed", value))
    kept = [f["data"] for f in idle.waiting.values()]
    assert kept == list(range(5, MAX_WAITING + 5))

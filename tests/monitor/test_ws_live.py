"""The WebSocket under a real daphne with a real broker: what no in-process test can show."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from monitor.consumers import SOCKETS_PER_USER, TRY_LATER
from tests.monitor.live import CARD, Live, running


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # A short name: a socket's path has 108 bytes at most, and pytest's folders are long.
    with tempfile.TemporaryDirectory(prefix="mi") as folder, running(Path(folder)) as parts:
        yield parts


@asynccontextmanager
async def opened(live: Live, path: str, **values: Any) -> AsyncIterator[ClientConnection]:
    headers = {"Authorization": f"Token {live.token()}"}
    values = {"additional_headers": headers, "compression": None, "close_timeout": 1} | values
    async with connect(f"ws://127.0.0.1:{live.port}{path}", **values) as socket:
        yield socket


async def heard(socket: ClientConnection, seconds: float = 5.0) -> dict[str, Any]:
    return json.loads(await asyncio.wait_for(socket.recv(), seconds))


async def publish(layer: Any, number: int, event: str = "system:metrics", **data: Any) -> None:
    frame = {"channel": f"system/gpu/{CARD}", "event": event, "seq": number, "ts": "", "data": data}
    await layer.group_send("frames", {"type": "frame", "frame": frame})


async def status_of(live: Live, path: str = "/ws/", **values: Any) -> int:
    try:
        async with connect(f"ws://127.0.0.1:{live.port}{path}", **values):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


async def test_it_delivers_frames(live: Live) -> None:
    layer = live.layer()
    async with opened(live, "/ws/system/gpu/0/") as socket:
        first = await heard(socket)
        assert (first["channel"], first["seq"]) == (f"system/gpu/{CARD}", 0)
        for number in range(1, 6):
            await publish(layer, number, utilization_gpu_percent=number)
            assert (await heard(socket))["seq"] == number
    await layer.flush()


async def test_it_keeps_an_idle_socket(live: Live) -> None:
    """redis-py 8 ends blocking reads after 5 s, and took idle sockets on the core layer with them."""
    await idle(live, 7)


@pytest.mark.slow
async def test_it_keeps_an_idle_socket_for_a_minute(live: Live) -> None:
    await idle(live, 62)


async def idle(live: Live, seconds: float) -> None:
    layer = live.layer()
    async with opened(live, "/ws/") as socket:
        await socket.send(json.dumps({"action": "subscribe", "channel": "system/gpu/0"}))
        await heard(socket)
        with pytest.raises(TimeoutError):
            await heard(socket, seconds)
        await publish(layer, 9)
        assert (await heard(socket))["seq"] == 9
    await layer.flush()


async def test_it_admits_the_signed_in_page_only_from_its_own_origin(live: Live) -> None:
    cookie = {"Cookie": await asyncio.to_thread(live.cookie)}
    assert await status_of(live, origin=live.url, additional_headers=cookie) == 101
    assert await status_of(live, origin="http://evil.example", additional_headers=cookie) == 403
    assert await status_of(live, origin="http://127.0.0.1:1", additional_headers=cookie) == 403
    assert await status_of(live, additional_headers=cookie) == 403


async def test_it_refuses_strangers_before_it_accepts(live: Live) -> None:
    assert await status_of(live) == 403
    assert await status_of(live, "/ws/system/gpus/", origin=live.url) == 403
    assert await status_of(live, "/elsewhere/") == 403


async def test_it_takes_a_ticket_once(live: Live) -> None:
    headers = {"Authorization": f"Bearer {live.token()}"}
    request = urllib.request.Request(f"{live.url}/api/v1/ws-ticket/", b"", headers)
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    path = f"/ws/?ticket={answer['ticket']}"
    assert await status_of(live, path) == 101
    assert await status_of(live, path) == 403
    assert answer["ticket"] not in (live.home / "web.log").read_text()


async def test_it_gives_a_slow_reader_the_newest(live: Live) -> None:
    """36 MB of metrics while nobody reads, at a pace that any reader could follow: the kernel takes the first
    of them (10 MB at most), then newer replace older in the outbox, and the last one comes at the end."""
    layer, last = live.layer(), 600
    async with opened(live, "/ws/system/gpu/0/", max_queue=1) as socket:
        for number in range(1, last + 1):
            await publish(layer, number, filling="x" * 60_000)
            await asyncio.sleep(0.003)
        await asyncio.sleep(0.5)
        numbers = [0]
        while numbers[-1] != last:
            numbers.append((await heard(socket))["seq"])
    assert numbers[2:] == sorted(set(numbers[2:]))
    assert len(numbers) < last * 0.6
    await layer.flush()


CROWD = """
from django.contrib.auth.models import User
from monitor.models import ApiToken
for n in range({count}):
    user, _ = User.objects.get_or_create(username=f"crowd{{n}}")
    print(ApiToken.objects.create(user=user, name="crowd", scopes=["read"])[1])
"""


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("frames", "every"), [(40, 0.25), pytest.param(150, 2.0, marks=pytest.mark.slow)], ids=["short", "5 min"]
)
async def test_one_that_never_reads_costs_199_others_nothing_g35(
    live: Live, frames: int, every: float
) -> None:
    """200 clients, 1 never reads, 5 min: 199 get 99 % of the frames in order, the server's memory stays flat."""
    values = live.manage("shell", "--no-imports", "-c", CROWD.format(count=10)).split()
    layer, readers = live.layer(), []
    async with AsyncExitStack() as stack:

        async def join(token: str, **options: Any) -> ClientConnection:
            headers = {"Authorization": f"Token {token}"}
            return await stack.enter_async_context(
                opened(live, "/ws/system/gpu/0/", additional_headers=headers, **options)
            )

        deaf = await join(values[0], max_queue=1)
        sockets = [await join(values[n // 20]) for n in range(1, 200)]
        readers = [asyncio.create_task(numbers_of(socket, frames)) for socket in sockets]
        before = live.web_memory_bytes()
        for number in range(1, frames + 1):
            await publish(layer, number, filling="x" * 9_000)
            await asyncio.sleep(every)
        heard_by = await asyncio.gather(*readers)
        grown = live.web_memory_bytes() - before
        deaf.transport.abort()
    await layer.flush()
    for numbers in heard_by:
        assert numbers == sorted(set(numbers))
        assert len(numbers) >= 0.99 * frames
    assert grown < 20 * 2**20


async def numbers_of(socket: ClientConnection, last: int) -> list[int]:
    """The numbers of the frames until the last one, or until none comes for a while."""
    numbers: list[int] = []
    with suppress(TimeoutError):
        while last not in numbers[-1:]:
            if number := (await heard(socket, 15))["seq"]:
                numbers.append(number)
    return numbers


async def test_it_tells_a_slow_reader_to_fetch_anew(live: Live) -> None:
    """Changes are not replaced by later ones; when too many wait, `resync` stands for them."""
    layer = live.layer()
    async with opened(live, "/ws/system/gpu/0/", max_queue=1) as socket:
        for number in range(1, 2001):
            await publish(layer, number, event="gpu:recovered", filling="x" * 10_000)
        await asyncio.sleep(1)
        events = set()
        while "resync" not in events:
            events.add((await heard(socket))["event"])
    await layer.flush()


async def test_it_listens_again_after_the_broker_was_away(live: Live) -> None:
    async with opened(live, "/ws/system/gpu/0/") as socket:
        await heard(socket)
        assert live.broker
        live.broker.kill()
        live.broker.wait()
        async with opened(live, "/ws/system/gpu/0/") as other:  # rows are shown without a broker, too
            assert (await heard(other))["seq"] == 0
        live.start_broker()
        assert (await heard(socket, 20))["event"] == "resync"
        layer = live.layer()
        await publish(layer, 77)
        assert (await heard(socket))["seq"] == 77
        await layer.flush()


async def test_one_socket_too_many_is_told_so_and_closed(live: Live) -> None:
    """daphne refuses to send most of the codes below 3000: only a real one shows whether ours goes out."""
    async with AsyncExitStack() as stack:
        for _ in range(SOCKETS_PER_USER):
            await stack.enter_async_context(opened(live, "/ws/"))
        async with opened(live, "/ws/") as another:
            assert (await heard(another))["code"] == "too_many_sockets"
            with pytest.raises(ConnectionClosedError) as ended:
                await heard(another)
            assert ended.value.rcvd
            assert ended.value.rcvd.code == TRY_LATER

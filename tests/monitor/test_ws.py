"""The WebSocket protocol, through the real ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from channels.testing import WebsocketCommunicator
from django.contrib.auth.models import User
from django.test import Client

from gpus.models import Gpu, Host
from mistudio.asgi import application
from monitor import consumers, hub
from tests.monitor.conftest import session_cookie, token_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
OURS = [(b"host", b"testserver"), (b"origin", b"http://testserver")]
cookie_of, token_of = database_sync_to_async(session_cookie), database_sync_to_async(token_for)


@pytest.fixture(autouse=True)
def in_memory_layer(settings: Any) -> None:
    settings.CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}


async def page_headers(user: User) -> list[tuple[bytes, bytes]]:
    return [*OURS, (b"cookie", (await cookie_of(user)).encode())]


async def token_headers(user: User, *scopes: str, scheme: str = "Token") -> list[tuple[bytes, bytes]]:
    value = await token_of(user, *scopes)
    return [(b"host", b"testserver"), (b"authorization", f"{scheme} {value}".encode())]


async def admitted(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    socket = WebsocketCommunicator(application, path, headers)
    accepted, _ = await socket.connect(timeout=5)
    await socket.disconnect(timeout=5)
    return accepted


@asynccontextmanager
async def opened(path: str, user: User) -> AsyncIterator[WebsocketCommunicator]:
    socket = WebsocketCommunicator(application, path, await page_headers(user))
    assert (await socket.connect(timeout=5))[0]
    try:
        yield socket
    finally:
        await socket.disconnect(timeout=5)


async def ask(socket: WebsocketCommunicator, action: Any, channel: Any = None) -> Any:
    await socket.send_json_to({"action": action, "channel": channel})
    return await socket.receive_json_from(timeout=5)


def frame(channel: str, event: str = "system:metrics", seq: int = 7, **data: Any) -> dict[str, Any]:
    return {"channel": channel, "event": event, "seq": seq, "ts": "2026-01-01T00:00:00Z", "data": data}


async def publish(message: dict[str, Any]) -> None:
    await get_channel_layer().group_send("frames", {"type": "frame", "frame": message})


# Who may come in ----------------------------------------------------------------------------------------


async def test_it_admits_a_session_from_our_own_page(alice: User) -> None:
    assert await admitted("/ws/", await page_headers(alice))


@pytest.mark.parametrize("scheme", ["Token", "Bearer", "bearer"])
async def test_it_admits_a_token_without_an_origin(alice: User, scheme: str) -> None:
    assert await admitted("/ws", await token_headers(alice, scheme=scheme))


async def test_it_refuses_strangers(alice: User) -> None:
    cookie = (b"cookie", (await cookie_of(alice)).encode())
    token = (await token_headers(alice))[1]
    strangers = {
        "anonymous": OURS,
        "cookie without origin": [OURS[0], cookie],
        "cookie from elsewhere": [OURS[0], (b"origin", b"http://evil.example"), cookie],
        "cookie from another port": [OURS[0], (b"origin", b"http://testserver:81"), cookie],
        "cookie from a null origin": [OURS[0], (b"origin", b"null"), cookie],
        "token from another page": [OURS[0], (b"origin", b"http://evil.example"), token],
        "foreign host": [(b"host", b"evil.example"), (b"origin", b"http://evil.example"), cookie],
        "no host": [token],
        "wrong token": [*OURS, (b"authorization", b"Token " + b"0" * 64), cookie],
        "odd bytes": [*OURS, (b"authorization", b"Token \xff\xfe\x00"), cookie],
        "unknown scheme": [*OURS, (b"authorization", b"Basic YTpi"), cookie],
    }
    let_in = {name for name, headers in strangers.items() if await admitted("/ws/", headers)}
    assert let_in == set()


async def test_it_refuses_a_token_that_may_not_read(alice: User) -> None:
    assert not await admitted("/ws/", await token_headers(alice, "submit"))


async def test_it_refuses_a_user_who_was_disabled(alice: User) -> None:
    headers, token = await page_headers(alice), await token_headers(alice)
    await User.objects.filter(pk=alice.pk).aupdate(is_active=False)
    assert not await admitted("/ws/", headers)
    assert not await admitted("/ws/", token)


async def test_it_refuses_unknown_addresses(alice: User) -> None:
    assert not await admitted("/elsewhere/", await page_headers(alice))


async def test_it_takes_a_ticket_once(alice: User) -> None:
    def post() -> Any:
        client = Client()
        client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
        return client.post("/api/v1/ws-ticket/")

    answer = await database_sync_to_async(post)()
    assert answer.status_code == 201 and answer.json()["expires_in_seconds"] == 30
    path = f"/ws/?ticket={answer.json()['ticket']}"
    assert await admitted(path, [OURS[0]])
    assert not await admitted(path, [OURS[0]])


# Channels and snapshots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1", "GPU-AbCd0000-1111-2222-3333-444455556666", "gpu-abcd0000-1111-2222-3333-444455556666", "alpha/1"])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_it_subscribes_by_address_and_answers_with_a_snapshot(alice: User, card: Gpu, name: str, slash: str) -> None:
    async with opened(f"/ws/system/gpu/{name}{slash}", alice) as socket:
        first = await socket.receive_json_from(timeout=5)
    assert first["channel"] == f"system/gpu/{card.uuid}"
    assert (first["event"], first["seq"]) == ("system:metrics", 0)
    assert first["data"]["metric_type"] == "gpu"
    assert first["data"]["utilization_gpu_percent"] == 37.0
    assert first["data"]["power_draw_watts"] is None


async def test_it_passes_frames_on_with_their_number(alice: User, card: Gpu) -> None:
    async with opened("/ws/", alice) as socket:
        await ask(socket, "subscribe", "system/gpu/1")
        sent = frame(f"system/gpu/{card.uuid}", seq=42, utilization_gpu_percent=99)
        await publish(frame("system/gpu/other"))
        await publish(sent)
        assert await socket.receive_json_from(timeout=5) == sent


async def test_it_is_silent_after_unsubscribe(alice: User, card: Gpu) -> None:
    async with opened("/ws/", alice) as socket:
        await ask(socket, "subscribe", "system/gpus")
        await socket.send_json_to({"action": "unsubscribe", "channel": "system/gpus"})
        assert (await ask(socket, "unsubscribe", "system/gpus"))["code"] == "unknown_channel"
        await publish(frame("system/gpus"))
        assert await socket.receive_nothing(0.3)


@pytest.mark.parametrize("part", ["cpu", "memory", "disk", "network"])
async def test_it_sends_the_host_readings(alice: User, host: Host, part: str) -> None:
    async with opened(f"/ws/system/{part}/", alice) as socket:
        data = (await socket.receive_json_from(timeout=5))["data"]
    assert (data["metric_type"], data["host"]) == (part, "alpha")


async def test_it_sends_all_cards_in_one_frame(alice: User, card: Gpu) -> None:
    async with opened("/ws/system/gpus", alice) as socket:
        data = (await socket.receive_json_from(timeout=5))["data"]
    assert [shown["uuid"] for shown in data["gpus"]] == [card.uuid]
    assert data["aggregate"]["utilization_gpu_percent"] == 37.0


async def test_it_does_not_guess_among_hosts(alice: User, card: Gpu) -> None:
    beta = await Host.objects.acreate(name="beta")
    await Gpu.objects.acreate(uuid="GPU-2", host=beta, index=1, name="Twin")
    async with opened("/ws/", alice) as socket:
        assert (await ask(socket, "subscribe", "system/gpu/1"))["code"] == "unknown_channel"
        assert (await ask(socket, "subscribe", "system/gpu/beta/1"))["channel"] == "system/gpu/GPU-2"


# What is wrong is said, and the socket lives on ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("not json", "invalid_json"),
        ("[" * 4000, "invalid_json"),
        ("null", "unknown_action"),
        ("[]", "unknown_action"),
        ('{"action": "shout", "channel": "jobs"}', "unknown_action"),
        ('{"action": ["subscribe"]}', "unknown_action"),
        ('{"action": "subscribe"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": ["jobs"]}', "unknown_channel"),
        ('{"action": "unsubscribe", "channel": {"a": 1}}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "system/gpu/99"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "system/gpu/GPU-AbCd"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "system/gpu/\\u0661"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "system/gpu/-1"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "jobs/../../etc"}', "unknown_channel"),
        ('{"action": "subscribe", "channel": "frames"}', "unknown_channel"),
        (json.dumps({"action": "subscribe", "channel": "x" * 5000}), "message_too_large"),
        (json.dumps({"action": "subscribe", "channel": "a\0b"}), "unknown_channel"),
    ],
)
async def test_it_answers_nonsense_with_an_error(alice: User, card: Gpu, text: str, code: str) -> None:
    async with opened("/ws/", alice) as socket:
        await socket.send_to(text_data=text)
        answer = await socket.receive_json_from(timeout=5)
        assert (answer["event"], answer["code"]) == ("error", code)
        assert (await ask(socket, "subscribe", "system/gpus"))["event"] == "system:metrics"


async def test_it_answers_binary_messages_with_an_error(alice: User) -> None:
    async with opened("/ws/", alice) as socket:
        await socket.send_to(bytes_data=b"\x00\xff")
        assert (await socket.receive_json_from(timeout=5))["code"] == "invalid_json"


async def test_it_limits_the_sockets_of_one_user(alice: User, bob: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "SOCKETS_PER_USER", 1)
    async with opened("/ws/", alice), opened("/ws/", alice) as second, opened("/ws/", bob) as other:
        assert (await second.receive_json_from(timeout=5))["code"] == "too_many_sockets"
        assert (await second.receive_output(timeout=5))["code"] == 1013
        assert await other.receive_nothing()


async def test_it_forgets_sockets_that_closed(alice: User) -> None:
    async with opened("/ws/jobs/", alice):
        pass
    assert not hub.current().sockets[alice.pk]
    assert not hub.current()._readers


# Looking again ------------------------------------------------------------------------------------------


async def sign_out(user: User) -> None:
    from django.contrib.sessions.models import Session

    await Session.objects.all().adelete()


async def disable(user: User) -> None:
    await User.objects.filter(pk=user.pk).aupdate(is_active=False)


async def change_password(user: User) -> None:
    user.set_password("another one 77")
    await user.asave()


@pytest.mark.parametrize("what_happens", [sign_out, disable, change_password])
async def test_it_closes_when_the_sign_in_ends(
    alice: User, monkeypatch: pytest.MonkeyPatch, what_happens: Callable[[User], Any]
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_SECONDS", 0.2)
    async with opened("/ws/", alice) as socket:
        await asyncio.sleep(0.5)
        assert await socket.receive_nothing()
        await what_happens(alice)
        assert (await socket.receive_json_from(timeout=5))["code"] == "signed_out"
        assert (await socket.receive_output(timeout=5))["code"] == 4401


async def test_it_closes_when_the_token_is_revoked(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "RECHECK_SECONDS", 0.2)
    socket = WebsocketCommunicator(application, "/ws/", await token_headers(alice))
    assert (await socket.connect(timeout=5))[0]
    await alice.auth_token_set.all().adelete()
    assert (await socket.receive_json_from(timeout=5))["code"] == "signed_out"
    await socket.disconnect()

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
from django.db import OperationalError
from django.test import Client

from gpus.models import Gpu, Host
from jobs.models import Job
from mistudio.asgi import application
from monitor import consumers, hub, topics
from tests.monitor.conftest import session_cookie, token_for

pytestmark = pytest.mark.django_db(transaction=True)
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


async def test_it_subscribes_by_address_and_answers_with_a_snapshot(alice: User, card: Gpu) -> None:
    async with opened("/ws/system/gpu/1/", alice) as socket:
        first = await socket.receive_json_from(timeout=5)
    assert first["channel"] == f"system/gpu/{card.uuid}"
    assert (first["event"], first["seq"]) == ("system:metrics", 0)
    assert (first["data"]["metric_type"], first["data"]["host"]) == ("gpu", "alpha")
    assert first["data"]["utilization_gpu_percent"] == 37.0
    assert first["data"]["power_draw_watts"] is None


async def test_it_knows_a_card_by_all_its_names(alice: User, card: Gpu) -> None:
    for name in (f"{card.uuid}/", card.uuid.lower(), "alpha/1", "1"):
        async with opened(f"/ws/system/gpu/{name}", alice) as socket:
            assert (await socket.receive_json_from(timeout=5))["channel"] == f"system/gpu/{card.uuid}"


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


async def test_it_sends_the_host_readings(alice: User, host: Host) -> None:
    async with opened("/ws/", alice) as socket:
        for part in ("cpu", "memory", "disk", "network"):
            data = (await ask(socket, "subscribe", f"system/{part}"))["data"]
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


# Jobs ---------------------------------------------------------------------------------------------------


async def new_job(owner: User, **values: Any) -> Job:
    params, progress = {"secret": "recipe"}, {"done": 3, "message": "private words"}
    return await Job.objects.acreate(
        kind="sae_training", owner=owner, params=params, progress=progress, **values
    )


async def test_it_shows_a_job_to_its_owner_and_to_staff(alice: User, staff: User) -> None:
    job = await new_job(alice, name="mine")
    for user in (alice, staff):
        async with opened(f"/ws/jobs/{job.pk}/", user) as socket:
            first = await socket.receive_json_from(timeout=5)
        assert (first["channel"], first["event"]) == (f"jobs/{job.pk}", "job:changed")
        assert first["data"]["params"] == {"secret": "recipe"}


async def test_it_denies_that_a_strangers_job_exists(alice: User, bob: User) -> None:
    job = await new_job(alice)
    async with opened("/ws/", bob) as socket:
        for name in (f"jobs/{job.pk}", "jobs/00000000-0000-7000-8000-000000000000"):
            answer = await ask(socket, "subscribe", name)
            assert answer == {"event": "error", "code": "unknown_channel", "channel": name}
        await publish(frame(f"jobs/{job.pk}", "job:log", line="private"))
        assert await socket.receive_nothing(0.3)


async def test_it_lists_all_jobs_in_reduced_form(alice: User, bob: User) -> None:
    await new_job(alice, name="mine")
    async with opened("/ws/jobs", bob) as socket:
        data = (await socket.receive_json_from(timeout=5))["data"]
    assert (data["name"], data["owner"], data["progress"]["done"]) == ("mine", "alice", 3)
    assert (data["params"], data["result"], data["progress"]["message"]) == (None, None, None)


def test_it_reads_the_list_of_jobs_with_few_questions(
    alice: User, django_assert_max_num_queries: Any
) -> None:
    for number in range(10):
        Job.objects.create(kind="sae_training", owner=alice, name=str(number))
    with django_assert_max_num_queries(6):
        names = [sent["data"]["name"] for sent in topics.snapshot("jobs", alice)]
    assert names == [str(number) for number in range(10)]


async def test_it_stops_telling_staff_who_no_longer_are(
    alice: User, staff: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_SECONDS", 0.2)
    job = await new_job(alice)
    async with opened(f"/ws/jobs/{job.pk}/", staff) as socket:
        await socket.receive_json_from(timeout=5)
        await User.objects.filter(pk=staff.pk).aupdate(is_staff=False)
        assert (await socket.receive_json_from(timeout=5))["code"] == "unknown_channel"
        await publish(frame(f"jobs/{job.pk}", "job:log", line="private"))
        assert await socket.receive_nothing(0.3)


async def test_it_sends_what_happens_during_the_snapshot_after_it(
    alice: User, card: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow_snapshot(channel: str, user: User) -> list[dict[str, Any]]:
        await publish(frame(channel, "job:changed", seq=1))
        await asyncio.sleep(0.2)
        return [frame(channel, "job:changed", seq=0)]

    monkeypatch.setattr(consumers, "snapshot", slow_snapshot)
    async with opened("/ws/jobs/", alice) as socket:
        numbers = [(await socket.receive_json_from(timeout=5))["seq"] for _ in range(2)]
    assert numbers == [0, 1]


async def test_it_survives_a_database_that_is_away(
    alice: User, card: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> str:
        raise OperationalError("gone")

    async with opened("/ws/", alice) as socket:
        with monkeypatch.context() as patch:
            patch.setattr(consumers, "resolve", broken)
            assert (await ask(socket, "subscribe", "system/gpus"))["code"] == "unavailable"
        assert (await ask(socket, "subscribe", "system/gpus"))["event"] == "system:metrics"


# What is wrong is said, and the socket lives on ---------------------------------------------------------


NONSENSE = [
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
]


async def test_it_answers_nonsense_with_an_error_and_lives_on(alice: User, card: Gpu) -> None:
    async with opened("/ws/", alice) as socket:
        for text, code in NONSENSE:
            await socket.send_to(text_data=text)
            answer = await socket.receive_json_from(timeout=5)
            assert (answer["event"], answer["code"]) == ("error", code), text
        assert (await ask(socket, "subscribe", "system/gpus"))["event"] == "system:metrics"


async def test_it_answers_binary_messages_with_an_error(alice: User) -> None:
    async with opened("/ws/", alice) as socket:
        await socket.send_to(bytes_data=b"\x00\xff")
        assert (await socket.receive_json_from(timeout=5))["code"] == "invalid_json"


async def test_it_limits_the_sockets_of_one_user(
    alice: User, bob: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "SOCKETS_PER_USER", 1)
    async with opened("/ws/", alice), opened("/ws/", alice) as second, opened("/ws/", bob) as other:
        assert (await second.receive_json_from(timeout=5))["code"] == "too_many_sockets"
        assert (await second.receive_output(timeout=5))["code"] == 4429
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

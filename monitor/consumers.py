"""The WebSocket: who may come in, what they may hear, and what they hear first (contract, section 5)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError

from monitor import access, hub, topics
from monitor.flow import Send, Valve

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4096
MAX_CHANNELS = 300
SOCKETS_PER_USER = 20
RECHECK_SECONDS = 60.0
#: Of the range that applications may use: daphne refuses to send any other, such as 1013.
SIGNED_OUT, TRY_LATER = 4401, 4429

Receive = Callable[[], Awaitable[dict[str, Any]]]
look_up_visitor = database_sync_to_async(access.visitor)
resolve = database_sync_to_async(topics.resolve)
snapshot = database_sync_to_async(topics.snapshot)


async def websocket(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """The ASGI application behind `/ws/` and `/ws/<channel>/`."""
    await receive()  # websocket.connect
    try:
        visitor = await look_up_visitor(scope)
    except DatabaseError as error:
        log.warning("Could not look at the sign-in of a WebSocket: %s", error)
        visitor = None
    if visitor is None:
        await send({"type": "websocket.close"})  # before accept: HTTP 403
        return
    await send({"type": "websocket.accept"})
    await Socket(visitor, send).serve(receive, scope["url_route"]["kwargs"].get("channel"))


class Socket:
    def __init__(self, visitor: access.Visitor, send: Send) -> None:
        self.visitor, self.send = visitor, send
        self.hub, self.outbox, self.valve = hub.current(), hub.Outbox(), Valve(send)
        self.channels: set[str] = set()

    async def serve(self, receive: Receive, channel: str | None) -> None:
        open_sockets, user = self.hub.sockets, self.visitor.user.pk
        if open_sockets[user] >= SOCKETS_PER_USER:
            return await self.close(TRY_LATER, "too_many_sockets")
        open_sockets[user] += 1
        try:
            await self.hub.ready()
            await self.until_one_ends(self.read(receive, channel), self.write(), self.recheck())
        finally:
            open_sockets[user] -= 1
            for name in list(self.channels):
                self.forget(name)

    async def until_one_ends(self, *coroutines: Any) -> None:
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, receive: Receive, channel: str | None) -> None:
        if channel:
            await self.subscribe(channel)
        while (message := await receive())["type"] != "websocket.disconnect":
            await self.obey(message.get("text"))

    async def write(self) -> None:
        while True:
            await self.valve.wait()  # first: while we wait, newer frames replace older ones
            await self.send({"type": "websocket.send", "text": await self.outbox.get()})

    async def recheck(self) -> None:
        """Look again whether the session or token still is good, and whether each job still may be seen."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                user = await database_sync_to_async(self.visitor.credential.user)()
                if user is None:
                    return await self.close(SIGNED_OUT, "signed_out")
                self.visitor = access.Visitor(user, self.visitor.credential)
                await self.drop_hidden()
            except DatabaseError as error:
                log.warning("Could not look at a sign-in again: %s", error)

    async def drop_hidden(self) -> None:
        for channel in [name for name in self.channels if name.startswith("jobs/")]:
            try:
                await resolve(channel, self.visitor.user)
            except topics.UnknownChannel:
                self.forget(channel)
                self.error("unknown_channel", channel)

    async def obey(self, text: str | None) -> None:
        if text is not None and len(text.encode()) > MAX_MESSAGE_BYTES:
            return self.error("message_too_large")
        try:
            request = json.loads(text or "")
        except (ValueError, RecursionError):
            return self.error("invalid_json")
        request = request if isinstance(request, dict) else {}
        verb = {"subscribe": self.subscribe, "unsubscribe": self.unsubscribe}.get(str(request.get("action")))
        if verb is None:
            return self.error("unknown_action")
        await verb(request.get("channel"))

    async def subscribe(self, name: Any) -> None:
        try:
            channel = await resolve(name, self.visitor.user)
            if len(self.channels | {channel}) > MAX_CHANNELS:
                return self.error("too_many_channels", name)
            await self.listen(channel)
        except topics.UnknownChannel:
            self.error("unknown_channel", name)
        except DatabaseError:
            self.error("unavailable", name)

    async def listen(self, channel: str) -> None:
        """Subscribe, then read the rows: frames that come meanwhile follow the snapshot, none is missed."""
        self.outbox.hold(channel)
        self.channels.add(channel)
        self.hub.subscribe(channel, self.outbox)
        try:
            for frame in await snapshot(channel, self.visitor.user):
                self.outbox.queue(json.dumps(frame))
        finally:
            self.outbox.release(channel)

    async def unsubscribe(self, name: Any) -> None:
        try:
            channel = await resolve(name, self.visitor.user)
        except topics.UnknownChannel:
            channel = str(name)
        if channel not in self.channels:
            return self.error("unknown_channel", name)
        self.forget(channel)

    def forget(self, channel: str) -> None:
        self.channels.discard(channel)
        self.hub.unsubscribe(channel, self.outbox)

    def error(self, code: str, channel: Any = None) -> None:
        about = {"channel": channel} if isinstance(channel, str) else {}
        self.outbox.queue(json.dumps({"event": "error", "code": code, **about}))

    async def close(self, number: int, code: str) -> None:
        await self.send({"type": "websocket.send", "text": json.dumps({"event": "error", "code": code})})
        await self.send({"type": "websocket.close", "code": number})

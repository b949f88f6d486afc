"""`/mcp` and `/mcp/`: streamable HTTP for agents, without sessions. Each POST is a request of its own.

The door asks, in this order: is this our host, does a page of somebody else send it (DNS rebinding), who is it? Only a
token counts: a cookie would be sent by any page. Then the SDK reads the body.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from django.conf import settings
from django.db import Error as DatabaseError

from monitor import access
from monitor.flow import Send
from monitor.mcp.caller import Caller
from monitor.mcp.threads import in_thread

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
look_up = in_thread(access.token_of)


class Refusal(NamedTuple):
    status: int
    code: str
    detail: str
    header: tuple[bytes, bytes] | None = None


FOREIGN_HOST = Refusal(403, "foreign_host", "This is not the address of miStudio (MISTUDIO_PUBLIC_URL).")
FOREIGN_ORIGIN = Refusal(403, "foreign_origin", "A page of another site may not call tools here.")
PLAIN_HTTP = Refusal(403, "https_required", "Tokens travel over HTTPS only (MISTUDIO_TLS).")
NO_TOKEN = Refusal(
    401, "not_authenticated", "Send an API token: Authorization: Bearer …", (b"www-authenticate", b"Bearer")
)
BAD_TOKEN = Refusal(
    401,
    "authentication_failed",
    "The token is unknown, has expired or was revoked.",
    (b"www-authenticate", b'Bearer error="invalid_token"'),
)
ONLY_POST = Refusal(405, "method_not_allowed", "There are no sessions here: use POST.", (b"allow", b"POST"))
NO_DATABASE = Refusal(
    503,
    "database_unavailable",
    "The database does not answer; try again in a moment.",
    (b"retry-after", b"5"),
)


def is_ours(path: str) -> bool:
    return path in ("/mcp", "/mcp/")


async def door(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application behind `/mcp`."""
    headers = {name.lower(): value.decode("latin1") for name, value in scope["headers"]}
    found = foreign(scope, headers) or await who(headers)
    if isinstance(found, Caller) and scope["method"] != "POST":
        found = ONLY_POST
    if isinstance(found, Refusal):
        return await refuse(send, found)
    # Agents alone need the SDK; it is loaded beside the loop, which serves everybody else meanwhile.
    transport = await asyncio.to_thread(_transport)
    await transport.serve(found, headers, scope, receive, send)


def _transport() -> Any:
    from monitor.mcp import transport

    return transport


def foreign(scope: Scope, headers: dict[bytes, str]) -> Refusal | None:
    host, origin = headers.get(b"host", ""), headers.get(b"origin")
    if not access.host_allowed(host):
        return FOREIGN_HOST
    if origin is not None and not access.origin_allowed(origin, host):
        return FOREIGN_ORIGIN
    secure = "https" in (scope.get("scheme"), headers.get(b"x-forwarded-proto"))
    return PLAIN_HTTP if settings.MISTUDIO_TLS and not secure else None


async def who(headers: dict[bytes, str]) -> Caller | Refusal:
    if b"authorization" not in headers:
        return NO_TOKEN
    try:
        token = await look_up(headers[b"authorization"])
    except DatabaseError as error:
        log.warning("Could not look at the token of an agent: %s", error)
        return NO_DATABASE
    return Caller.of(token) if token else BAD_TOKEN


async def refuse(send: Send, refusal: Refusal) -> None:
    body = json.dumps({"code": refusal.code, "detail": refusal.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    headers += [(b"content-length", str(len(body)).encode())]
    headers += [refusal.header] if refusal.header else []
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""Who may come to `/mcp`: our host, no page of others, a good token. Through the real ASGI application."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.testing import HttpCommunicator
from django.contrib.auth.models import User

from mistudio.asgi import application
from monitor.mcp import http
from monitor.models import ToolCall
from tests.monitor.conftest import session_cookie, token_for

Headers = dict[str, str]
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
token_of, cookie_of = database_sync_to_async(token_for), database_sync_to_async(session_cookie)


async def ask(
    headers: Headers, method: str = "POST", path: str = "/mcp", body: Any = LIST, raw: bytes = b""
) -> dict[str, Any]:
    """Status, headers and JSON of the answer."""
    given = {"host": "testserver", "content-type": "application/json", "accept": "application/json"} | headers
    coded = [(name.encode(), value.encode("latin1")) for name, value in given.items()]
    sent = HttpCommunicator(application, method, path, raw or json.dumps(body).encode(), coded)
    answer = await sent.get_response(timeout=10)
    said = {name.decode().lower(): value.decode() for name, value in answer["headers"]}
    kind = said.get("content-type", "")
    return {
        "status": answer["status"],
        "headers": said,
        "body": json.loads(answer["body"]) if answer["body"] and "json" in kind else {},
    }


# Before anybody is looked up ----------------------------------------------------------------------------
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE", "OPTIONS", "PUT"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "foreign_host"),
        ({"host": "evil.example", "origin": "http://evil.example"}, "foreign_host"),
        ({"host": ""}, "foreign_host"),
        ({"host": "localhost.evil.example:8000"}, "foreign_host"),
        ({"origin": "http://evil.example"}, "foreign_origin"),
        ({"origin": "http://testserver:81"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"origin": ""}, "foreign_origin"),
        ({"origin": "http://[evil"}, "foreign_origin"),
    ],
)
async def test_a_foreign_host_or_page_is_turned_away(
    settings: Any, debug: bool, method: str, headers: Headers, code: str
) -> None:
    settings.DEBUG = debug
    answer = await ask({"authorization": "Bearer " + "0" * 64, **headers}, method)
    assert (answer["status"], answer["body"]["code"]) == (403, code)
    assert "access-control-allow-origin" not in answer["headers"]


@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
async def test_who_brings_no_token_is_asked_for_one(path: str) -> None:
    answer = await ask({}, path=path)
    assert (answer["status"], answer["headers"]["www-authenticate"]) == (401, "Bearer")


async def test_only_these_two_addresses_are_the_doors() -> None:
    assert [http.is_ours(path) for path in ("/mcp", "/mcp/", "/mcp/x", "/mcpx", "/", "//mcp")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


async def test_a_token_does_not_travel_in_the_clear(settings: Any) -> None:
    settings.MISTUDIO_TLS = True
    assert (await ask({}))["body"]["code"] == "https_required"
    assert (await ask({"x-forwarded-proto": "https"}))["status"] == 401


# Who it is ----------------------------------------------------------------------------------------------
@pytest.mark.django_db(transaction=True)
async def test_only_a_good_token_opens(alice: User) -> None:
    expired = await token_of(alice, "read", expiry=timedelta(seconds=-1))
    for value in ("Bearer x", f"Bearer {expired}", f"Bearer {'0' * 64}", "Basic YTpi", "Bearer \xff", ""):
        answer = await ask({"authorization": value})
        assert (answer["status"], answer["body"]["code"]) == (401, "authentication_failed"), value
        assert answer["headers"]["www-authenticate"] == 'Bearer error="invalid_token"'
    session = await ask({"cookie": await cookie_of(alice), "origin": "http://testserver"})
    assert session["status"] == 401
    good = await ask({"authorization": f"Bearer {await token_of(alice)}", "origin": "http://testserver"})
    assert good["status"] == 200


@pytest.mark.django_db(transaction=True)
async def test_a_token_sees_the_tools_of_its_scopes(alice: User) -> None:
    seen = {}
    for scope in ("read", "submit", "control"):
        answer = await ask({"authorization": f"Bearer {await token_of(alice, scope)}"}, path="/mcp/")
        seen[scope] = {tool["name"] for tool in answer["body"]["result"]["tools"]}
        read_only = {tool["annotations"]["readOnlyHint"] for tool in answer["body"]["result"]["tools"]}
        assert read_only == {scope == "read"}
    assert "get_job" in seen["read"]
    assert all(name.startswith("submit_") for name in seen["submit"])
    assert "cancel_job" in seen["control"]
    assert not seen["read"] & seen["submit"] | seen["read"] & seen["control"]


@pytest.mark.django_db(transaction=True)
async def test_it_follows_the_protocol(alice: User, settings: Any) -> None:
    me = {"authorization": f"Bearer {await token_of(alice)}"}
    for method in ("GET", "DELETE", "PUT", "HEAD"):
        answer = await ask(me, method)
        assert (answer["status"], answer["headers"]["allow"]) == (405, "POST")
    assert (await ask(me, raw=b"{"))["status"] == 400
    assert (await ask(me | {"content-type": "text/plain"}))["status"] == 400
    assert (await ask(me | {"accept": "text/html"}))["status"] == 406
    assert (await ask(me, body={"jsonrpc": "2.0", "method": "notifications/initialized"}))["status"] == 202
    unknown = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "rm", "arguments": {}}}
    assert (await ask(me, body=unknown))["body"]["error"]["code"] == -32602
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    assert (await ask(me, raw=b" " * 101))["status"] == 413
    row = await ToolCall.objects.aget()
    assert (row.tool, row.outcome, str(row.user_id)) == ("", "unknown_tool", str(alice.pk))
    assert row.token_id is not None

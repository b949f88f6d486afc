"""An agent: the SDK's own client, over HTTP or as the parent of `manage.py mcp`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.system import ROOT, System


@asynccontextmanager
async def over_http(
    system: System, token: str, mode: str = "auto", path: str = "/mcp"
) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{system.url}{path}", http_client=http)
        async with Client(transport, mode=mode) as client:  # type: ignore[arg-type]
            yield client


@asynccontextmanager
async def over_stdio(system: System, *options: str) -> AsyncIterator[Client]:
    command = [str(ROOT / "manage.py"), "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=command, env=system.env, cwd=str(ROOT))
    async with Client(server) as client:
        yield client


async def said(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a tool that succeeds."""
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer
    return answer.structured_content


async def refused(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The error envelope of a tool that does not."""
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error, answer
    return answer.structured_content

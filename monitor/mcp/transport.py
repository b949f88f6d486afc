"""The SDK's streamable HTTP for one request.

Its session manager wants a task group that lives from the start of the server to its end, and daphne tells
applications of neither. Without sessions nothing has to live on: each request brings a manager, and ends it.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from monitor.mcp.caller import Caller
from monitor.mcp.server import server_for


async def serve(
    caller: Caller, headers: dict[bytes, str], scope: dict[str, Any], receive: Any, send: Any
) -> None:
    manager = StreamableHTTPSessionManager(
        server_for(lambda: caller),
        stateless=True,
        # A stream where the client takes one: it alone can carry progress.
        json_response="text/event-stream" not in headers.get(b"accept", ""),
        max_request_body_size=settings.DATA_UPLOAD_MAX_MEMORY_SIZE,
    )
    async with manager.run():
        await manager.handle_request(scope, receive, send)

"""WebSocket addresses: `/ws/`, and `/ws/<channel>/` to hear one channel at once."""

from __future__ import annotations

from typing import Any

from channels.routing import URLRouter
from django.urls import re_path

from monitor.consumers import Receive, websocket
from monitor.flow import Send


async def refuse(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Any other address: closed before it is accepted (HTTP 403), instead of an exception in the log."""
    await receive()
    await send({"type": "websocket.close"})


websockets = URLRouter(
    [
        re_path(r"^ws(?:/(?P<channel>.*?))?/?$", websocket),  # type: ignore[arg-type]
        re_path(r"", refuse),  # type: ignore[arg-type]
    ]
)

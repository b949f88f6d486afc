"""Pages and REST through Django, `/ws/` and `/mcp` past it; served by daphne."""

from __future__ import annotations

import gc
import os
from functools import partialmethod
from typing import Any

from channels.routing import ProtocolTypeRouter
from daphne.http_protocol import WebRequest
from django.core.asgi import get_asgi_application
from django.urls import get_resolver

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")
pages = get_asgi_application()  # before anything that imports models

from monitor.mcp import http as mcp  # noqa: E402
from monitor.routing import websockets  # noqa: E402

# Twisted reads the fields of every form by itself, before anybody is asked who they are, and takes 12 bytes of memory
# for each of an upload (3.7 GB for 300 MiB: daphne 4.2.3, Twisted 26.10). Nobody uses what it finds.
WebRequest.__init__ = partialmethod(WebRequest.__init__, parsePOSTFormSubmission=False)


async def http(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await (mcp.door if mcp.is_ours(scope["path"]) else pages)(scope, receive, send)


application = ProtocolTypeRouter({"http": http, "websocket": websockets})

get_resolver().url_patterns  # noqa: B018  # what the first request would load
# What is here now stays: a full collection that looked through it again, 0.08 s, would hold up a page now and then.
gc.collect()
gc.freeze()

"""Back-pressure: wait while a client does not read.

daphne's `send` returns at once and lets its buffer grow without bound. Twisted tells a *push producer* when the
buffer is full and when it has drained; daphne gives each connection's `send` its protocol, which has the transport.
Under any other server `send` itself waits, and the valve stays open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Valve:
    def __init__(self, send: Send) -> None:
        self._open = asyncio.Event()
        self._open.set()
        protocol = next(iter(getattr(send, "args", ())), None)  # functools.partial(handle_reply, protocol)
        transport: Any = getattr(protocol, "transport", None)
        if hasattr(transport, "registerProducer"):
            transport.unregisterProducer()  # the HTTP channel that the connection began as
            transport.registerProducer(self, True)

    async def wait(self) -> None:
        await self._open.wait()

    # Twisted's IPushProducer
    def pauseProducing(self) -> None:
        self._open.clear()

    def resumeProducing(self) -> None:
        self._open.set()

    def stopProducing(self) -> None:
        self._open.set()

"""Where the synchronous part of a call runs: a pool of its own, so that agents who ask much hold up nobody else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from channels.db import database_sync_to_async

#: Calls wait for the database more than they compute.
POOL = ThreadPoolExecutor(8, thread_name_prefix="mcp")


def in_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which may ask the database, as a coroutine function."""
    return database_sync_to_async(function, thread_sensitive=False, executor=POOL)

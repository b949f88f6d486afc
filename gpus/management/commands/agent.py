"""`manage.py agent`: read this host's cards until told to stop. One per host and data folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from typing import IO, Any

import setproctitle
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db.backends.signals import connection_created

from gpus.agent import Agent


def relax_sqlite(connection: Any, **kwargs: Any) -> None:
    """A reading lost in a power cut is read again in two seconds; an fsync every two seconds is worth nothing."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA synchronous=NORMAL")


def go_first() -> None:
    """The beat holds on a machine that jobs keep busy, where we may ask for it (root, or CAP_SYS_NICE)."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)


class Command(BaseCommand):
    help = "Reads the cards of this host: readings to the database, frames to the pages."

    def handle(self, *args: Any, **options: Any) -> None:
        lock = self._lock()
        setproctitle.setproctitle("mistudio agent")
        connection_created.connect(relax_sqlite)
        go_first()
        asyncio.run(self._run())
        lock.close()

    def _lock(self) -> IO[str]:
        lock = open(settings.MISTUDIO_HOME / "run" / "agent.lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommandError("Another agent reads the cards for this data folder already.") from None
        return lock

    async def _run(self) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await Agent().run(stop)

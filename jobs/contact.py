"""Whether others may take a job over: the keeper's side of losing contact with the database.

On a single host nobody takes over while the processes live, and a keeper waits for its database as long as it takes.
Where there are more hosts, they take over what was silent for `TAKEOVER` times the fence (`jobs.takeover`), so a
keeper whose heartbeats do not arrive ends its work before.
"""

from __future__ import annotations

import time

from django.conf import settings
from django.db import connection

from gpus.models import Host
from gpus.timing import scaled

#: Of the fence: time enough for a work that is told to stop, and ended 30 s later.
TAKEOVER = 1.5


def fence_seconds() -> float:
    return scaled(settings.MISTUDIO_FENCE_SECONDS)


def boot_seconds() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Contact:
    """When the last heartbeat was written, and whether other hosts were there to read it."""

    def __init__(self) -> None:
        self.at = boot_seconds()
        self.others = others()

    def made(self, at: float, others: bool) -> None:
        """`at`: before the heartbeat was sent, so that nobody counts from an earlier moment."""
        self.at, self.others = at, others

    def lost(self) -> bool:
        return self.others and boot_seconds() - self.at > fence_seconds()


def silence(others: bool) -> float | None:
    """What a heartbeat writes for the others to count up from; nothing where nobody may take over."""
    return 0.0 if others else None


def others() -> bool:
    """Whether another host may take over: never on SQLite, which has one host."""
    return connection.vendor != "sqlite" and Host.objects.count() > 1

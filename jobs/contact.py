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

    def made(self, others: bool) -> None:
        self.at, self.others = boot_seconds(), others

    def lost(self) -> bool:
        return self.others and boot_seconds() - self.at > fence_seconds()


def others() -> bool:
    """Whether another host may take over: never on SQLite, which has one host."""
    return connection.vendor != "sqlite" and Host.objects.count() > 1

"""Taking turns on a host: two rounds of one kind at once would repair the same thing twice."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings


@contextmanager
def one_at_a_time(name: str) -> Iterator[bool]:
    """Whether no other round of this name is under way on this host."""
    with open(settings.MISTUDIO_HOME / "run" / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True

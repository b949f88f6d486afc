"""A database that is away for minutes stops no work: wait for it, and go on.

Only "away" is waited for (`OperationalError`, `InterfaceError`); an error of the data is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import InterfaceError, OperationalError, connections

from gpus.timing import scaled

logger = logging.getLogger(__name__)
AWAY = (OperationalError, InterfaceError)
T = TypeVar("T")


def quietly(act: Callable[[], T]) -> tuple[bool, T | None]:
    """Whether the database answered, and what the act returned."""
    try:
        return True, act()
    except AWAY as error:
        logger.warning("the database does not answer: %s", error)
        connections.close_all()
        return False, None


def patiently(act: Callable[[], T]) -> T:
    """The act's answer, however long the database is away."""
    while True:
        answered, answer = quietly(act)
        if answered:
            return answer  # type: ignore[return-value]
        time.sleep(scaled(1.0))

"""`manage.py doctor`: what this host has, what is wrong with it, and what repairs it. It changes nothing.

Each part looks at one thing and yields `Finding`s; nothing here raises, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: `ok`, a `note` that needs nobody, or `wrong`, with the repair."""

    word: Literal["ok", "note", "wrong"]
    says: str
    repair: str = ""


Part = Callable[[], Iterator[Finding]]


def ok(says: str) -> Finding:
    return Finding("ok", says)


def note(says: str, repair: str = "") -> Finding:
    return Finding("note", says, repair)


def wrong(says: str, repair: str) -> Finding:
    return Finding("wrong", says, repair)


def parts() -> dict[str, Part]:
    """By title, in the order in which a person would look."""
    from mistudio.doctor import cards, host, services

    return {
        "Data folder": host.data_folder,
        "Limits": host.limits,
        "Driver and cards": cards.cards,
        "PyTorch": cards.torch,
        "Database": services.database,
        "Broker": services.broker,
        "Processes": services.processes,
        "Messages": services.messages,
    }


def look(part: Part) -> list[Finding]:
    """All that a part finds; a part that breaks is itself a finding."""
    try:
        return list(part())
    except Exception as error:
        return [wrong(f"{type(error).__name__}: {error}", "This is a fault of the doctor: please report it.")]

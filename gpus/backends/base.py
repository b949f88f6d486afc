"""What a backend is: the only thing that knows how a card is asked. It runs inside a reader process."""

from __future__ import annotations

from typing import Protocol

from gpus.readings import CardInfo, CardReading, GpuProcess


class BackendUnavailable(Exception):
    """No card can be read at all: the reason, and what repairs it.

    `stale_library`: only a new process can find out whether that is over.
    """

    def __init__(self, reason: str, repair: str = "", stale_library: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.repair = repair
        self.stale_library = stale_library

    def __str__(self) -> str:
        return f"{self.reason} {self.repair}".strip()


class CardLost(Exception):
    """The driver says that this card is gone (fallen off the bus, removed, unknown)."""


class CardSilent(Exception):
    """This card does not say what it was asked; in words for people."""


class Backend(Protocol):
    unreadable: int  # cards that the last list counted, but could not open

    def list_cards(self) -> list[CardInfo]:
        """Every card of this host that can be opened, in PCI order. Raises `BackendUnavailable`."""

    def read(self, uuid: str) -> CardReading:
        """One sample. Raises `CardLost`, `CardSilent`."""

    def processes(self, uuid: str) -> list[GpuProcess]:
        """The processes that the card lists now. Raises `CardLost`, `CardSilent`."""

    def lookup(self, uuid: str) -> CardInfo | None:
        """The card of this UUID, if it is here."""

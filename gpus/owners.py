"""Who owns a process, and what holds a card. Only the floor above knows; it registers at start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict


class Owner(TypedDict):
    owner: str  # job | foreign | unknown | self
    job_id: str | None


class Hold(TypedDict):
    jobs: list[str]
    quarantined: bool


OwnerOf = Callable[[str, str, list[dict[str, Any]]], list[Owner]]
Holds = Callable[[], dict[str, Hold]]
NOTHING: Hold = {"jobs": [], "quarantined": False}


def _nobody(host: str, uuid: str, processes: list[dict[str, Any]]) -> list[Owner]:
    return [{"owner": "unknown", "job_id": None} for _ in processes]


_owner_of: OwnerOf = _nobody
_holds: Holds = dict


def register(owner_of: OwnerOf = _nobody, holds: Holds = dict) -> None:
    """Let `jobs` answer from now on; without arguments, back to "nobody knows"."""
    global _owner_of, _holds
    _owner_of, _holds = owner_of, holds


def owner_of(host: str, uuid: str, processes: list[dict[str, Any]]) -> list[Owner]:
    """One answer per process of this card, in the same order."""
    return _owner_of(host, uuid, processes) if processes else []


def holds() -> dict[str, Hold]:
    """Card by card, the jobs that hold it and whether it is quarantined; cards held by nothing may be absent."""
    return _holds()

"""The first line of the Monitor: what people come to ask, answered before they read on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpus.shapes import by_memory

Card = dict[str, Any]
#: Cards that are named; of a silent host its agent is.
TROUBLE = ("lost", "quarantined")
#: A line holds so many chips or jobs; the rest is counted.
CHIPS, JOBS = 8, 2


def context(cards: Sequence[Card], queue: dict[str, Any], silent: Sequence[str]) -> dict[str, Any]:
    free = [card["info"] for card in cards if card["state"]["text"] == "free"]
    outside = [
        process
        for card in cards
        for process in card["processes"]
        if process["owner"] in ("foreign", "unknown")
    ]
    return {
        "free": free[:CHIPS],
        "free_more": max(0, len(free) - CHIPS),
        "free_count": len(free),
        "hottest": hottest(cards),
        "next": queue["rows"][:JOBS],
        "next_more": max(0, len(queue["rows"]) - JOBS) + queue["more"],
        "outside": by_memory(outside)[:1],
        "outside_cards": list(dict.fromkeys(process["gpu_uuid"] for process in outside)),
        "outside_bytes": sum(process["memory_used_bytes"] or 0 for process in outside),
        "outside_more": max(0, len(outside) - 1),
        "trouble": [card for card in cards if card["info"]["health"] in TROUBLE],
        "unheard": any(card["info"]["health"] == "host_lost" for card in cards),
        "silent": silent,
    }


def hottest(cards: Sequence[Card]) -> dict[str, Any] | None:
    """The readings of the card that is hottest now; of cards that are read."""
    read = [
        card["metrics"]
        for card in cards
        if not card["metrics"]["stale"] and card["metrics"]["temperature_celsius"] is not None
    ]
    return max(read, key=lambda metrics: metrics["temperature_celsius"], default=None)

"""Make the Host and Gpu rows match what the agent saw. Rows are never deleted: a card that left is `removed`.

Events follow from the difference between row and sight, inside the transaction that writes it; so after any
outage the next write tells the same story, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from gpus.models import Gpu, GpuEvent, Host
from gpus.publish import publish
from gpus.readings import is_split, names_of
from gpus.sampling import Card
from gpus.shapes import iso

#: What only a card that was read can say.
READ = ("reading", "sampled_at", "last_seen_at", "processes", "processes_at")

#: Who writes down more about events in their transaction; floors above register here.
listeners: list[Callable[[list[GpuEvent]], None]] = []


@dataclass
class Sight:
    """What the agent of a host saw in one tick."""

    host: str
    boot_id: str
    reading: dict[str, Any] = field(default_factory=dict)
    backend_error: str = ""
    backend: str = "simulated"
    #: Whether `cards` are all there are; otherwise a missing one is only unseen.
    complete: bool = True
    cards: list[Card] = field(default_factory=list)


def record(sight: Sight) -> list[GpuEvent]:
    """Write one tick in one transaction, and publish what changed after it; returns the events."""
    with transaction.atomic():
        host = _write_host(sight)
        rows = {gpu.uuid: gpu for gpu in host.gpus.all()}
        visible = visible_uuids(sight.cards, sight.complete)
        events = [
            event for card in sight.cards for event in _write_card(host, card, rows, card.uuid in visible)
        ]
        events += [_remove(host, gpu) for gpu in rows.values() if _gone(gpu, sight)]
        GpuEvent.objects.bulk_create(events)
        for listen in listeners if events else ():
            listen(events)
        transaction.on_commit(partial(_publish, events))
    return events


def _write_host(sight: Sight) -> Host:
    values: dict[str, Any] = {
        "boot_id": sight.boot_id,
        "reading": sight.reading,
        "backend_error": sight.backend_error,
        "agent_seen_at": timezone.now(),
    }
    host, new = Host.objects.get_or_create(name=sight.host, defaults=values)
    if (
        not new
    ):  # `update_or_create` would lock the host against a grant that refers to it, and has one of its cards
        Host.objects.filter(pk=host.pk).update(**values)
    return host


def _write_card(host: Host, card: Card, rows: dict[str, Gpu], selectable: bool) -> list[GpuEvent]:
    row = rows.get(card.uuid) or Gpu.objects.filter(pk=card.uuid).first()
    now = timezone.now()
    values: dict[str, Any] = {
        "host": host,
        "index": card.index,
        "name": card.info["name"],
        "memory_total_bytes": card.info["memory_total_bytes"],
        "info": card.info,
        "reading": card.reading,
        "sampled_at": card.sampled_at,
        "last_seen_at": card.sampled_at,
        "processes": card.processes,
        "processes_at": card.processes_at,
        "error": card.error,
        "simulated": card.info["simulated"],
        "selectable": selectable,
        "removed_at": None,
        "lost_at": (row.lost_at if row and row.lost_at else now) if card.lost else None,
    }
    if row is None:
        Gpu.objects.create(uuid=card.uuid, **values)
    else:
        Gpu.objects.filter(pk=card.uuid).update(**_worth_writing(row, values))
    return [
        GpuEvent(host=host, uuid=card.uuid, event=what, detail=detail) for what, detail in _changes(row, card)
    ]


def _worth_writing(row: Gpu, values: dict[str, Any]) -> dict[str, Any]:
    """Most of a card stays the same from tick to tick. Before an agent has read it, its last readings stand."""
    kept = READ if values["sampled_at"] is None else ()
    new = {name: value for name, value in values.items() if name not in kept and getattr(row, name) != value}
    return new or {"index": values["index"]}


def _changes(row: Gpu | None, card: Card) -> list[tuple[str, str]]:
    if row is None or row.removed_at:
        added = [("added", card.info["name"])]
        return [*added, ("lost", card.error)] if card.lost else added
    if card.lost and not row.lost_at:
        return [("lost", card.error)]
    if row.lost_at and not card.lost:
        return [("recovered", card.info["name"])]
    return []


def _gone(gpu: Gpu, sight: Sight) -> bool:
    """Not listed any more; or simulated, where the host now has a real backend, even one that is away."""
    if gpu.removed_at or any(card.uuid == gpu.uuid for card in sight.cards):
        return False
    return sight.complete or (gpu.simulated and sight.backend != "simulated")


def _remove(host: Host, gpu: Gpu) -> GpuEvent:
    Gpu.objects.filter(pk=gpu.uuid, removed_at=None).update(removed_at=timezone.now(), lost_at=None)
    return GpuEvent(host=host, uuid=gpu.uuid, event="removed", detail=gpu.name)


def unseen(sight: Sight) -> list[dict[str, Any]]:
    """What is known of the cards of this host that should be in sight and are not."""
    seen = [card.uuid for card in sight.cards]
    rows = Gpu.objects.filter(host__name=sight.host, removed_at=None, simulated=sight.backend == "simulated")
    return [row.info | {"index": row.index} for row in rows.exclude(uuid__in=seen)]


def _publish(events: list[GpuEvent]) -> None:
    for event in events:
        data = {"uuid": event.uuid, "host": event.host.name, "detail": event.detail, "at": iso(event.at)}
        publish("system/gpus", f"gpu:{event.event}", data)


def visible_uuids(cards: list[Card], complete: bool = True) -> set[str]:
    """The cards that `MISTUDIO_VISIBLE_GPUS` lets jobs use: indexes, or UUIDs that may be shortened.

    As CUDA reads `CUDA_VISIBLE_DEVICES`: what follows an entry that names no card is ignored; unless cards are
    missing from the list, as the entry may name one of those. A card that is split stands for its instances,
    and is itself none that a job could use.
    """
    words = settings.MISTUDIO_VISIBLE_GPUS
    split = {card.uuid for card in cards if is_split(card.info)}
    if words is None:
        return {card.uuid for card in cards} - split
    visible: set[str] = set()
    for word in words:
        named = [card.uuid for card in cards if _names(word, card)]
        if len(named) == 1:
            visible.update(named)
        elif named or complete:
            break
    visible |= {card.uuid for card in cards if card.info.get("mig_parent") in visible}
    return visible - split


def _names(word: str, card: Card) -> bool:
    names = [name.casefold() for name in names_of(card.uuid, card.info)]
    return word == str(card.index) or (
        len(word) > 4 and any(name.startswith(word.casefold()) for name in names)
    )

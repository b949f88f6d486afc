"""Rows follow what the agent saw; nothing is deleted, and every change is told once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpus import inventory
from gpus.inventory import Sight, record
from gpus.models import Gpu, GpuEvent, Host
from gpus.sampling import Card

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    frames: list[tuple[str, str]] = []
    monkeypatch.setattr(
        inventory, "publish", lambda channel, event, data: frames.append((event, data["uuid"]))
    )
    return frames


def card(uuid: str, index: int = 0, **values: Any) -> Card:
    info = {
        "uuid": uuid,
        "index": index,
        "name": "Card",
        "memory_total_bytes": 10,
        "simulated": True,
        "pci_bus_id": "0",
    }
    now = datetime.now(UTC)
    return Card(
        **{"info": info, "reading": {"memory_used_bytes": 3}, "sampled_at": now, "processes_at": now} | values
    )


def sight(*cards: Card, **values: Any) -> Sight:
    return Sight(**{"host": "vm", "boot_id": "b", "cards": list(cards), "reading": {"cpu": 1}} | values)


def events() -> list[tuple[str, str]]:
    return [(event.event, event.uuid) for event in GpuEvent.objects.order_by("id")]


def test_it_adds_host_and_cards_and_tells_so(
    published: list[tuple[str, str]], django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        record(sight(card("a"), card("b", 1)))
    host = Host.objects.get()
    assert (host.name, host.boot_id, host.reading, host.agent_alive()) == ("vm", "b", {"cpu": 1}, True)
    gpu = Gpu.objects.get(pk="b")
    assert (gpu.index, gpu.memory_total_bytes, gpu.reading, gpu.health()[0]) == (
        1,
        10,
        {"memory_used_bytes": 3},
        "ok",
    )
    assert events() == published_words(published) == [("added", "a"), ("added", "b")]


def published_words(published: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(event.removeprefix("gpu:"), uuid) for event, uuid in published]


def test_it_tells_nothing_twice() -> None:
    record(sight(card("a")))
    record(sight(card("a")))
    assert events() == [("added", "a")]


def test_a_card_that_is_not_listed_any_more_is_removed_and_comes_back() -> None:
    record(sight(card("a"), card("b", 1)))
    record(sight(card("a")))
    removed = Gpu.objects.get(pk="b")
    assert removed.removed_at
    record(sight(card("a")))
    record(sight(card("a"), card("b", 1)))
    assert Gpu.objects.get(pk="b").removed_at is None
    assert [event for event, uuid in events() if uuid == "b"] == ["added", "removed", "added"]


def test_g03_a_card_swapped_in_its_slot_is_another_card() -> None:
    record(sight(card("a"), card("b", 1)))
    record(sight(card("a"), card("b2", 1)))
    assert events()[-2:] == [("added", "b2"), ("removed", "b")]
    assert Gpu.objects.get(pk="b").index == Gpu.objects.get(pk="b2").index == 1


def test_lost_and_recovered_are_told_with_their_reason() -> None:
    record(sight(card("a")))
    record(sight(card("a", lost=True, error="fell off the bus")))
    first = Gpu.objects.get()
    assert first.health() == ("lost", "fell off the bus")
    record(sight(card("a", lost=True, error="fell off the bus")))
    assert Gpu.objects.get().lost_at == first.lost_at
    record(sight(card("a")))
    assert Gpu.objects.get().lost_at is None
    assert [event for event, _ in events()] == ["added", "lost", "recovered"]


def test_no_card_is_removed_or_lost_while_the_driver_is_away() -> None:
    real = card("a")
    real.info["simulated"] = False
    record(sight(real))
    record(sight(backend_error="The driver changed.", complete=False, backend="nvml"))
    gpu = Gpu.objects.get()
    assert (gpu.removed_at, gpu.lost_at) == (None, None)
    assert Host.objects.get().backend_error == "The driver changed."


def test_simulated_cards_go_when_the_host_gets_a_real_backend() -> None:
    record(sight(card("a")))
    record(sight(backend_error="No driver.", complete=False, backend="auto"))
    assert Gpu.objects.get().removed_at


def test_it_leaves_what_staff_set() -> None:
    record(sight(card("a")))
    Gpu.objects.update(enabled=False, max_jobs=3, interactive_slots=2, note="noisy")
    record(sight(card("a")))
    gpu = Gpu.objects.get()
    assert (gpu.enabled, gpu.max_jobs, gpu.interactive_slots, gpu.note) == (False, 3, 2, "noisy")


def test_other_hosts_cards_are_not_its_business() -> None:
    record(sight(card("a"), host="one"))
    record(sight(card("b"), host="two"))
    assert not Gpu.objects.exclude(removed_at=None).exists()


def test_a_card_moves_with_its_uuid_to_another_host() -> None:
    record(sight(card("a"), host="one"))
    record(sight(card("a"), host="two"))
    record(sight(host="one"))
    gpu = Gpu.objects.get()
    assert (gpu.host.name, gpu.removed_at) == ("two", None)


def test_a_card_that_was_not_read_yet_keeps_its_last_readings() -> None:
    record(sight(card("a")))
    before = Gpu.objects.get()
    unread = card("a", reading={}, sampled_at=None, processes_at=None, lost=True, error="fell off the bus")
    record(sight(unread, complete=False))
    after = Gpu.objects.get()
    assert (after.reading, after.sampled_at) == (before.reading, before.sampled_at)
    assert after.health() == ("lost", "fell off the bus")


def test_the_cards_that_should_be_in_sight_and_are_not() -> None:
    record(sight(card("a"), card("b", 1), card("c", 2)))
    record(sight(card("a"), card("b", 1)))  # c is removed
    record(sight(card("x"), host="two"))
    seen = sight(card("a"), complete=False)
    assert [(info["uuid"], info["index"]) for info in inventory.unseen(seen)] == [("b", 1)]
    assert (
        inventory.unseen(sight(backend="nvml", complete=False)) == []
    )  # a simulated card is none of a driver's


@pytest.mark.parametrize(
    ("words", "visible"),
    [
        (None, ["GPU-aa11", "GPU-ab22", "GPU-cc33"]),
        ([], []),
        (["0", "2"], ["GPU-aa11", "GPU-cc33"]),
        (["GPU-ab22"], ["GPU-ab22"]),
        (["gpu-C"], ["GPU-cc33"]),
        (["GPU-a", "2"], []),  # names two cards: as for CUDA, this and what follows is ignored
        (["1", "9", "0"], ["GPU-ab22"]),
        (["-1"], []),
    ],
)
def test_jobs_may_use_the_cards_that_the_setting_lets_them(
    words: list[str] | None, visible: list[str], settings: Any
) -> None:
    settings.MISTUDIO_VISIBLE_GPUS = words
    record(sight(card("GPU-aa11", 0), card("GPU-ab22", 1), card("GPU-cc33", 2)))
    assert sorted(Gpu.objects.filter(selectable=True).values_list("uuid", flat=True)) == visible


def part(uuid: str, index: int, parent: str) -> Card:
    instance = card(uuid, index)
    instance.info |= {"mig_mode": True, "mig_parent": parent, "mig_place": f"{index}/0"}
    return instance


@pytest.mark.parametrize(
    ("words", "visible"),
    [
        (None, ["GPU-bb22", "MIG-c1", "MIG-c2"]),
        (["MIG-c2"], ["MIG-c2"]),
        (["mig-C1", "1"], ["GPU-bb22", "MIG-c1"]),
        (["0"], ["MIG-c1", "MIG-c2"]),  # a card that is split stands for its instances
        (["GPU-aa11"], ["MIG-c1", "MIG-c2"]),
        (["MIG-GPU-aa11/3/0"], ["MIG-c2"]),  # as drivers before 470 named it
        (["MIG-"], []),
    ],
)
def test_a_split_card_is_none_to_use_its_instances_are(
    words: list[str] | None, visible: list[str], settings: Any
) -> None:
    settings.MISTUDIO_VISIBLE_GPUS = words
    whole = card("GPU-aa11", 0)
    whole.info["mig_mode"] = True
    record(sight(whole, card("GPU-bb22", 1), part("MIG-c1", 2, "GPU-aa11"), part("MIG-c2", 3, "GPU-aa11")))
    assert sorted(Gpu.objects.filter(selectable=True).values_list("uuid", flat=True)) == visible


@pytest.mark.parametrize(("complete", "visible"), [(False, ["GPU-cc33"]), (True, [])])
def test_a_name_of_a_card_that_cannot_be_opened_ends_no_list(
    complete: bool, visible: list[str], settings: Any
) -> None:
    settings.MISTUDIO_VISIBLE_GPUS = ["1", "2"]
    record(sight(card("GPU-aa11", 0), card("GPU-cc33", 2), complete=complete))
    assert list(Gpu.objects.filter(selectable=True).values_list("uuid", flat=True)) == visible

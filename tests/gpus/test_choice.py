"""The `gpu` field: every row of the first table of the contract's section 2."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from gpus import backends, choice, owners
from gpus.models import Gpu
from gpus.rest import ApiError
from tests.gpus.conftest import MakeCard

pytestmark = pytest.mark.django_db
DRIVER_UUID = "GPU-13096139-7ada-8313-ee08-000dd8540fe1"
MIG_UUID = "MIG-3f2a51b8-58f6-5f5e-9fd6-2d2c1b8a1c07"


def parse(value: Any, max_gpus: int = 1, needs_card: bool = True) -> str:
    return choice.parse(value, max_gpus=max_gpus, needs_card=needs_card)


def refused(value: Any, max_gpus: int = 1, needs_card: bool = True) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(value, max_gpus, needs_card)
    assert caught.value.status_code == 400
    assert str(caught.value.detail)
    return caught.value


# Row 1: auto


@pytest.mark.parametrize("value", [None, "auto", "AUTO", "Auto", " auto ", "auto:1"])
def test_it_leaves_the_choice_to_the_start(value: Any, cards: list[Gpu]) -> None:
    assert parse(value) == "auto"


# Row 2: an index


@pytest.mark.parametrize("value", [0, "0", " 0 ", "vm/0"])
def test_it_turns_an_index_into_the_uuid(value: Any, cards: list[Gpu]) -> None:
    assert parse(value) == cards[0].uuid


def test_g01_index_1_is_the_second_card_in_pci_order_whatever_cuda_says(make_card: MakeCard) -> None:
    make_card(0, uuid="GPU-aaaaaaaa-0000-4000-8000-00000000000a", info={"pci_bus_id": "00000000:01:00.0"})
    second = make_card(
        1, uuid="GPU-bbbbbbbb-0000-4000-8000-00000000000b", info={"pci_bus_id": "00000000:81:00.0"}
    )
    request = parse(1)
    assert request == second.uuid
    assert choice.wanted(request) == [second.uuid]


def test_it_takes_the_index_of_the_present_card_where_a_removed_one_had_it(make_card: MakeCard) -> None:
    make_card(0, removed_at=timezone.now())
    present = make_card(0)
    assert parse(0) == present.uuid


# Row 3: a UUID


@pytest.mark.parametrize(
    "value",
    [
        DRIVER_UUID,
        DRIVER_UUID.upper(),
        f"  {DRIVER_UUID} ",
        f"  {DRIVER_UUID.upper()}  ",
        f"\t{DRIVER_UUID.lower()}\n",
    ],
)
def test_g08_it_stores_the_drivers_own_spelling_in_full(value: str, make_card: MakeCard) -> None:
    make_card(uuid=DRIVER_UUID)
    assert parse(value) == DRIVER_UUID
    assert choice.wanted(parse(value)) == [DRIVER_UUID]


@pytest.mark.parametrize("value", [MIG_UUID, MIG_UUID.upper()])
def test_it_takes_a_mig_instance_as_a_card(value: str, make_card: MakeCard) -> None:
    make_card(uuid=MIG_UUID, info={"mig_parent": DRIVER_UUID})
    assert parse(value) == MIG_UUID


def test_it_takes_the_old_spelling_of_a_mig_instance(make_card: MakeCard) -> None:
    old = f"MIG-{DRIVER_UUID}/1/0"
    make_card(uuid=old)
    assert parse(old) == old
    assert refused(f"MIG-{DRIVER_UUID}/2/0").code == "unknown_gpu"


# Row 4: several


def test_it_joins_a_list_in_the_order_given(cards: list[Gpu]) -> None:
    request = parse([2, cards[0].uuid.upper()], max_gpus=4)
    assert request == f"{cards[2].uuid},{cards[0].uuid}"
    assert choice.wanted(request) == [cards[2].uuid, cards[0].uuid]


def test_a_list_of_one_names_that_card_for_any_kind(cards: list[Gpu]) -> None:
    assert parse([1]) == cards[1].uuid


@pytest.mark.parametrize("value", ["auto:2", "AUTO:2"])
def test_it_keeps_how_many_cards_auto_may_choose(value: str, cards: list[Gpu]) -> None:
    assert parse(value, max_gpus=4) == "auto:2"
    assert choice.wanted("auto:2") == 2
    assert choice.wanted("auto") == 1


# Row 5: not valid

NOT_VALID: list[Any] = [
    True, False, -1, -(10**30), 1.0, 0.0, "", "  ", [], "0,1", {}, {"gpu": 0}, [[0]], [None], [True], ["auto"],
    [0, "auto"], [""],
    "auto:0", "auto:-1", "auto:", "auto:x", "auto:1.5", "cuda:0", "cuda", "-1", "+1", "01", "1.0", "1e0", "٠", "/0",
    "vm/", "vm/-1", "null", "0 1", "\x00", "0\x00", float("nan"), b"0", "GPU-", "GPU-13096139",
    DRIVER_UUID[:-1], DRIVER_UUID + "0", DRIVER_UUID.removeprefix("GPU-"),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_VALID, ids=repr)
def test_it_refuses_what_names_no_card(value: Any, make_card: MakeCard) -> None:
    make_card(0, uuid=DRIVER_UUID)
    make_card(1)
    assert refused(value, max_gpus=4).code == "invalid_gpu"


def test_it_refuses_a_list_that_names_a_card_twice(cards: list[Gpu]) -> None:
    for value in ([0, 0], [0, cards[0].uuid], [cards[1].uuid, cards[1].uuid.upper()], [0, "vm/0"]):
        assert refused(value, max_gpus=4).code == "invalid_gpu"


# Row 6: unknown


@pytest.mark.parametrize(
    "value", [3, "3", 10**30, "9" * 40, "vm/3", "elsewhere/0", DRIVER_UUID, MIG_UUID, [0, 3]], ids=repr
)
def test_it_lists_the_known_cards_when_it_knows_no_such_card(value: Any, cards: list[Gpu]) -> None:
    error = refused(value, max_gpus=4)
    assert error.code == "unknown_gpu"
    known = [{"gpu_id": c.index, "uuid": c.uuid, "name": c.name, "host": "vm"} for c in cards]
    assert error.extra["available"] == known
    assert all(card.uuid in str(error.detail) for card in cards)


def test_it_echoes_what_was_asked_for_but_no_novel(cards: list[Gpu]) -> None:
    assert refused(7).extra["gpu"] == 7
    assert len(refused("x" * 10_000).extra["gpu"]) < 300
    assert refused(float("inf")).extra["gpu"] is None  # JSON knows no such number


def test_it_refuses_more_cards_than_one_host_has(make_card: MakeCard) -> None:
    for index in range(2):
        make_card(index, host="a")
        make_card(index, host="b")
    assert parse("auto:2", max_gpus=8) == "auto:2"
    assert refused("auto:3", max_gpus=8).code == "unknown_gpu"
    assert refused("auto:99999999999999999999", max_gpus=10**9).code == "unknown_gpu"


# Row 7: an index with several hosts


@pytest.mark.parametrize("value", [0, "0", [0]])
def test_it_asks_which_host_an_index_means(value: Any, make_card: MakeCard) -> None:
    here, there = make_card(0, host="a"), make_card(0, host="b")
    error = refused(value)
    assert error.code == "ambiguous_gpu"
    assert {card["uuid"] for card in error.extra["available"]} == {here.uuid, there.uuid}
    assert parse("b/0") == there.uuid


def test_a_host_without_cards_makes_no_index_ambiguous(make_card: MakeCard, make_host: Any) -> None:
    make_host("worker-only")
    card = make_card(0)
    assert parse(0) == card.uuid


def test_it_refuses_cards_of_two_hosts_for_one_job(make_card: MakeCard) -> None:
    make_card(0, host="a"), make_card(0, host="b")
    assert refused(["a/0", "b/0"], max_gpus=4).code == "invalid_gpu"


# Row 8: known but not available


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lost_at": timezone.now()}, "lost"),
        ({"removed_at": timezone.now()}, "removed"),
        ({"enabled": False}, "disabled"),
        ({"selectable": False}, "not_selectable"),
        ({"info": {"mig_mode": True}}, "mig_parent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_refuses_a_card_that_cannot_take_a_job(
    values: dict[str, Any], reason: str, make_card: MakeCard
) -> None:
    make_card(1)
    card = make_card(0, **values)
    error = refused(card.uuid)
    assert (error.code, error.extra["reason"]) == ("gpu_not_available", reason)
    assert card.uuid in str(error.detail)


def test_it_takes_an_instance_by_either_of_its_names(make_card: MakeCard) -> None:
    whole = make_card(0, info={"mig_mode": True})
    part = make_card(
        1,
        uuid="MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        info={"mig_mode": True, "mig_parent": whole.uuid, "mig_place": "1/0"},
    )
    assert parse(part.uuid.upper()) == parse(f"MIG-{whole.uuid}/1/0") == part.uuid
    assert refused(f"MIG-{whole.uuid}/2/0").code == "unknown_gpu"
    assert refused(whole.uuid).extra["reason"] == "mig_parent"


def test_it_refuses_a_quarantined_card(cards: list[Gpu]) -> None:
    owners.register(holds=lambda: {cards[0].uuid: {"jobs": ["j"], "quarantined": True}})
    assert refused(0).extra["reason"] == "quarantined"
    assert parse(1) == cards[1].uuid


def test_a_card_that_is_only_busy_stale_or_silent_is_accepted_and_waits(make_card: MakeCard) -> None:
    card = make_card(0, sampled_at=None)
    card.host.agent_seen_at = None
    card.host.save()
    owners.register(holds=lambda: {card.uuid: {"jobs": ["j"], "quarantined": False}})
    assert parse(0) == card.uuid


# Row 9: too many


@pytest.mark.parametrize("value", [[0, 1], "auto:2"])
def test_it_refuses_several_cards_for_a_kind_that_uses_one(value: Any, cards: list[Gpu]) -> None:
    error = refused(value)
    assert error.code == "too_many_gpus"
    assert error.extra["max_gpus"] == 1


def test_it_refuses_several_mig_instances_and_mig_beside_cards(make_card: MakeCard) -> None:
    make_card(0, uuid=MIG_UUID), make_card(1, uuid=MIG_UUID.replace("3f", "4f")), make_card(2)
    assert refused([0, 1], max_gpus=4).code == "too_many_gpus"
    assert refused([0, 2], max_gpus=4).code == "too_many_gpus"


# Jobs without a card, machines without cards


def test_a_job_without_a_card_has_its_gpu_checked_and_stored_all_the_same(cards: list[Gpu]) -> None:
    assert parse(1, needs_card=False) == cards[1].uuid
    assert parse(None, needs_card=False) == "auto"
    assert refused("cuda:0", needs_card=False).code == "invalid_gpu"
    assert refused(9, max_gpus=0, needs_card=False).code == "unknown_gpu"


@pytest.fixture
def bare(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without driver, with `auto`."""
    settings.MISTUDIO_GPU_BACKEND, settings.MISTUDIO_ALLOW_CPU = "auto", True
    monkeypatch.setattr(choice, "driver_present", lambda: False)
    return settings


def test_it_uses_the_cpu_where_no_card_ever_was(bare: Any) -> None:
    assert choice.cpu_allowed()
    assert parse(None) == "auto"
    assert refused(0).code == "unknown_gpu"


def test_it_refuses_where_there_is_no_driver_and_no_cpu(bare: Any) -> None:
    bare.MISTUDIO_ALLOW_CPU = False
    error = refused("auto")
    assert error.code == "driver_unavailable"
    assert "MISTUDIO_ALLOW_CPU" in error.extra["hint"]
    assert parse("auto", needs_card=False) == "auto"


def test_it_never_uses_the_cpu_where_a_card_is_or_a_real_one_was(bare: Any, make_card: MakeCard) -> None:
    card = make_card(0)
    assert not choice.cpu_allowed()
    Gpu.objects.filter(pk=card.pk).update(removed_at=timezone.now())
    assert choice.cpu_allowed()
    Gpu.objects.filter(pk=card.pk).update(simulated=False)
    assert not choice.cpu_allowed()
    assert parse("auto") == "auto"  # it may come back


def test_it_never_uses_the_cpu_where_there_is_a_driver(bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "driver_present", lambda: True)
    assert not choice.cpu_allowed()
    assert parse("auto") == "auto"


def test_it_waits_for_simulated_cards_that_the_agent_has_not_seen_yet(bare: Any) -> None:
    bare.MISTUDIO_GPU_BACKEND = "simulated"
    assert not choice.cpu_allowed()
    assert parse("auto") == "auto"


def test_a_broken_driver_lets_auto_wait_and_refuses_a_named_card(make_card: MakeCard) -> None:
    card = make_card(0, simulated=False)
    card.host.backend_error = "The driver changed; reboot."
    card.host.save()
    assert parse("auto") == "auto"
    error = refused(0)
    assert (error.code, str(error.detail)) == ("driver_unavailable", "The driver changed; reboot.")


def test_driver_presence_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.driver_present is backends.driver_present

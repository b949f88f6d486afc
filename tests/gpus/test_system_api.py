"""REST `system/*`: every card or the one that is named, and never another one."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import get_resolver
from django.utils import timezone
from rest_framework.test import APIClient

from gpus import owners
from gpus.models import Gpu, GpuEvent
from gpus.rest import NoLogin
from tests.gpus.conftest import MakeCard

pytestmark = pytest.mark.django_db
LISTS = ["gpu-list", "gpu-info", "gpu-metrics", "gpu-processes"]


def get(client: APIClient, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
    response = client.get(path, query)
    assert response.status_code == status, response.content
    return response.json()


@pytest.mark.parametrize("name", [*LISTS, "all"])
@pytest.mark.parametrize("prefix", ["/api/v1/system", "/system"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_it_answers_with_and_without_slash_and_at_the_seeds_addresses(
    name: str, prefix: str, slash: str, as_alice: APIClient, cards: list[Gpu]
) -> None:
    body = get(as_alice, f"{prefix}/{name}{slash}")
    assert body["gpu_count"] == 3
    assert [card["uuid"] for card in body["gpus"]] == [card.uuid for card in cards]


@pytest.mark.parametrize("name", [*LISTS, "all"])
def test_it_answers_for_the_card_that_is_named(name: str, as_alice: APIClient, cards: list[Gpu]) -> None:
    for gpu_id in ("1", cards[1].uuid, cards[1].uuid.upper(), f" {cards[1].uuid} ", "vm/1"):
        body = get(as_alice, f"/api/v1/system/{name}", gpu_id=gpu_id)
        assert [card["uuid"] for card in body["gpus"]] == [cards[1].uuid]


@pytest.mark.parametrize("name", [*LISTS, "all"])
@pytest.mark.parametrize(
    ("gpu_id", "code"),
    [("3", "unknown_gpu"), ("99999999999999999999", "unknown_gpu"), ("-1", "invalid_gpu"), ("", "invalid_gpu"),
     ("x", "invalid_gpu"), ("0,1", "invalid_gpu"), ("1.0", "invalid_gpu"), ("auto", "invalid_gpu")],
)  # fmt: skip
def test_it_never_falls_back_to_another_card(
    name: str, gpu_id: str, code: str, as_alice: APIClient, cards: list[Gpu]
) -> None:
    body = get(as_alice, f"/api/v1/system/{name}", 400, gpu_id=gpu_id)
    assert body["code"] == code
    if code == "unknown_gpu":
        assert [card["uuid"] for card in body["available"]] == [card.uuid for card in cards]


def test_it_keeps_to_the_host_that_is_named(as_alice: APIClient, make_card: MakeCard) -> None:
    make_card(0, host="a")
    there = make_card(0, host="b")
    body = get(as_alice, "/api/v1/system/gpu-list", host="b")
    assert [card["uuid"] for card in body["gpus"]] == [there.uuid]
    assert get(as_alice, "/api/v1/system/gpu-list", host="b", gpu_id="0")["gpus"][0]["uuid"] == there.uuid
    assert get(as_alice, "/api/v1/system/gpu-list", 400, gpu_id="0")["code"] == "ambiguous_gpu"
    assert get(as_alice, "/api/v1/system/all", host="b")["hosts"][0]["host"] == "b"
    unknown = get(as_alice, "/api/v1/system/gpu-list", 400, host="c")
    assert (unknown["code"], unknown["available"]) == ("unknown_host", ["a", "b"])


def test_a_removed_card_is_shown_only_when_it_is_named(as_alice: APIClient, make_card: MakeCard) -> None:
    gone = make_card(0, removed_at=timezone.now())
    assert get(as_alice, "/api/v1/system/all")["gpus"] == []
    (card,) = get(as_alice, "/api/v1/system/all", gpu_id=gone.uuid)["gpus"]
    assert card["info"]["health"] == "removed"


def test_it_shows_owners_and_sorts_processes_by_memory(as_alice: APIClient, make_card: MakeCard) -> None:
    listed = [
        {"pid": 7, "type": "compute", "memory_used_bytes": None},
        {"pid": 8, "type": "compute", "memory_used_bytes": 5},
    ]
    card = make_card(processes=listed, processes_at=timezone.now())
    job = {"owner": "job", "job_id": "j"}
    owners.register(
        owner_of=lambda host, uuid, processes: [{"owner": "foreign", "job_id": None}, job],  # type: ignore[list-item]
        holds=lambda: {card.uuid: {"jobs": ["j"], "quarantined": True}},
    )
    (shown,) = get(as_alice, "/api/v1/system/gpu-processes")["gpus"]
    assert shown["process_count"] == 2
    assert [(p["pid"], p["owner"], p["job_id"]) for p in shown["processes"]] == [
        (8, "job", "j"),
        (7, "foreign", None),
    ]
    assert shown["processes"][0]["gpu_uuid"] == card.uuid
    info = get(as_alice, "/api/v1/system/gpu-list")["gpus"][0]
    assert (info["jobs"], info["health"]) == (["j"], "quarantined")


def test_all_has_an_error_for_one_card_and_the_readings_of_the_others(
    as_alice: APIClient, make_card: MakeCard
) -> None:
    make_card(0)
    make_card(1, error="The driver did not answer.", sampled_at=None)
    body = get(as_alice, "/api/v1/system/all")
    first, second = body["gpus"]
    assert (first["error"], second["error"]) == (None, "The driver did not answer.")
    assert first["metrics"]["memory_used_bytes"] == 2**30
    assert second["metrics"] is None
    assert (body["aggregate"]["gpu_count"], body["aggregate"]["readable_count"]) == (2, 1)
    assert body["aggregate"]["memory_used_bytes"] == 2**30


def test_all_shows_the_hosts(as_alice: APIClient, make_host: Any) -> None:
    host = make_host("vm")
    host.reading = {"sampled_at": "2026-01-01T00:00:00Z", "cpu": {"percent": 5.0}}
    host.backend_error = "No driver."
    host.save()
    body = get(as_alice, "/api/v1/system/all")
    assert (body["gpu_available"], body["gpu_count"], body["gpus"]) == (False, 0, [])
    (shown,) = body["hosts"]
    assert (shown["host"], shown["agent_alive"], shown["cpu"], shown["memory"]) == (
        "vm",
        True,
        {"percent": 5.0},
        None,
    )
    assert shown["backend_error"] == "No driver."


@pytest.mark.parametrize("count", [1, 8, 64])
def test_it_asks_the_database_as_often_for_many_cards_as_for_one(
    count: int, as_alice: APIClient, make_card: MakeCard, django_assert_max_num_queries: Any
) -> None:
    for index in range(count):
        make_card(index)
    with django_assert_max_num_queries(5):
        assert get(as_alice, "/api/v1/system/all")["gpu_count"] == count


def test_strangers_see_health_and_nothing_else(cards: list[Gpu]) -> None:
    stranger = APIClient()
    open_views = []
    for pattern in get_resolver("gpus.urls").url_patterns:
        view = pattern.callback.view_class  # type: ignore[union-attr]
        if issubclass(view, NoLogin):
            open_views.append(view.__name__)
            continue
        path = "/api/v1/" + str(pattern.pattern).removeprefix("^").split("/?$")[0].split("(")[0]
        assert stranger.get(path if "gpus/" not in path else path + cards[0].uuid).status_code in (401, 403)
    assert open_views == ["HealthView"]


# Events, and what staff may set


def test_events_come_newest_first_in_pages(as_alice: APIClient, make_card: MakeCard) -> None:
    card = make_card()
    for event in ("added", "lost", "recovered"):
        GpuEvent.objects.create(host=card.host, uuid=card.uuid, event=event)
    body = get(as_alice, "/api/v1/system/events")
    assert (body["count"], body["next"]) == (3, None)
    assert [event["event"] for event in body["results"]] == ["recovered", "lost", "added"]
    assert body["results"][0]["host"] == "vm"
    assert get(as_alice, "/api/v1/system/events", event="lost")["count"] == 1


def test_staff_set_what_a_card_takes(as_staff: APIClient, make_card: MakeCard) -> None:
    card = make_card()
    values = {"enabled": False, "max_jobs": 2, "interactive_slots": 0, "note": "hot"}
    response = as_staff.patch(f"/api/v1/system/gpus/{card.uuid.upper()}/", values)
    assert response.status_code == 200
    shown = response.json()
    assert (shown["enabled"], shown["max_jobs"], shown["interactive_slots"]) == (False, 2, 0)
    assert shown["health"] == "disabled"
    card.refresh_from_db()
    assert (card.enabled, card.max_jobs, card.interactive_slots, card.note) == (False, 2, 0, "hot")
    event = GpuEvent.objects.get()
    assert event.event == "changed"
    assert "max_jobs = 2" in event.detail
    assert "staff" in event.detail


@pytest.mark.parametrize(
    "values",
    [{"max_jobs": 0}, {"max_jobs": -1}, {"max_jobs": "many"}, {"max_jobs": 10**30}, {"enabled": None},
     {"note": "x" * 201}, {"uuid": "GPU-x"}, {"name": "other"}, {"interactive_slots": -1}, {"nonsense": 1}, [], "x"],
    ids=str,
)  # fmt: skip
def test_odd_settings_are_a_400_with_their_field(
    values: Any, as_staff: APIClient, make_card: MakeCard
) -> None:
    card = make_card()
    response = as_staff.patch(f"/api/v1/system/gpus/{card.uuid}", values)
    assert (response.status_code, response.json()["code"]) == (400, "invalid")
    assert response.json()["errors"]
    assert not GpuEvent.objects.exists()


def test_others_may_not_set_anything(as_alice: APIClient, make_card: MakeCard) -> None:
    card = make_card()
    assert as_alice.patch(f"/api/v1/system/gpus/{card.uuid}", {"enabled": False}).status_code == 403
    assert Gpu.objects.get().enabled


def test_an_unknown_card_is_not_found(as_staff: APIClient, cards: list[Gpu]) -> None:
    response = as_staff.patch("/api/v1/system/gpus/GPU-nothing/", {"enabled": False})
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


def test_the_schema_lists_the_slash_form_once_and_says_what_may_be_null(as_staff: APIClient) -> None:
    schema = as_staff.get("/api/schema/?format=json").json()
    paths = [path for path in schema["paths"] if "/system/" in path]
    assert "/api/v1/system/gpu-metrics/" in paths
    assert all(path.startswith("/api/v1/") and path.endswith("/") for path in paths)
    content = schema["paths"]["/api/v1/system/all/"]["get"]["responses"]["200"]["content"]["application/json"]
    card = content["schema"]["properties"]["gpus"]["items"]["properties"]
    assert card["metrics"]["nullable"]
    assert card["metrics"]["properties"]["fan_percent"]["nullable"]

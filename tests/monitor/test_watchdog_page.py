"""The watchdog's page and its route: what was found, what was done, what came back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from gpus.models import Gpu
from jobs.models import Attempt, Status, WatchdogEvent
from monitor.signin import BACKEND
from tests.conftest import client_of
from tests.jobs.test_states import make_job
from tests.monitor.test_pages import page_of, text_of

pytestmark = pytest.mark.django_db
Finding, State = WatchdogEvent.Finding, WatchdogEvent.State
GIB = 2**30
ROUTE = "/api/v1/system/watchdog-events"


@pytest.fixture
def event(alice: User, three_cards: list[Gpu]) -> Any:
    job = make_job(alice, name="left it", status=Status.SUCCEEDED)
    attempt = Attempt.objects.create(job=job, number=1, host=three_cards[1].host)

    def make(finding: str = Finding.LEFTOVER, state: str = State.FOUND, **fields: Any) -> WatchdogEvent:
        ours = {"attempt": attempt, "proof": "token"} if finding == Finding.LEFTOVER else {}
        process = (
            {"pid": 4242, "start_ticks": 99, "name": "python", "user": "ana"}
            if finding != Finding.GHOST
            else {}
        )
        return WatchdogEvent.objects.create(
            **{"host": three_cards[1].host, "gpu_uuid": three_cards[1].uuid, "finding": finding, "state": state}
            | ours | process | fields
        )  # fmt: skip

    return make


def ended(event: Any, **fields: Any) -> WatchdogEvent:
    now = timezone.now()
    done = {"term_at": now, "closed_at": now, "outcome": "Ended by SIGTERM."}
    return event(
        state=State.GONE, **done | {"memory_before_bytes": 3 * GIB, "memory_after_bytes": 0} | fields
    )


def shown(user: User, query: str = "") -> str:
    return text_of(page_of(user, f"/health/watchdog/{query}"))


def test_nothing_was_found(bob: User, three_cards: list[Gpu]) -> None:
    assert "Nothing was found that ended jobs left." in shown(bob)
    assert "Nothing of ended jobs is left on any card." in text_of(page_of(bob, "/health/"))


def test_it_says_what_was_found_what_was_done_and_what_came_back(bob: User, event: Any) -> None:
    ended(event)
    event(due_at=timezone.now() + timedelta(seconds=42.5), memory_before_bytes=GIB)
    event(state=State.FAILED, outcome="Still there after SIGKILL (state D).")
    event(finding=Finding.GHOST, state=State.REPORTED, memory_before_bytes=10 * GIB)
    text = shown(bob)
    assert "last 24 h: 1 process ended, 3.0 GiB came back" in text
    assert "left by a job python pid 4242, ana left it" in text
    assert "3.0 GiB 3.0 GiB back ended Ended by SIGTERM." in text
    assert "SIGTERM in 42 s" in text
    assert "1 stuck" in text and "Still there after SIGKILL (state D)." in text
    assert "ghost" in text and "10.0 GiB told" in text
    assert "None" not in text


def test_processes_of_others_are_shown_when_asked_for(bob: User, event: Any) -> None:
    event(finding=Finding.FOREIGN, state=State.REPORTED, name="Xorg")
    assert "Xorg" not in shown(bob)
    assert "not ours Xorg pid 4242, ana" in shown(bob, "?show=all")


def test_older_ones_are_on_the_next_page(bob: User, event: Any) -> None:
    for number in range(52):
        event(name=f"p{number:02}", found_at=timezone.now() - timedelta(minutes=number))
    assert "p49" in shown(bob) and "p50" not in shown(bob)
    assert "from=50" in page_of(bob, "/health/watchdog/")
    assert "p51" in shown(bob, "?from=50")
    assert "p00" in shown(bob, "?from=nonsense&show=nonsense%00")


def test_the_health_page_shows_what_is_there_now(bob: User, event: Any) -> None:
    ended(event, name="was-here")
    event(name="is-here")
    text = text_of(page_of(bob, "/health/"))
    assert "is-here" in text and "was-here" not in text
    assert 'href="/health/watchdog/"' in page_of(bob, "/health/")


def test_report_mode_is_said(bob: User, event: Any, settings: Any) -> None:
    settings.MISTUDIO_WATCHDOG = "report"
    event(state=State.REPORTED)
    assert "tells only" in shown(bob) and "told only" in shown(bob)


# The route ----------------------------------------------------------------------------------------------


def test_the_route_gives_every_field(bob: User, event: Any) -> None:
    row = ended(event)
    answer = client_of(bob).get(ROUTE)
    assert answer.status_code == 200
    assert (answer.data["count"], answer.data["next"]) == (1, None)
    shape = answer.json()["results"][0]
    assert shape["job_id"] == str(row.attempt.job_id)
    told = (
        "host",
        "finding",
        "state",
        "attempt",
        "pid",
        "start_ticks",
        "name",
        "user",
        "freed_bytes",
        "proof",
    )
    assert [shape[name] for name in told] == [
        "alpha", "leftover", "gone", 1, 4242, 99, "python", "ana", 3 * GIB, "token"
    ]  # fmt: skip
    assert shape["due_at"] is None and shape["kill_at"] is None and shape["term_at"].endswith("Z")


def test_what_is_not_known_is_null(bob: User, event: Any) -> None:
    event(finding=Finding.GHOST, state=State.REPORTED)
    shape = client_of(bob).get(ROUTE + "/").json()["results"][0]
    unknown = (
        "job_id",
        "attempt",
        "pid",
        "start_ticks",
        "memory_before_bytes",
        "memory_after_bytes",
        "freed_bytes",
    )
    assert [shape[name] for name in unknown] == [None] * len(unknown)


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("finding=leftover", 2), ("finding=ghost", 1), ("state=gone", 1), ("state=found", 2), ("pid=4242", 2),
        ("pid=1", 0), ("open=true", 2), ("open=false", 1), ("host=alpha", 3), ("host=beta", 0), ("page_size=1", 3),
    ],
)  # fmt: skip
def test_the_route_filters(bob: User, event: Any, query: str, count: int) -> None:
    ended(event), event(), event(finding=Finding.GHOST)
    assert client_of(bob).get(f"{ROUTE}?{query}").data["count"] == count


def test_the_route_filters_by_card_and_job(bob: User, event: Any) -> None:
    row = event()
    client = client_of(bob)
    for query, count in (
        (f"gpu_uuid={row.gpu_uuid}", 1), ("gpu_uuid=GPU-other", 0), (f"job_id={row.attempt.job_id}", 1),
        ("job_id=0190b3a8-0000-7000-8000-000000000000", 0),
    ):  # fmt: skip
        assert client.get(f"{ROUTE}?{query}").data["count"] == count


@pytest.mark.parametrize(
    "query", ["finding=zombie", "state=x", "pid=one", "pid=99999999999999999999", "job_id=1", "open=%00"]
)
def test_the_route_refuses_what_it_does_not_understand(bob: User, event: Any, query: str) -> None:
    event()
    answer = client_of(bob).get(f"{ROUTE}?{query}")
    assert answer.status_code in (200, 400), answer.content
    if answer.status_code == 400:
        assert set(answer.json()) >= {"code", "detail"}
    else:
        assert query in ("open=%00", "pid=99999999999999999999")


def test_the_admin_shows_rows_and_changes_none(event: Any) -> None:
    row = ended(event)
    client = Client()
    client.force_login(User.objects.create_superuser("root"), backend=BACKEND)
    assert client.get("/admin/jobs/watchdogevent/").status_code == 200
    assert client.get(f"/admin/jobs/watchdogevent/{row.pk}/change/").status_code == 200
    for page in ("add/", f"{row.pk}/delete/"):
        assert client.post(f"/admin/jobs/watchdogevent/{page}", {"post": "yes"}).status_code == 403
    assert client.post(f"/admin/jobs/watchdogevent/{row.pk}/change/", {"state": "found"}).status_code == 403

"""The morning: when a visit ends, and what is told of the time between."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from gpus.models import Gpu, GpuEvent
from jobs.models import Job, JobEvent, Status
from monitor.models import Visit
from tests.monitor.test_pages import text_of

pytestmark = pytest.mark.django_db
FETCHES = [{"X-Requested-With": "fetch"}, {"HX-Request": "true"}]


@pytest.fixture
def client(alice: User, settings: Any) -> Client:
    settings.MISTUDIO_TIME_SCALE = 1.0
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    client.get("/new/")
    return client


def away(minutes: float) -> None:
    Visit.objects.update(seen_at=timezone.now() - timedelta(minutes=minutes))


def ended(owner: User, name: str, status: str, minutes_ago: float, **fields: Any) -> Job:
    at = timezone.now() - timedelta(minutes=minutes_ago)
    return Job.objects.create(
        kind="rehearsal", name=name, owner=owner, status=status, finished_at=at, **fields
    )


def told(client: Client) -> str:
    page = text_of(client.get("/jobs/").content.decode())
    return page.partition("Since you left")[2].partition(" Jobs ")[0]


# Visits -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("minutes", "new"), [(29, False), (31, True)])
def test_a_visit_ends_after_half_an_hour(client: Client, minutes: int, new: bool) -> None:
    away(minutes)
    left = Visit.objects.get().seen_at
    client.get("/new/")
    visit = Visit.objects.get()
    assert visit.left_at == (left if new else None)
    assert timezone.now() - visit.seen_at < timedelta(minutes=1)


@pytest.mark.parametrize("headers", FETCHES)
def test_an_open_page_is_no_visit(client: Client, headers: dict[str, str]) -> None:
    away(45)
    client.get("/jobs/rows/", headers=headers)
    assert Visit.objects.get().left_at is None
    client.get("/jobs/rows/")
    assert Visit.objects.get().left_at is not None


def test_a_program_is_no_visit(client: Client) -> None:
    away(45)
    client.get("/api/v1/jobs/")
    assert Visit.objects.get().left_at is None


# What is told -------------------------------------------------------------------------------------------
def test_it_tells_what_became_of_ones_own_jobs(client: Client, alice: User, bob: User) -> None:
    ended(alice, "before", Status.SUCCEEDED, 700)
    for number in range(7):
        ended(alice, f"good {number}", Status.SUCCEEDED, 300)
    bad = ended(alice, "bad", Status.FAILED, 200, error="The loss was not finite at step 12.")
    ended(bob, "his", Status.FAILED, 200, error="secret")
    held = Job.objects.create(
        kind="rehearsal", name="stuck", owner=alice, status=Status.HELD, error="No input."
    )
    JobEvent.objects.create(job=held, event="held", at=timezone.now() - timedelta(minutes=100))
    away(600)
    page = client.get("/jobs/").content.decode()
    said = told(client)
    assert "10 h 0 min ago" in said
    assert "7 succeeded : good 0 , good 1 , good 2 , good 3 , good 4 and 2 more" in said
    assert "1 failed bad The loss was not finite at step 12." in said
    assert "1 held stuck No input." in said
    assert f'href="/jobs/{bad.pk}/"' in page
    assert "before" not in said
    assert "his" not in said


def test_what_was_held_before_is_no_news(client: Client, alice: User) -> None:
    """Another thing that happened to it meanwhile does not make it one."""
    old = Job.objects.create(kind="rehearsal", name="long held", owner=alice, status=Status.HELD)
    for event, minutes in (("held", 700), ("unlinked", 100)):
        JobEvent.objects.create(job=old, event=event, at=timezone.now() - timedelta(minutes=minutes))
    away(600)
    assert told(client) == ""
    JobEvent.objects.create(job=old, event="held", at=timezone.now() - timedelta(minutes=50))
    assert "1 held long held" in told(client)


def test_it_tells_of_cards(client: Client, three_cards: list[Gpu]) -> None:
    at = timezone.now() - timedelta(minutes=50)
    for card in three_cards[:2]:
        GpuEvent.objects.create(host=card.host, uuid=card.uuid, event="lost", at=at)
    Gpu.objects.filter(pk=three_cards[0].pk).update(lost_at=at)
    away(60)
    said = told(client)
    assert "card 0 lost" in said
    assert "it is still lost" in said
    assert said.index("card 1 lost") < said.index("it is back")


def test_nothing_is_said_of_nothing(client: Client, alice: User) -> None:
    ended(alice, "a first visit", Status.FAILED, 1)
    assert told(client) == ""
    away(60)
    Job.objects.all().delete()
    assert told(client) == ""


def test_what_was_read_is_not_told_again(client: Client, alice: User) -> None:
    ended(alice, "bad", Status.FAILED, 50)
    away(60)
    assert told(client) == told(client) != ""
    assert client.post("/jobs/since/dismiss/").url == "/jobs/"
    assert told(client) == ""
    ended(alice, "worse", Status.FAILED, 20)
    away(40)
    assert "worse" in told(client)
    assert "bad" not in told(client)

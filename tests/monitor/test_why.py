"""Why a job has not started, or was refused: the sentence, and the table of the cards."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from gpus.models import Gpu
from jobs import dispatch
from jobs.board import Slots
from jobs.memory import GIB
from jobs.models import Job, Status
from monitor import words
from monitor.signin import BACKEND
from tests.jobs.test_placement import hold
from tests.jobs.test_states import make_job
from tests.monitor.test_pages import page_of, text_of

pytestmark = pytest.mark.django_db
TEN = {"memory_bytes": 10 * GIB}


def browser(user: User) -> Client:
    client = Client()
    client.force_login(user, backend=BACKEND)
    return client


def rows(html: str) -> list[str]:
    """The table as words, a row each."""
    table = re.search(r'<table class="verdicts">.*?<tbody>(.*?)</tbody>', html, re.S)
    return [text_of(row).strip() for row in table[1].split("<tr")[1:]] if table else []


def named(owner: User, card: Gpu, **fields: Any) -> Job:
    return make_job(owner, estimate=TEN, gpu_request=card.uuid, gpu_wanted=card.uuid, **fields)


def test_every_card_says_what_it_says_to_this_job(alice: User, three_cards: list[Gpu]) -> None:
    named(alice, three_cards[1], name="holder", progress={"eta_seconds": 90})
    dispatch.schedule()
    hold(three_cards[2], 20, free_gib=4)
    job = named(alice, three_cards[1], name="waiter")
    dispatch.schedule()
    html = page_of(alice, f"/jobs/{job.pk}/")
    free, taken, full = rows(html)
    assert re.search(r"0 Card 24 GiB +now it has room +10\.0 24\.0 0\.0 0\.5", free)
    assert re.search(r"1 Card 24 GiB +asked for +later after holder, about 2 min", taken)
    assert re.search(r"never needs 10\.0 GiB; 20\.0 of 24\.0 GiB .*python \(pid 4000001", full)
    assert re.search(r"10\.0 4\.0 20\.0 0\.5$", full)
    assert "never moved to another one by itself" in html


def test_auto_marks_no_card(alice: User, three_cards: list[Gpu]) -> None:
    html = page_of(alice, f"/jobs/{make_job(alice).pk}/")
    assert len(rows(html)) == 3
    assert "asked for</span>" not in html
    assert "the card with the most free memory" in html


def test_a_card_that_the_work_found_too_full_is_not_said_to_be_free(
    alice: User, three_cards: list[Gpu]
) -> None:
    skip = {"gpu_uuid": three_cards[0].uuid, "at": timezone.now().isoformat()}
    job = make_job(alice, waiting_for={"reason": "memory", "detail": "", "skip": skip})
    first = rows(page_of(alice, f"/jobs/{job.pk}/"))[0]
    assert "later was fuller than its reading said" in first


def test_a_simulated_card_with_room_on_a_host_without_says_so(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "host_fits", lambda slots, need: False)
    Gpu.objects.update(simulated=True)
    first = rows(page_of(alice, f"/jobs/{named(alice, three_cards[0]).pk}/"))[0]
    assert "later needs 10.0 GiB of the memory of alpha, which has less free now" in first


def test_others_see_no_table_and_no_detail(alice: User, bob: User, three_cards: list[Gpu]) -> None:
    hold(three_cards[0], 20, free_gib=4)
    job = named(alice, three_cards[0])
    dispatch.schedule()
    assert rows(page_of(alice, f"/jobs/{job.pk}/"))
    html = page_of(bob, f"/jobs/{job.pk}/")
    assert not rows(html)
    assert "others hold the memory of the card" in html
    assert "used outside" not in html
    assert "Hold</button>" not in html


def test_a_refused_job_leads_with_its_sentence_and_shows_where_a_retry_would_fit(
    alice: User, three_cards: list[Gpu]
) -> None:
    Gpu.objects.filter(pk=three_cards[0].pk).update(enabled=False)
    job = named(alice, three_cards[0])
    dispatch.schedule()
    job.refresh_from_db()
    assert job.status == Status.REFUSED
    html = page_of(alice, f"/jobs/{job.pk}/")
    assert job.error in text_of(html)
    assert job.hint in text_of(html)
    assert "Where a retry would fit now" in html
    assert "never card 0 is disabled" in rows(html)[0]
    assert " now it has room" in rows(html)[1]


@pytest.mark.parametrize("reason", ["invalid_input", "disk_full"])
def test_where_the_parameters_were_refused_the_cards_have_no_say(
    alice: User, three_cards: list[Gpu], reason: str
) -> None:
    job = make_job(alice, status=Status.REFUSED, failure_reason=reason, error="No.")
    assert not rows(page_of(alice, f"/jobs/{job.pk}/"))


def test_a_job_without_a_card_has_no_table(alice: User, three_cards: list[Gpu]) -> None:
    assert not rows(page_of(alice, f"/jobs/{make_job(alice, needs_card=False).pk}/"))


def test_before_any_card_is_known_it_says_so(alice: User) -> None:
    assert "No card is known." in page_of(alice, f"/jobs/{make_job(alice).pk}/")


def test_before_its_inputs_are_made_its_size_is_unknown(alice: User, three_cards: list[Gpu]) -> None:
    waits = {"reason": "input", "detail": "after maker"}
    job = make_job(alice, estimate=None, waiting_for=waits)
    html = page_of(alice, f"/jobs/{job.pk}/")
    assert "after maker, which makes its input" in html
    assert "known once its inputs are made" in html
    assert " – 24.0 " in rows(html)[0]


def test_hold_and_release_on_the_page(alice: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice)
    page = f"/jobs/{job.pk}/"
    assert "Hold</button>" in page_of(alice, page)
    assert browser(alice).post(f"{page}hold/").url == page
    html = page_of(alice, page)
    assert "kept from starting until somebody releases it" in html
    assert "Release</button>" in html
    assert "It starts when it is released" in html
    browser(alice).post(f"{page}release/")
    job.refresh_from_db()
    assert job.status == Status.QUEUED


def test_a_press_too_late_and_a_press_of_others(alice: User, bob: User) -> None:
    job = make_job(alice, status=Status.RUNNING)
    answer = browser(alice).post(f"/jobs/{job.pk}/hold/", follow=True)
    assert "Only a queued job can be held; this one is running." in answer.content.decode()
    for verb in ("hold", "release"):
        assert browser(bob).post(f"/jobs/{job.pk}/{verb}/").status_code == 404
        assert browser(alice).get(f"/jobs/{job.pk}/{verb}/").status_code == 405


@pytest.mark.parametrize(
    ("reason", "detail", "told", "hidden"),
    [
        ("outside", "card 0: 20 GiB", "card 0: 20 GiB; refused if the next", "others hold the memory"),
        ("driver", "It is missing.", "no card can be read: It is missing", "no card can be read"),
        ("after", "after first", "after first", "waits for another job to succeed"),
        ("input", "after first", "after first, which makes its input", "an input that another job makes"),
        ("card", "card 1 is lost", "card 1 is lost", "the card takes no job now"),
        ("host", "the agent of a is silent", "the agent of a is silent", "the host is silent"),
        ("slot", "", "all CPU slots are taken", "all CPU slots are taken"),
        ("launch", "no keeper", "did not come up: no keeper; tried again in 30 s", "tried again in 30 s"),
    ],
)
def test_the_sentence_of_every_reason(alice: User, reason: str, detail: str, told: str, hidden: str) -> None:
    later = timezone.now() + timedelta(seconds=30.4)
    job = make_job(alice, not_before=later, waiting_for={"reason": reason, "detail": detail})
    assert told in words.why_waiting(job, {}, {})["text"]
    reduced = words.why_waiting(job, {}, {}, see=False)["text"]
    assert hidden in reduced
    assert not detail or detail not in reduced


def test_who_waits_for_a_held_job_says_so(alice: User) -> None:
    first = make_job(alice, status=Status.HELD, progress={"eta_seconds": 60})
    waits = {"reason": "after", "detail": "after first", "job_id": str(first.pk)}
    job = make_job(alice, waiting_for=waits)
    why = words.why_waiting(job, {}, words.forerunners([job]))
    assert why == {"text": "after first; that one is held", "bad": True}
    assert "held" not in words.why_waiting(job, {}, words.forerunners([job]), see=False)["text"]
    first.move([Status.HELD], Status.QUEUED)
    assert words.why_waiting(job, {}, words.forerunners([job]))["text"] == "after first, about 1 min"


def test_a_job_that_nobody_looked_at_yet_is_about_to_start(alice: User) -> None:
    assert words.why_waiting(make_job(alice), {}, {})["text"] == "about to start"

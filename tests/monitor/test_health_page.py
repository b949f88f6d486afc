"""The health page: each check in words, silent hosts, launches that failed, cards that wait for memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus import health
from gpus.models import Gpu, Host, Pulse
from jobs.models import Attempt, Lease, Outcome
from tests.jobs.test_states import make_job
from tests.monitor.test_pages import page_of, text_of

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def broker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "broker_answers", lambda: True)


def shown(user: User) -> str:
    return text_of(page_of(user, "/health/"))


def test_all_is_well(alice: User, living_host: Host) -> None:
    Pulse.beat("beat")
    Pulse.beat("canary:gpu.alpha")
    text = shown(alice)
    assert "all parts answer" in text
    assert "Agents 1 of 1 alive ok" in text
    assert "Clock last heard 0 s ago ok" in text
    assert "Watchdog no sign of life yet unknown" in text
    assert "alpha 0 s ago 0 s ago 0 s ago" in text
    assert text.count("None.") == 2


def test_a_part_that_is_down_says_what_that_means(
    alice: User, living_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "broker_answers", lambda: False)
    Pulse.objects.create(name="beat", at=timezone.now() - timedelta(minutes=10))
    text = shown(alice)
    assert "a part does not answer" in text
    assert "Broker does not answer Jobs start later" in text
    assert "Clock last heard 10 min ago Repairs and repeated work wait" in text


def test_a_silent_host_and_one_that_was_never_heard(alice: User, living_host: Host) -> None:
    Host.objects.update(agent_seen_at=timezone.now() - timedelta(minutes=5), worker_seen_at=None)
    text = shown(alice)
    assert "silent for 5 min" in text
    assert "never heard" in text
    assert "0 of 1 alive The cards of that host are not read" in text


def test_errors_of_drivers_and_cards(alice: User, three_cards: list[Gpu]) -> None:
    Host.objects.update(backend_error="The driver does not answer: `reboot`.")
    Gpu.objects.filter(pk=three_cards[1].pk).update(error="NVML: GPU is lost")
    text = shown(alice)
    assert "No card of alpha can be read. The driver does not answer: reboot" in text
    assert "Card 1 of alpha: NVML: GPU is lost" in text


def never_came_up(owner: User, host: Host, minutes: int, **fields: Any) -> None:
    job = make_job(owner, name=f"launched {minutes} min ago", **fields)
    ended = timezone.now() - timedelta(minutes=minutes)
    Attempt.objects.create(
        job=job, number=1, host=host, outcome=Outcome.NEVER_STARTED, ended_at=ended, detail="no keeper came"
    )


def test_launches_of_the_last_hour(alice: User, bob: User, living_host: Host) -> None:
    soon = {"waiting_for": {"reason": "launch"}, "not_before": timezone.now() + timedelta(seconds=40.5)}
    never_came_up(alice, living_host, 5, **soon)
    never_came_up(alice, living_host, 50, status="succeeded")
    never_came_up(alice, living_host, 70)
    text = shown(alice)
    assert "launched 5 min ago alice no keeper came 5 min ago on alpha again in 40 s" in text
    assert "launched 50 min ago alice no keeper came 50 min ago on alpha succeeded" in text
    assert "launched 70 min ago" not in text
    assert "no keeper came" not in shown(bob)
    assert "launched 5 min ago" in shown(bob)


def test_cards_that_wait_for_memory(alice: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice, name="left memory behind", status="succeeded")
    attempt = Attempt.objects.create(job=job, number=1, host=three_cards[1].host)
    Lease.objects.create(
        resource=three_cards[1].resource,
        slot=0,
        attempt=attempt,
        state=Lease.State.QUARANTINED,
        releasing_at=timezone.now() - timedelta(minutes=3),
    )
    text = shown(alice)
    assert "1 Card 24 GiB after left memory behind closed for 3 min" in text


def test_before_any_host(alice: User) -> None:
    text = shown(alice)
    assert "No host is known yet." in text
    assert "no host is known" in text


def test_every_page_leads_there(alice: User) -> None:
    assert 'href="/health/"' in page_of(alice, "/jobs/")

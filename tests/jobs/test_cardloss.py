"""What a lost card means for the job that runs on it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.utils import timezone

from gpus.models import Gpu, Host
from jobs import cardloss, dispatch, requeue
from jobs.models import Attempt, Job, Outcome, Status
from tests.jobs.test_states import make_job


def running(owner: User, card: Gpu, wanted: str) -> tuple[Job, Attempt]:
    """A job that has reached this card and runs."""
    job = make_job(owner, gpu_request=wanted, gpu_wanted=wanted)
    assert dispatch.schedule() == 1
    job.refresh_from_db()
    assert job.gpu_uuid == card.uuid
    job.move([Status.STARTING], Status.RUNNING)
    return job, job.attempts.get()


@pytest.mark.django_db
@pytest.mark.parametrize("gone", ["lost_at", "removed_at"])
def test_the_sentence_names_the_card_and_the_reason(gone: str, alice: User, three_cards: list[Gpu]) -> None:
    _, attempt = running(alice, three_cards[1], three_cards[1].uuid)
    assert cardloss.of_card(attempt) is None
    Gpu.objects.filter(pk=three_cards[0].pk).update(lost_at=timezone.now())  # another card is no concern
    assert cardloss.of_card(attempt) is None
    Gpu.objects.filter(pk=three_cards[1].pk).update(**{gone: timezone.now()}, error="GPU is lost")
    loss = cardloss.of_card(attempt)
    assert loss is not None
    assert (
        loss.sentence
        == f"Card 1 (Card 24 GiB, {three_cards[1].uuid}) was lost while the job ran: GPU is lost"
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("wanted", "cancel", "status", "outcome"),
    [
        ("named", False, Status.FAILED, Outcome.ENDED),
        ("auto", False, Status.QUEUED, Outcome.LOST),
        ("auto:1", False, Status.QUEUED, Outcome.LOST),
        ("named", True, Status.CANCELLED, Outcome.ENDED),
        ("auto", True, Status.CANCELLED, Outcome.ENDED),
    ],
)
def test_a_named_job_fails_and_auto_goes_on(
    wanted: str, cancel: bool, status: str, outcome: str, alice: User, three_cards: list[Gpu]
) -> None:
    card = three_cards[0]
    job, attempt = running(alice, card, card.uuid if wanted == "named" else wanted)
    if cancel:
        Job.objects.update(cancel_requested_at=timezone.now())
    assert requeue.card_lost(job, attempt, cardloss.Loss("Card 0 was lost."))
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert (job.status, attempt.outcome) == (status, outcome)
    assert job.gpu_wanted == (card.uuid if wanted == "named" else wanted)
    if status == Status.FAILED:
        assert (job.failure_reason, job.error) == ("card_lost", "Card 0 was lost.")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("error", "found"), [("CUDA error: unspecified launch failure", True), ("KeyError: 3", False)]
)
def test_a_fault_of_cuda_waits_until_the_agent_has_seen_the_card(
    error: str, found: bool, alice: User, three_cards: list[Gpu], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cardloss, "NOTICE_SECONDS", 20.0)
    _, attempt = running(alice, three_cards[0], three_cards[0].uuid)

    def agent() -> None:
        time.sleep(0.5)
        Gpu.objects.filter(pk=three_cards[0].pk).update(lost_at=timezone.now())
        connections.close_all()

    seen = threading.Thread(target=agent)
    seen.start()
    loss = cardloss.behind(attempt, error)
    seen.join()
    assert (loss is not None) == found


@pytest.mark.django_db
@pytest.mark.parametrize(("wanted", "status"), [("named", Status.FAILED), ("auto", Status.QUEUED)])
def test_a_driver_that_was_lost_under_the_work_is_no_fault_of_the_job(
    wanted: str, status: str, alice: User, three_cards: list[Gpu], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cardloss, "NOTICE_SECONDS", 0.0)
    job, attempt = running(alice, three_cards[0], three_cards[0].uuid if wanted == "named" else wanted)
    assert cardloss.behind(attempt, "CUDA error: driver shutting down") is None
    Host.objects.update(backend_error="The driver was unloaded; reboot.")
    assert cardloss.behind(attempt, "KeyError: 3") is None  # not by CUDA: its own fault
    loss = cardloss.behind(attempt, "CUDA error: driver shutting down")
    assert loss == cardloss.Loss(
        "The driver was lost while the job ran: The driver was unloaded; reboot.", "driver_unavailable"
    )
    assert requeue.card_lost(job, attempt, loss)
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert (job.status, attempt.counted) == (status, False)
    assert job.failure_reason == ("driver_unavailable" if wanted == "named" else "")

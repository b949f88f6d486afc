"""`system/gpu-fit`: the estimate and, card by card, now, when free, or never, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from gpus.models import Gpu, Host
from jobs import dispatch
from jobs.memory import GIB, MIB
from jobs.models import Job, Lease
from tests.conftest import client_of, make_card
from tests.jobs.test_placement import hold
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db
BASE = 160 * MIB  # of the work process


@pytest.fixture
def ask(alice: User, living_host: Host) -> Any:
    client = client_of(alice)

    def ask(params: dict[str, Any], **body: Any) -> Any:
        body = {"kind": "rehearsal", "params": params, **body}
        return client.post("/api/v1/system/gpu-fit/", body, format="json")

    return ask


def test_every_card_says_now_later_or_never_with_the_numbers(
    ask: Any, alice: User, living_host: Host
) -> None:
    free, busy, held = (make_card(living_host, n) for n in range(3))
    small = make_card(living_host, 3, total_gib=8, free_gib=8)
    make_job(alice, gpu_request=busy.uuid, gpu_wanted=busy.uuid, progress={"eta_seconds": 90})
    assert dispatch.schedule() == 1
    hold(held, 20, free_gib=4)
    answer = ask({"estimate_mib": 10 * 1024}).data
    assert answer["estimate"]["memory_bytes"] == 10 * GIB + BASE
    cards = {card["uuid"]: card for card in answer["cards"]}
    verdicts = [cards[card.uuid]["verdict"] for card in (free, busy, held, small)]
    assert verdicts == ["now", "later", "never", "never"]
    assert cards[busy.uuid]["eta_seconds"] == 90
    assert (cards[held.uuid]["outside_bytes"], cards[held.uuid]["free_bytes"]) == (20 * GIB, 4 * GIB)
    assert "used outside miStudio" in cards[held.uuid]["detail"]
    assert "this card can give 7.8 GiB" in cards[small.uuid]["detail"]
    assert cards[free.uuid]["need_bytes"] == 10 * GIB + BASE
    assert answer["auto"] == answer["chosen"] == {"verdict": "now", "detail": "card 0 now", "uuid": free.uuid}


def test_it_answers_for_what_gpu_asks(ask: Any, three_cards: list[Gpu]) -> None:
    hold(three_cards[1], 20, free_gib=4)
    answer = ask({"estimate_mib": 10 * 1024}, gpu=1).data
    assert answer["chosen"]["verdict"] == "never"
    assert answer["chosen"]["uuid"] == three_cards[1].uuid
    assert answer["auto"]["verdict"] == "now"


@pytest.mark.parametrize(
    ("gpu", "code"), [("cuda:0", "invalid_gpu"), (7, "unknown_gpu"), ([0, 1], "too_many_gpus")]
)
def test_a_card_that_could_not_be_submitted_is_a_400_here_too(
    ask: Any, three_cards: list[Gpu], gpu: Any, code: str
) -> None:
    answer = ask({}, gpu=gpu)
    assert (answer.status_code, answer.data["code"]) == (400, code)


def test_parameters_that_are_wrong_give_no_estimate_and_the_reason(ask: Any, three_cards: list[Gpu]) -> None:
    answer = ask({"steps": -1})
    assert answer.status_code == 200
    assert answer.data["estimate"] is None
    assert list(answer.data["errors"]) == ["steps"]
    assert [card["verdict"] for card in answer.data["cards"]] == ["now"] * 3


def test_it_queues_nothing(ask: Any, three_cards: list[Gpu]) -> None:
    ask({"steps": 1}, gpu=0)
    assert Job.objects.count() == 0


def test_what_the_fit_says_is_what_dispatch_does(ask: Any, alice: User, three_cards: list[Gpu]) -> None:
    """The same numbers decide: a card that says now takes the job, one that says later does not yet."""
    for free in (2, 9, 11, 24):
        hold(three_cards[0], 24 - free, free_gib=free)
        verdict = ask({"estimate_mib": 10 * 1024}, gpu=0).data["chosen"]["verdict"]
        estimate = {"memory_bytes": 10 * GIB + BASE}
        job = make_job(
            alice, gpu_request=three_cards[0].uuid, gpu_wanted=three_cards[0].uuid, estimate=estimate
        )
        dispatch.schedule()
        job.refresh_from_db()
        assert (job.status == "starting") == (verdict == "now"), free
        Job.objects.update(status="cancelled")
        Lease.objects.all().delete()


def test_a_job_larger_than_every_card_fits_never(ask: Any, three_cards: list[Gpu]) -> None:
    answer = ask({"estimate_mib": 100 * 1024}).data
    assert [card["verdict"] for card in answer["cards"]] == ["never"] * 3
    assert answer["auto"]["verdict"] == "never"

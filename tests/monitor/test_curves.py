"""What the charts of the pages are filled with, and how bad questions are answered."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from gpus import recorder
from gpus.models import Gpu, Host
from gpus.recorder import Sample
from monitor import curves
from tests.conftest import make_card

GIB = 2**30


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def ask(user: User, query: str, status: int = 200) -> dict[str, Any]:
    answer = client_of(user).get(f"/curves/?{query}")
    assert answer.status_code == status, answer.content
    return json.loads(answer.content)


def read(uuid: str, seconds_ago: float, busy: int, used: int = GIB) -> Sample:
    return Sample(uuid, int(time.time() * 1000 - seconds_ago * 1000), (busy, used, 400, 1000))


def test_all_cards_on_one_axis(alice: User, three_cards: list[Gpu]) -> None:
    first, second, third = (card.uuid for card in three_cards)
    recorder.write([read(first, ago, 500) for ago in range(2, 280, 2)])
    recorder.write([read(second, ago, 250, 3 * GIB) for ago in range(2, 60, 2)])
    told = ask(alice, "minutes=5")
    assert set(told["cards"]) == {first, second, third}
    assert told["count"] * told["step"] == pytest.approx(300, abs=2 * told["step"])
    for name, value in (("utilization", 50), ("memory", 1024), ("temperature", 40), ("power", 100)):
        curve = told["cards"][first][name]
        assert len(curve["mean"]) == told["count"]
        assert {said for said in curve["mean"] if said is not None} == {value}
        assert "min" not in curve  # nothing differed
    late = told["cards"][second]["memory"]["mean"]
    assert late[0] is None  # a gap stays a gap
    assert max(value for value in late if value is not None) == 3072
    assert told["cards"][third] == dict.fromkeys(curves.METRICS)


def test_a_step_of_several_readings_has_its_band(alice: User, three_cards: list[Gpu]) -> None:
    uuid = three_cards[0].uuid
    recorder.write([read(uuid, ago, 200 + 100 * (ago % 4)) for ago in range(2, 1700)])
    curve = ask(alice, f"minutes=30&card={uuid}")["cards"][uuid]["utilization"]
    middle = len(curve["mean"]) // 2
    assert curve["min"][middle] < curve["mean"][middle] < curve["max"][middle]


def test_the_end_of_a_window_is_on_the_axis_of_the_whole(alice: User, three_cards: list[Gpu]) -> None:
    uuid = three_cards[0].uuid
    recorder.write([read(uuid, ago, 500 + ago % 7) for ago in range(3, 20_000, 5)])
    for minutes in (5, 30, 60, 360):
        whole = ask(alice, f"minutes={minutes}")
        since = whole["now"] - 60 * minutes / 10
        end = ask(alice, f"minutes={minutes}&since={since}")
        assert end["step"] == whole["step"]
        assert (end["start"] - whole["start"]) % whole["step"] == 0
        assert end["start"] <= since < end["start"] + end["step"]
        first = round((end["start"] - whole["start"]) / whole["step"])
        means = whole["cards"][uuid]["utilization"]["mean"][first:-1]
        assert end["cards"][uuid]["utilization"]["mean"][: len(means)] == means


@pytest.mark.parametrize("minutes", curves.WINDOWS)
def test_every_window_answers_without_a_reading(minutes: int, alice: User, three_cards: list[Gpu]) -> None:
    told = ask(alice, f"minutes={minutes}")
    assert told["count"] <= curves.MOST_POINTS + 2
    assert not any(told["cards"][card.uuid]["power"] for card in three_cards)
    assert ask(alice, f"minutes={minutes}&since={told['now'] + 1000}")["count"] >= 1


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "invalid"),
        ("minutes=7", "invalid"),
        ("minutes=5&since=yesterday", "invalid"),
        ("minutes=5&since=nan", "invalid"),
        ("minutes=5&since=1e300", "invalid"),
        ("minutes=5&since=-1", "invalid"),
        ("minutes=5&card=GPU-00000000-0000-0000-0000-000000000099", "unknown_gpu"),
        ("minutes=5&card=", "invalid_gpu"),
    ],
)
def test_bad_questions(query: str, code: str, alice: User, three_cards: list[Gpu]) -> None:
    refusal = ask(alice, query, 400)
    assert refusal["code"] == code
    assert refusal["detail"]


def test_it_wants_a_login(db: None) -> None:
    assert Client().get("/curves/?minutes=5").status_code == 302


def test_many_cards_cost_no_more_questions_and_fit(alice: User, living_host: Host) -> None:
    client = client_of(alice)
    counts = []
    for wanted in (1, 64):
        for index in range(Gpu.objects.count(), wanted):
            uuid = f"GPU-00000000-0000-0000-0000-{index:012d}"
            make_card(living_host, index, uuid=uuid)
            recorder.write([read(uuid, ago, 300 + (37 * ago + index) % 400) for ago in range(2, 1800, 5)])
        with CaptureQueriesContext(connection) as asked:
            answer = client.get("/curves/?minutes=30", headers={"Accept-Encoding": "gzip"})
        counts.append(len(asked))
    assert counts[0] == counts[1]
    assert answer["Content-Encoding"] == "gzip"
    assert len(answer.content) < 150_000

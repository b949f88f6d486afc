"""`system/health`: open to strangers, 503 when a part is down, and nothing told that helps them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.utils import timezone
from rest_framework.test import APIClient

from gpus import health
from gpus.models import Pulse

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def broker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "broker_answers", lambda: True)


def ask() -> tuple[int, str, dict[str, Any]]:
    response = APIClient().get("/api/v1/system/health")
    return response.status_code, response.json()["status"], response.json()["checks"]


def test_it_is_ok_when_every_part_answers(make_host: Any) -> None:
    make_host("secret-name")
    status, word, checks = ask()
    assert (status, word) == (200, "ok")
    assert checks == {
        "database": "ok",
        "redis": "ok",
        "agents": {"alive": 1, "known": 1},
        "workers": {"alive": 1, "known": 1},
        "canary_age_s": None,
        "beat_age_s": None,
        "watchdog_age_s": None,
        "failed_launches": 0,
    }
    assert "secret-name" not in APIClient().get("/system/health/").content.decode()


def test_it_is_degraded_without_a_broker(make_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_host()
    monkeypatch.setattr(health, "broker_answers", lambda: False)
    assert ask()[:2] == (503, "degraded")


def test_it_answers_without_a_database(make_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*args: Any) -> None:
        raise DatabaseError("down")

    monkeypatch.setattr(connection, "cursor", down)
    status, _, checks = ask()
    assert (status, checks["database"], checks["agents"]) == (503, "down", None)


@pytest.mark.parametrize(("field", "part"), [("agent_seen_at", "agents"), ("worker_seen_at", "workers")])
def test_it_is_degraded_when_a_host_falls_silent(field: str, part: str, make_host: Any) -> None:
    host = make_host()
    setattr(host, field, timezone.now() - timedelta(seconds=60))
    host.save()
    status, _, checks = ask()
    assert (status, checks[part]) == (503, {"alive": 0, "known": 1})


def test_it_is_degraded_before_any_host_was_seen() -> None:
    assert ask()[0] == 503


def test_a_host_that_was_taken_away_is_no_fault(make_host: Any) -> None:
    make_host("here")
    gone = make_host("gone")
    gone.agent_seen_at = gone.worker_seen_at = timezone.now() - timedelta(days=2)
    gone.save()
    assert ask()[0] == 200


@pytest.mark.parametrize(
    ("name", "age", "key", "status"),
    [
        ("beat", 10, "beat_age_s", 200),
        ("beat", 70, "beat_age_s", 503),
        ("canary:cpu", 40, "canary_age_s", 200),
        ("canary:cpu", 100, "canary_age_s", 503),
        ("watchdog:vm", 170, "watchdog_age_s", 200),
        ("watchdog:vm", 190, "watchdog_age_s", 503),
    ],
)
def test_an_old_pulse_is_a_fault(name: str, age: int, key: str, status: int, make_host: Any) -> None:
    make_host()
    Pulse.objects.create(name=name, at=timezone.now() - timedelta(seconds=age))
    answer, _, checks = ask()
    assert answer == status
    assert checks[key] == pytest.approx(age, abs=2)


def test_the_oldest_canary_counts(make_host: Any) -> None:
    make_host()
    Pulse.objects.create(name="canary:gpu.alpha", at=timezone.now() - timedelta(seconds=100))
    Pulse.beat("canary:cpu")
    assert ask()[2]["canary_age_s"] == pytest.approx(100, abs=2)


def test_the_host_whose_watchdog_is_silent_counts(make_host: Any) -> None:
    make_host()
    Pulse.beat("watchdog:other")
    Pulse.objects.create(name="watchdog:vm", at=timezone.now() - timedelta(seconds=200))
    status, _, checks = ask()
    assert (status, checks["watchdog_age_s"]) == (503, pytest.approx(200, abs=2))


def test_the_canary_of_a_queue_that_is_gone_is_no_fault(make_host: Any) -> None:
    make_host()
    Pulse.objects.create(name="canary:gpu.gone", at=timezone.now() - timedelta(days=2))
    assert ask()[0] == 200


def test_it_asks_a_real_broker(monkeypatch: pytest.MonkeyPatch, broker: str, settings: Any) -> None:
    monkeypatch.undo()
    settings.REDIS_URL = broker
    assert health.broker_answers()
    settings.REDIS_URL = broker + ".not"
    assert not health.broker_answers()

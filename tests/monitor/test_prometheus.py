"""`/metrics`, read back with Prometheus' own parser: DCGM's names and units, gaps instead of old or unknown values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from gpus.models import Gpu, Host
from jobs.models import Status
from tests.conftest import make_card
from tests.jobs.test_states import make_job
from tests.monitor.conftest import token_for

pytestmark = pytest.mark.django_db
READING = {
    "utilization_gpu_percent": 37.0,
    "memory_used_bytes": 3 * 2**30,
    "memory_free_bytes": 21 * 2**30,
    "temperature_celsius": 61.0,
    "power_draw_watts": None,
    "performance_state": "P2",
}
INFO = {"pci_bus_id": "00000000:03:00.0", "driver_version": "580.65.06"}


def scrape(user: User, **headers: str) -> HttpResponse:
    token = token_for(user)
    return Client().get("/metrics", headers={"Authorization": f"Bearer {token}"} | headers)  # type: ignore[return-value]


def samples(user: User) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse(scrape(user).content.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_card_stands_under_dcgms_names_units_and_labels(alice: User, living_host: Host) -> None:
    card = make_card(living_host, 0, reading=READING, info=INFO, name="NVIDIA L40S")
    found = samples(alice)
    labels, used = found["DCGM_FI_DEV_FB_USED"][0]
    assert used == 3072  # MiB
    assert labels == {
        "gpu": "0",
        "UUID": card.uuid,
        "pci_bus_id": INFO["pci_bus_id"],
        "device": "nvidia0",
        "modelName": "NVIDIA L40S",
        "Hostname": "alpha",
        "DCGM_FI_DRIVER_VERSION": INFO["driver_version"],
    }
    expected = {"DCGM_FI_DEV_GPU_UTIL": 37, "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_PSTATE": 2}
    assert {name: found[name][0][1] for name in expected} == expected


def test_what_is_not_known_has_no_sample(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, reading=READING)
    make_card(living_host, 1, reading=READING, sampled_at=timezone.now() - timedelta(minutes=1))
    make_card(living_host, 2, reading=READING, lost_at=timezone.now())
    found = samples(alice)
    assert "DCGM_FI_DEV_POWER_USAGE" not in found
    assert [labels["gpu"] for labels, _ in found["DCGM_FI_DEV_GPU_UTIL"]] == ["0"]
    health = {labels["gpu"]: labels["health"] for labels, _ in found["mistudio_gpu_health"]}
    assert health == {"0": "ok", "1": "stale", "2": "lost"}


def test_jobs_are_counted_and_the_running_ones_tell_how_far_they_are(
    alice: User, three_cards: list[Gpu]
) -> None:
    queued = make_job(alice)
    make_job(alice, status=Status.FAILED)
    running = make_job(
        alice, status=Status.RUNNING, gpu_uuid=three_cards[1].uuid, progress={"fraction": 0.25}
    )
    found = samples(alice)
    counts = {labels["status"]: value for labels, value in found["mistudio_jobs"]}
    assert counts == {"queued": 1, "failed": 1, "running": 1}
    [(labels, share)] = found["mistudio_job_progress_ratio"]
    assert (labels["job"], labels["UUID"], share) == (str(running.pk), three_cards[1].uuid, 0.25)
    age = (timezone.now() - queued.queued_at).total_seconds()
    assert found["mistudio_queue_oldest_seconds"][0][1] == pytest.approx(age, abs=2)


def test_prometheus_own_request_is_understood(alice: User, three_cards: list[Gpu]) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    answer = scrape(alice, Accept=accept)
    assert answer["Content-Type"].startswith("application/openmetrics-text")
    assert any(family.name == "mistudio_healthy" for family in parse_openmetrics(answer.content.decode()))


def test_it_asks_a_fixed_number_of_queries(
    alice: User, living_host: Host, django_assert_num_queries: Any
) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    for count in (1, 7):
        for index in range(count):
            make_card(living_host, index + 8 * (count > 1), reading=READING)
        with django_assert_num_queries(13):
            client.get("/metrics")


def test_strangers_get_json_and_nothing_else(client: Client, db: None) -> None:
    answer = client.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    assert answer.status_code == 401
    assert answer.json()["code"] == "not_authenticated"

"""The page of a card: what it says, who may change it, and that what it says of draining is what happens."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from gpus.models import Gpu, GpuEvent, Host
from jobs import dispatch
from jobs.models import Attempt, Job, Lease, Status
from tests.conftest import make_card
from tests.monitor.test_pages import make_job, page_of, text_of


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def address(gpu: Gpu, more: str = "") -> str:
    return f"/cards/{gpu.uuid}/{more}"


def run_on(gpu: Gpu, owner: User, open_lease: bool = False, **fields: Any) -> Job:
    """A job that holds, or held, a slot of the card."""
    job = make_job(owner, gpu_uuids=[gpu.uuid], gpu_uuid=gpu.uuid, attempt=1, **fields)
    attempt = Attempt.objects.create(job=job, number=1, host=gpu.host, gpu_uuids=[gpu.uuid])
    ended = None if open_lease else timezone.now()
    Lease.objects.create(resource=gpu.resource, slot=0, attempt=attempt, ended_at=ended)
    return job


# What it says -------------------------------------------------------------------------------------------
def test_facts_values_and_what_is_not_said(alice: User, living_host: Host) -> None:
    info = {"driver_version": "580.65.06", "compute_capability": "9.0", "mig_mode": False}
    reading = {
        "temperature_celsius": 61.4,
        "clock_sm_mhz": 1695,
        "performance_state": "P2",
        "throttle_reasons": ["sw_power_cap"],
        "missing": {"fan_percent": "this card has no fan"},
    }
    gpu = make_card(living_host, 0, info=info, reading=reading, note="the fast one")
    html = page_of(alice, address(gpu))
    text = text_of(html)
    for said in (gpu.uuid, "580.65.06", "MIG off", "SM clock 1 695 MHz", "P2"):
        assert said in text, said
    assert "sw power cap" in text
    assert "the fast one" in text
    assert 'title="this card has no fan"' in html
    assert "1 job and 1 interactive" in text
    assert "No job has run on it yet." in text
    assert "None" not in text


def test_a_mig_instance_and_its_parent_name_each_other(alice: User, living_host: Host) -> None:
    parent = make_card(living_host, 0, info={"mig_mode": True})
    child = make_card(living_host, 1, uuid=f"MIG-{parent.uuid}/1/0", info={"mig_parent": parent.uuid})
    assert f'href="/cards/{child.uuid}/"' in page_of(alice, address(parent))
    assert f'href="/cards/{parent.uuid}/"' in page_of(alice, address(child))
    assert "Split into MIG instances: jobs use those." in text_of(page_of(alice, "/"))


def test_any_spelling_of_the_uuid_and_none_that_is_unknown(alice: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0)
    assert gpu.uuid in page_of(alice, f"/cards/{gpu.uuid.upper()}/")
    page_of(alice, "/cards/GPU-ffffffff-0000-0000-0000-000000000000/", 404)
    page_of(alice, "/cards/0/", 404)


def test_a_card_that_is_gone_keeps_its_page(alice: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0, removed_at=timezone.now())
    GpuEvent.objects.create(host=living_host, uuid=gpu.uuid, event="removed", detail=gpu.name)
    text = text_of(page_of(alice, address(gpu)))
    assert "no longer in this host" in text
    assert "removed" in text


def test_every_mention_of_a_card_leads_to_its_page(alice: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0, lost_at=timezone.now(), last_seen_at=timezone.now())
    done = run_on(gpu, alice, status=Status.SUCCEEDED)
    waits = make_job(alice, gpu_request=gpu.uuid, gpu_wanted=gpu.uuid)
    link = f'href="{address(gpu)}"'
    monitor = page_of(alice, "/")
    assert re.search(rf"<a {link}[^>]*>Card 0 of alpha was lost", monitor)
    assert monitor.count(link) >= 4  # row (chip, name), notice, glance, queue
    for path in ("/jobs/", f"/jobs/{done.pk}/", f"/jobs/{waits.pk}/"):
        assert link in page_of(alice, path), path


# Jobs ---------------------------------------------------------------------------------------------------
def test_jobs_that_ran_there_newest_first_and_paged(alice: User, three_cards: list[Gpu]) -> None:
    gpu, other, _ = three_cards
    for number in range(12):
        at = timezone.now() - timedelta(minutes=number)
        run_on(gpu, alice, name=f"number {number}", status=Status.SUCCEEDED, queued_at=at)
    run_on(other, alice, name="elsewhere", status=Status.SUCCEEDED)
    html = page_of(alice, address(gpu))
    names = re.findall(r"number \d+(?=</a>)", html)
    assert names == [f"number {n}" for n in range(10)]
    assert "elsewhere" not in html
    more = re.search(r'hx-get="([^"]+)"', html)[1].replace("&amp;", "&")
    assert re.findall(r"number \d+(?=</a>)", page_of(alice, more)) == ["number 10", "number 11"]
    assert "elsewhere" not in page_of(alice, f"/jobs/?card={gpu.uuid}")


def test_a_stranger_sees_the_jobs_in_reduced_form(alice: User, bob: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0)
    run_on(gpu, alice, name="hers", status=Status.FAILED, error="a private sentence", failure_reason="error")
    html = page_of(bob, address(gpu))
    assert "hers" in html
    assert "a private sentence" not in html


# What staff may change ----------------------------------------------------------------------------------
def test_only_staff_is_offered_and_allowed_a_change(alice: User, staff: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0)
    assert "Drain" not in page_of(alice, address(gpu))
    assert "Drain" in page_of(staff, address(gpu))
    assert client_of(alice).post(address(gpu, "change/"), {"note": "mine"}).status_code == 403
    gpu.refresh_from_db()
    assert gpu.note == ""


def test_note_and_limits(staff: User, living_host: Host) -> None:
    gpu = make_card(living_host, 0)
    sent = {"note": "for bob", "max_jobs": "2", "interactive_slots": "0"}
    assert client_of(staff).post(address(gpu, "change/"), sent).status_code == 302
    gpu.refresh_from_db()
    assert (gpu.note, gpu.max_jobs, gpu.interactive_slots) == ("for bob", 2, 0)
    assert "max_jobs = 2" in text_of(page_of(staff, address(gpu)))  # the event


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("max_jobs", "0", "greater than or equal to 1"),
        ("max_jobs", "sixty", "valid integer"),
        ("interactive_slots", "65", "less than or equal to 64"),
        ("note", "x" * 201, "no more than 200"),
    ],
)
def test_an_error_stands_at_its_field(
    field: str, value: str, sentence: str, staff: User, living_host: Host
) -> None:
    gpu = make_card(living_host, 0)
    answer = client_of(staff).post(address(gpu, "change/"), {"max_jobs": "1", field: value})
    assert answer.status_code == 400
    html = answer.content.decode()
    assert value in html  # what was typed is still there
    of_field = html[html.index(f'id="f-{field}"') :].split("</div>")[0]
    assert 'aria-invalid="true"' in of_field
    assert sentence in of_field
    assert html.count("aria-invalid") == 1
    assert not GpuEvent.objects.exists()


def test_draining_says_what_it_does_and_does_it(
    staff: User, alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.tasks.ring", lambda *args, **kwargs: None)
    gpu = three_cards[0]
    going = run_on(gpu, alice, open_lease=True, name="in front", status=Status.RUNNING)
    named = make_job(alice, name="asked for it", gpu_request=gpu.uuid, gpu_wanted=gpu.uuid)
    held = make_job(alice, name="held", gpu_request=gpu.uuid, gpu_wanted=gpu.uuid, status=Status.HELD)
    auto = make_job(alice, name="anywhere", estimate={"memory_bytes": 2**20})
    text = text_of(page_of(staff, address(gpu)))
    assert "1 job goes on to the end: in front." in text
    assert "1 queued job that named this card is refused: asked for it." in text
    assert "1 held or paused job that named it is refused when released or resumed" in text
    client_of(staff).post(address(gpu, "change/"), {"enabled": "false"})
    dispatch.schedule()
    status = {job.name: job.status for job in Job.objects.all()}
    assert status == {
        going.name: Status.RUNNING,
        named.name: Status.REFUSED,
        held.name: Status.HELD,
        auto.name: Status.STARTING,
    }
    auto.refresh_from_db()
    assert auto.gpu_uuid != gpu.uuid
    text = text_of(page_of(staff, address(gpu)))
    assert "draining" in text
    assert "Reopen" in text
    client_of(staff).post(address(gpu, "change/"), {"enabled": "true"})
    gpu.refresh_from_db()
    assert gpu.enabled


# Cost ---------------------------------------------------------------------------------------------------
def questions(client: Client, path: str) -> int:
    with CaptureQueriesContext(connection) as asked:
        assert client.get(path).status_code == 200
    return len(asked)


@pytest.mark.parametrize("path", ["/", "/parts/", "card"])
def test_many_cards_ask_the_database_no_more_than_one(path: str, alice: User, living_host: Host) -> None:
    """With a job, a process and an event each."""
    client, counts = client_of(alice), []
    for wanted in (1, 64):
        for index in range(Gpu.objects.count(), wanted):
            uuid = f"GPU-00000000-0000-0000-0000-{index:012d}"
            listed = [{"pid": 1, "name": "init", "memory_used_bytes": 5}]
            gpu = make_card(living_host, index, uuid=uuid, processes=listed)
            run_on(gpu, alice, open_lease=True, status=Status.RUNNING)
            make_job(alice, gpu_wanted=uuid, waiting_for={"reason": "lease"})
            GpuEvent.objects.create(host=living_host, uuid=uuid, event="added")
        counts.append(questions(client, address(Gpu.objects.first()) if path == "card" else path))
    assert counts[0] == counts[1]
    assert counts[0] <= 25

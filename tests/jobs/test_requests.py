"""What a request may ask beside its parameters: once only, held, after others, first."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connections

from gpus.models import Gpu
from jobs import dispatch, groups, submit
from jobs.models import Job, Status
from tests.conftest import client_of
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db


@pytest.fixture
def post(alice: User, three_cards: list[Gpu]) -> Any:
    client = client_of(alice)
    return lambda path="rehearsal", **body: client.post(f"/api/v1/jobs/{path}/", body, format="json")


def test_the_same_key_and_body_answer_with_the_same_job(post: Any) -> None:
    first, again = (post(steps=3, gpu=0, idempotency_key="k") for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.data["id"] == again.data["id"]
    assert Job.objects.count() == 1


def test_the_same_key_with_another_body_is_a_conflict(post: Any) -> None:
    post(steps=3, idempotency_key="k")
    for body in ({"steps": 4}, {"steps": 3, "gpu": 0}):
        answer = post(**body, idempotency_key="k")
        assert (answer.status_code, answer.data["code"]) == (409, "conflict")
        assert "another request" in answer.data["detail"]
    assert Job.objects.count() == 1


def test_a_key_is_its_owners(post: Any, bob: User) -> None:
    post(steps=3, idempotency_key="k")
    answer = client_of(bob).post(
        "/api/v1/jobs/rehearsal/", {"steps": 4, "idempotency_key": "k"}, format="json"
    )
    assert answer.status_code == 201


def test_a_refused_request_leaves_its_key_free(post: Any) -> None:
    assert post(steps=-1, idempotency_key="k").status_code == 400
    assert post(steps=1, idempotency_key="k").status_code == 201


@pytest.mark.django_db(transaction=True, available_apps=list(settings.INSTALLED_APPS))
def test_twenty_at_once_with_one_key_make_one_job(alice: User, three_cards: list[Gpu]) -> None:
    barrier, made, errors = threading.Barrier(20), [], []

    def one() -> None:
        barrier.wait()
        try:
            made.append(submit.submit_once(alice, "rehearsal", {"steps": 1, "idempotency_key": "k"}))
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len({job.pk for job, _ in made}) == 1
    assert sum(new for _, new in made) == 1
    assert Job.objects.count() == 1


@pytest.mark.parametrize(("once", "steps"), [(submit.submit_once, 1), (groups.submit_once, [1, 2])])
def test_the_twin_of_a_request_that_filled_the_queue_is_answered_with_its_job(
    alice: User,
    three_cards: list[Gpu],
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    once: Any,
    steps: Any,
) -> None:
    """Both looked for an earlier one before either had queued."""
    settings.MISTUDIO_USER_QUEUED_JOBS = 2 if isinstance(steps, list) else 1
    body = {"steps": steps, "idempotency_key": "k"}
    first, _ = once(alice, "rehearsal", body)
    look, sees = submit._earlier, iter([False])
    monkeypatch.setattr(submit, "_earlier", lambda *asked: look(*asked) if next(sees, True) else None)
    assert once(alice, "rehearsal", body) == (first, False)


def test_a_held_job_starts_when_it_is_released(post: Any) -> None:
    held = post(steps=1, hold=True)
    assert held.data["status"] == "held"
    assert dispatch.schedule() == 0
    assert post(f"{held.data['id']}/hold").status_code == 409
    assert post(f"{held.data['id']}/release").data["status"] == "queued"
    assert post(f"{held.data['id']}/release").status_code == 409
    assert dispatch.schedule() == 1


def test_a_queued_job_can_be_held_and_a_running_one_cannot(post: Any) -> None:
    queued = post(steps=1)
    assert post(f"{queued.data['id']}/hold").data["status"] == "held"
    post(f"{queued.data['id']}/release")
    dispatch.schedule()
    answer = post(f"{queued.data['id']}/hold")
    assert answer.status_code == 409
    assert "starting" in answer.data["detail"]


def test_it_waits_for_the_jobs_that_it_was_told_to_follow(post: Any, alice: User) -> None:
    first = make_job(alice, status=Status.RUNNING)
    job = post(steps=1, after=[str(first.pk)])
    assert job.status_code == 201
    assert job.data["after"] == [str(first.pk)]
    dispatch.schedule()
    row = Job.objects.get(pk=job.data["id"])
    assert (row.status, row.waiting_for["reason"], row.waiting_for["job_id"]) == (
        "queued",
        "after",
        str(first.pk),
    )
    Job.objects.filter(pk=first.pk).update(status=Status.SUCCEEDED)
    assert dispatch.schedule() == 1


@pytest.mark.parametrize("end", ["failed", "refused", "cancelled"])
def test_it_is_held_with_a_sentence_when_the_other_ends_badly(post: Any, alice: User, end: str) -> None:
    first = make_job(alice, status=Status.RUNNING)
    job = post(steps=1, after=[str(first.pk)])
    Job.objects.filter(pk=first.pk).update(status=end)
    dispatch.schedule()
    row = Job.objects.get(pk=job.data["id"])
    assert row.status == "held"
    assert f"which ended {end}" in row.error


def test_it_refuses_to_follow_what_is_unknown_strange_or_over(post: Any, alice: User, bob: User) -> None:
    over, strange = make_job(alice, status=Status.FAILED), make_job(bob)
    for wrong in ([str(uuid.uuid4())], [str(strange.pk)], [str(over.pk)], ["x"], "x"):
        answer = post(steps=1, after=wrong)
        assert answer.status_code == 400, wrong
        assert any(field.startswith("after") for field in answer.data["errors"])
    assert Job.objects.count() == 2


def test_priority_above_zero_is_for_staff(post: Any, staff: User) -> None:
    assert post(steps=1, priority=1).status_code == 400
    assert post(steps=1, priority=-5).status_code == 201
    answer = client_of(staff).post("/api/v1/jobs/rehearsal/", {"steps": 1, "priority": 9}, format="json")
    assert answer.data["priority"] == 9


@pytest.mark.parametrize("key", [5, "", [], {}])
def test_a_key_that_is_no_text_is_refused(post: Any, key: Any) -> None:
    assert "idempotency_key" in post(steps=1, idempotency_key=key).data["errors"]
    assert Job.objects.count() == 0


def test_a_retry_refuses_what_it_would_drop_in_silence(post: Any, alice: User) -> None:
    old = make_job(alice, status=Status.FAILED, params={"steps": 1})
    answer = post(f"{old.pk}/retry", gpu=0, steps=5)
    assert answer.status_code == 400
    assert "go into params" in answer.data["errors"]["steps"][0]
    assert post(f"{old.pk}/retry", gpu=0, params={"steps": 5}).data["params"]["steps"] == 5

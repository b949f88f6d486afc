"""Faults that must not spread: one bad row, one unreadable file, one cancel at the wrong moment."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus.models import Gpu, Host
from jobs import dispatch, endings, paths, recovery, requeue
from jobs.models import Artifact, Attempt, Job, JobInput, Status
from jobs.turns import one_at_a_time
from tests.conftest import client_of
from tests.jobs.test_states import attempt_of, make_job, running, write_success

__all__ = ["running"]


def test_it_starts_the_others_when_one_cannot_be_judged(alice: User, three_cards: list[Gpu]) -> None:
    bad, good = make_job(alice), make_job(alice)
    JobInput.objects.create(job=bad, parameter="no_such_parameter")
    assert dispatch.schedule() == 1
    bad.refresh_from_db()
    good.refresh_from_db()
    assert (bad.status, good.status) == (Status.HELD, Status.STARTING)
    assert "could not be judged" in bad.error


def test_it_refuses_the_result_that_was_deleted(alice: User, three_cards: list[Gpu]) -> None:
    source = make_job(alice, kind="model_download", status=Status.SUCCEEDED)
    body = {"model": f"job:{source.pk}", "sites": [{"block": 0}]}
    answer = client_of(alice).post("/api/v1/jobs/activation_extraction/", body, format="json")
    assert answer.status_code == 400
    assert "not here any more" in answer.data["errors"]["model"][0]


def test_it_refuses_a_site_that_the_model_turned_out_not_to_have(alice: User, three_cards: list[Gpu]) -> None:
    source = make_job(alice, kind="model_download", status=Status.SUCCEEDED)
    Artifact.objects.create(type="model", name="tiny", owner=alice, job=source, manifest={"n_layers": 2})
    params = {"model": "job:x", "sites": [{"block": 7, "site": "resid_post"}], "context_size": 8}
    job = make_job(alice, kind="activation_extraction", params=params, estimate=None)
    JobInput.objects.create(job=job, parameter="model", source_job=source)
    dispatch.schedule()
    job.refresh_from_db()
    assert (job.status, job.failure_reason) == (Status.REFUSED, "invalid_input")
    assert "Block 7 does not exist" in job.error


@pytest.mark.parametrize("status", [Status.QUEUED, Status.PAUSED, Status.HELD])
def test_it_ends_what_was_cancelled_between_two_states(alice: User, living_host: Host, status: str) -> None:
    job = make_job(alice, status=status, cancel_requested_at=timezone.now())
    recovery.recover_host("alpha")
    job.refresh_from_db()
    assert job.status == Status.CANCELLED


def test_it_honours_a_cancel_when_a_launch_never_came_up(alice: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice)
    dispatch.schedule()
    job.refresh_from_db()
    Job.objects.update(cancel_requested_at=timezone.now())
    assert requeue.never_started(job, attempt_of(job), "no keeper")
    job.refresh_from_db()
    assert job.status == Status.CANCELLED


def test_it_pauses_a_lost_job_that_was_to_pause(running: Job) -> None:
    Job.objects.update(pause_requested_at=timezone.now())
    requeue.lost(running, attempt_of(running), "killed")
    running.refresh_from_db()
    assert running.status == Status.PAUSED


def test_it_fails_a_job_whose_end_cannot_be_read_and_repairs_the_next(
    alice: User, three_cards: list[Gpu]
) -> None:
    jobs = [make_job(alice) for _ in range(2)]
    assert dispatch.schedule() == 2
    Attempt.objects.update(keeper_pid=2**22, keeper_start=1)
    for job in jobs:
        job.refresh_from_db()
        assert job.move([Status.STARTING], Status.RUNNING)
    broken = paths.staging(jobs[0], 1) / "end.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    write_success(jobs[1])
    recovery.recover_host("alpha")
    for job in jobs:
        job.refresh_from_db()
    assert [job.status for job in jobs] == [Status.FAILED, Status.SUCCEEDED]
    assert "could not be kept" in jobs[0].error


def test_it_lets_one_recovery_round_run_at_a_time(living_host: Host) -> None:
    with one_at_a_time("recovery") as first, one_at_a_time("recovery") as second:
        assert (first, second) == (True, False)


def test_it_keeps_what_was_moved_when_two_carry_out_one_end(running: Job, settings: Any) -> None:
    end = write_success(running)
    source, target = (settings.MISTUDIO_HOME / name for name in end.moves[0])
    endings._move(source, target)
    endings._move(source, target)
    assert (target / "cfg.json").exists()


def test_it_asks_which_of_two_models_of_one_name_is_meant(
    alice: User, bob: User, staff: User, db: None
) -> None:
    for owner in (alice, bob):
        Artifact.objects.create(type="model", name="tiny", owner=owner, manifest={"n_layers": 2})
    body = {"model": "tiny", "sites": [{"block": 0}]}
    answer = client_of(staff).post("/api/v1/jobs/activation_extraction/", body, format="json")
    assert answer.status_code == 400
    assert "alice/tiny" in answer.data["errors"]["model"][0]

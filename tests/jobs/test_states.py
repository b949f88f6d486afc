"""The states of a job: moved by conditional updates only, fenced by the attempt."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from gpus.models import Gpu, Host
from jobs import dispatch, endings, losses, paths, requeue
from jobs.endings import End
from jobs.exceptions import Fenced
from jobs.journal import Journal
from jobs.models import ACTIVE, FINAL, WAITING, Artifact, Job, JobMetric, Lease, Outcome, Status, uuid7


def make_job(owner: User, **fields: Any) -> Job:
    return Job.objects.create(
        **{"kind": "rehearsal", "owner": owner, "estimate": {"memory_bytes": 1}} | fields
    )


@pytest.fixture
def running(alice: User, three_cards: list[Gpu]) -> Job:
    """A job that dispatch granted and whose work has begun."""
    job = make_job(alice)
    assert dispatch.schedule() == 1
    job.refresh_from_db()
    assert job.move([Status.STARTING], Status.RUNNING)
    return job


def attempt_of(job: Job) -> Any:
    return job.attempts.get(number=job.attempt)


def test_it_names_every_state_once() -> None:
    assert set(Status) == FINAL | ACTIVE | WAITING
    assert not (FINAL & ACTIVE) and not (FINAL & WAITING) and not (ACTIVE & WAITING)


def test_it_gives_ids_that_sort_by_time() -> None:
    ids = [uuid7() for _ in range(3)]
    assert all(i.version == 7 for i in ids)
    assert ids[0].int >> 80 <= ids[1].int >> 80 <= ids[2].int >> 80


def test_it_moves_once(running: Job) -> None:
    other = Job.objects.get(pk=running.pk)
    assert running.move(ACTIVE, Status.SUCCEEDED)
    assert not other.move(ACTIVE, Status.FAILED)
    other.refresh_from_db()
    assert other.status == Status.SUCCEEDED
    assert other.finished_at is not None


def test_it_refuses_what_an_older_attempt_writes(running: Job) -> None:
    old = Job.objects.get(pk=running.pk)
    assert requeue.lost(running, attempt_of(running), "killed")
    assert dispatch.schedule() == 1  # on another card: its own is still being released
    assert not old.update_fenced(progress={"done": 1})
    assert not old.move(ACTIVE, Status.SUCCEEDED)
    with pytest.raises(Fenced):
        Journal(old).report(1, 2, "steps", "late", "")


def test_it_claims_an_attempt_once(alice: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice)
    dispatch.schedule()
    job.refresh_from_db()
    attempt = attempt_of(job)
    assert attempt.claim(100, 1, "boot")
    assert not attempt.claim(101, 2, "boot")


def test_it_lets_the_database_judge_a_slot(running: Job) -> None:
    lease = Lease.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic():
        Lease.objects.create(
            resource=lease.resource, job_class="batch", slot=lease.slot, attempt=lease.attempt
        )


# Ends -------------------------------------------------------------------------------------------------


def write_success(job: Job) -> End:
    staged = paths.staging(job, job.attempt) / "artifacts" / "sae" / str(identity := uuid7())
    staged.mkdir(parents=True)
    (staged / "cfg.json").write_text("{}")
    move = (f".staging/{job.pk}-{job.attempt}/artifacts/sae/{identity}", f"artifacts/sae/{identity}")
    made = {"id": str(identity), "type": "sae", "name": "mine", "manifest": {}, "size_bytes": 2}
    end = End(Status.SUCCEEDED, result={"loss": 1.5}, moves=[move], artifacts=[made])
    endings.write(job, end)
    return end


def test_it_completes_a_written_end_whoever_comes(running: Job, settings: Any) -> None:
    end = write_success(running)
    adopter = Job.objects.get(pk=running.pk)
    assert endings.complete(adopter, attempt_of(running))
    assert not endings.complete(running, attempt_of(running))
    adopter.refresh_from_db()
    assert (adopter.status, adopter.result) == (Status.SUCCEEDED, {"loss": 1.5})
    assert (settings.MISTUDIO_HOME / end.moves[0][1] / "cfg.json").read_text() == "{}"
    assert Artifact.objects.get().name == "mine"
    assert Lease.objects.get().state == Lease.State.RELEASING
    assert not paths.staging(running, 1).exists()


def test_it_goes_on_where_a_crash_left_the_moves(running: Job, settings: Any) -> None:
    end = write_success(running)
    endings._move(settings.MISTUDIO_HOME / end.moves[0][0], settings.MISTUDIO_HOME / end.moves[0][1])
    assert endings.complete(running, attempt_of(running))
    assert Artifact.objects.count() == 1


def test_it_does_not_complete_for_a_job_that_another_attempt_holds(running: Job) -> None:
    write_success(running)
    attempt = attempt_of(running)
    Job.objects.filter(pk=running.pk).update(attempt=2)
    assert not endings.complete(running, attempt)
    assert Artifact.objects.count() == 0


def test_it_gives_a_second_artifact_a_name_of_its_own(running: Job, alice: User) -> None:
    Artifact.objects.create(type="sae", name="mine", owner=alice)
    write_success(running)
    endings.complete(running, attempt_of(running))
    assert set(Artifact.objects.values_list("name", flat=True)) == {"mine", "mine-2"}


def test_it_queues_a_lost_job_again_and_keeps_a_cancel(running: Job) -> None:
    Job.objects.filter(pk=running.pk).update(cancel_requested_at=running.queued_at)
    requeue.lost(running, attempt_of(running), "killed")
    running.refresh_from_db()
    assert running.status == Status.CANCELLED


def lose(job: Job, detail: str = "killed") -> None:
    job.refresh_from_db()
    job.move([Status.STARTING], Status.RUNNING)
    attempt = attempt_of(job)
    requeue.lost(job, attempt, detail)
    Lease.objects.update(state=Lease.State.ENDED, ended_at=job.queued_at)
    dispatch.schedule()
    job.refresh_from_db()


def test_it_fails_a_job_lost_three_times_at_the_same_place(running: Job) -> None:
    running.attempts.update(start_checkpoint=losses.progress_mark(running))
    for number in (1, 2, 3):
        assert running.attempt == number
        running.attempts.update(start_checkpoint=losses.progress_mark(running))
        lose(running)
    assert (running.status, running.failure_reason) == (Status.FAILED, "lost")
    assert "3 times" in running.error


def test_it_counts_anew_after_a_newer_checkpoint(running: Job) -> None:
    for step in range(5):
        running.attempts.filter(number=running.attempt).update(start_checkpoint=losses.progress_mark(running))
        (paths.checkpoints(running) / f"step-{step}").mkdir(parents=True)
        lose(running)
    assert running.status == Status.STARTING
    assert set(running.attempts.exclude(number=6).values_list("outcome", flat=True)) == {Outcome.LOST}


# Progress ---------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_stores_progress_every_five_seconds_and_at_stage_changes(running: Job) -> None:
    clock = Clock()
    journal = Journal(running, clock)

    def stored() -> Any:
        running.refresh_from_db()
        return running.progress.get("done")

    journal.report(1, 10, "steps", "train", "")
    assert stored() == 1
    clock.now = 3.0
    journal.report(3, 10, "steps", "train", "")
    assert stored() == 1
    clock.now = 6.0
    journal.report(6, 10, "steps", "train", "")
    assert stored() == 6
    assert running.progress["eta_seconds"] == pytest.approx(4 / (5 / 6), rel=1e-6)
    clock.now = 6.1
    journal.report(0, 4, "batches", "evaluate", "")
    assert (stored(), running.progress["stage"]) == (0, "evaluate")


def test_it_writes_a_line_into_the_log_now_and_then(running: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jobs.journal")
    clock = Clock()
    journal = Journal(running, clock)
    journal.report(0, 10, "steps", "train", "")
    for clock.now in (1.0, 5.0, 14.0, 16.0, 20.0):
        journal.metric(int(clock.now), {"loss": 39.81, "l0": 32.0})
        journal.report(int(clock.now) // 2, 10, "steps", "train", "")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "train: 0 of 10 steps (0%)"
    assert lines[1:] == ["train: 7 of 10 steps (70%), 0.5/s, 6 s left; loss 39.81, l0 32"]
    journal.report(0, 4, "batches", "evaluate", "")
    assert "train: 10 of 10 steps (100%)" in caplog.messages[-2]
    assert caplog.messages[-1] == "evaluate: 0 of 4 batches (0%)"
    journal.report(0, 0, "", "measure", "")
    assert caplog.messages[-1].startswith("measure") and "0 of 0" not in caplog.messages[-1]


def test_it_keeps_the_newest_value_of_a_step(running: Job) -> None:
    journal = Journal(running)
    journal.metric(1, {"loss": 2.0})
    journal.store_now()
    journal.metric(1, {"loss": 1.0, "fvu": float("nan")})
    journal.store_now()
    assert dict(JobMetric.objects.values_list("name", "value")) == {"loss": 1.0, "fvu": None}


def test_it_cannot_start_on_a_host_that_is_silent(
    alice: User, living_host: Host, three_cards: list[Gpu]
) -> None:
    Host.objects.update(worker_seen_at=None)
    job = make_job(alice)
    assert dispatch.schedule() == 0
    job.refresh_from_db()
    assert job.waiting_for["reason"] == "card"
    assert "worker of alpha is silent" in job.waiting_for["detail"]

"""Stages, verbs, limits, losses and silence, row by row; with real processes in `tests/chaos`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus import health
from gpus.models import Gpu, Host, Pulse
from jobs import dispatch, endings, losses, overtime, paths, recovery, remedies, requeue, takeover, verbs
from jobs.context import WorkContext
from jobs.exceptions import HandedOver
from jobs.models import Attempt, Job, JobEvent, Lease, Outcome, Status
from jobs.pace import Pace
from tests.conftest import client_of
from tests.jobs.test_states import attempt_of, make_job

pytestmark = pytest.mark.django_db


def run(job: Job, *, keeper: bool = True) -> Job:
    """Granted and, with a keeper, claimed and running."""
    assert dispatch.schedule() >= 1
    job.refresh_from_db()
    if keeper:
        job.attempts.filter(number=job.attempt).update(keeper_pid=1, started_at=timezone.now())
        assert job.move([Status.STARTING], Status.RUNNING, started_at=timezone.now())
    return job


def free_all() -> None:
    Lease.objects.update(state=Lease.State.ENDED, ended_at=timezone.now())


@pytest.fixture
def post(alice: User, three_cards: list[Gpu]) -> Any:
    client = client_of(alice)
    return lambda path="rehearsal/", **body: client.post(f"/api/v1/jobs/{path}", body, format="json")


def keep_checkpoint(job: Job, step: int = 3) -> None:
    (paths.checkpoints(job) / f"step-{step:09d}").mkdir(parents=True, exist_ok=True)


# Hand-over ----------------------------------------------------------------------------------------------


@pytest.fixture
def staged(post: Any, three_cards: list[Gpu]) -> Job:
    """A job whose first stage runs, without a card; it asked for card 1."""
    job = Job.objects.get(pk=post(gpu=1, hand_over_at=2, steps=4).data["id"])
    return run(job)


def test_a_first_stage_takes_no_card(staged: Job) -> None:
    assert (staged.needs_card, staged.device, staged.gpu_uuid, staged.gpu_uuids) == (False, "cpu", None, [])
    assert Lease.objects.get().resource == "cpu:alpha"


def hand_over(job: Job) -> None:
    context = WorkContext(job, attempt_of(job), "cpu", False)
    with pytest.raises(HandedOver) as order:
        context.hand_over("card")
    endings.write(job, endings.End(Status.QUEUED, stage=order.value.stage))
    assert endings.complete(job, attempt_of(job))
    job.refresh_from_db()


def test_a_hand_over_queues_the_same_run_for_its_card(staged: Job, three_cards: list[Gpu]) -> None:
    hand_over(staged)
    assert (staged.status, staged.stage, staged.needs_card, staged.device) == ("queued", "card", True, "cuda")
    assert attempt_of(staged).outcome == Outcome.HANDED_OVER
    assert not paths.staging(staged, 1).exists()
    free_all()
    assert dispatch.schedule() == 1
    staged.refresh_from_db()
    assert (staged.gpu_uuid, staged.attempt) == (three_cards[1].uuid, 2)
    assert staged.estimate["breakdown"]["on the card"] == 2**20  # judged anew, for this stage


@pytest.mark.parametrize(("asked", "status"), [("cancel", "cancelled"), ("pause", "paused")])
def test_what_was_asked_meanwhile_counts(staged: Job, asked: str, status: str) -> None:
    Job.objects.update(**{f"{asked}_requested_at": timezone.now()})
    hand_over(staged)
    assert (staged.status, staged.stage) == (status, "card")
    assert attempt_of(staged).outcome == Outcome.ENDED


def test_only_a_stage_of_the_kind_is_handed_over_to(staged: Job) -> None:
    with pytest.raises(ValueError, match="not a stage"):
        WorkContext(staged, attempt_of(staged), "cpu", False).hand_over("elsewhere")


def test_the_card_of_a_later_stage_is_judged_at_submit(post: Any) -> None:
    assert post(gpu=7, hand_over_at=2).data["code"] == "unknown_gpu"
    too_large = post(gpu=0, hand_over_at=2, card_stage_mib=30 * 1024)
    assert (too_large.status_code, too_large.data["code"]) == (400, "model_too_large")
    assert Job.objects.count() == 0


def test_a_retry_from_the_checkpoint_begins_in_its_stage(staged: Job, alice: User) -> None:
    hand_over(staged)
    keep_checkpoint(staged)
    staged.move([Status.QUEUED], Status.FAILED)
    client = client_of(alice)
    onward = client.post(f"/api/v1/jobs/{staged.pk}/retry/")
    anew = client.post(f"/api/v1/jobs/{staged.pk}/retry/", {"from": "start"}, format="json")
    rows = [Job.objects.get(pk=answer.data["id"]) for answer in (onward, anew)]
    assert [(row.stage, row.needs_card) for row in rows] == [("card", True), ("", False)]


# Pause and resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "says"),
    [("queued", "Hold it"), ("held", "released"), ("paused", "already"), ("failed", "ended")],
)
def test_only_a_running_job_is_paused(post: Any, alice: User, status: str, says: str) -> None:
    job = make_job(alice, status=status)
    answer = post(f"{job.pk}/pause/")
    assert (answer.status_code, says in answer.data["detail"]) == (409, True)
    job.refresh_from_db()
    assert job.pause_requested_at is None  # nothing of the request stays


def test_a_start_that_nobody_claimed_is_paused_at_once(
    post: Any, alice: User, three_cards: list[Gpu]
) -> None:
    """And its resume asks for what was asked for: that grant was never taken up."""
    job = run(make_job(alice), keeper=False)
    assert post(f"{job.pk}/pause/").data["status"] == "paused"
    assert not Lease.objects.filter(ended_at=None).exists()
    assert post(f"{job.pk}/resume/").data["gpu_wanted"] == "auto"


def test_a_resume_asks_for_the_card_of_the_last_attempt_that_ran(
    post: Any, alice: User, three_cards: list[Gpu]
) -> None:
    job = run(make_job(alice))
    card = job.gpu_uuid
    Job.objects.update(pause_requested_at=timezone.now())
    assert requeue.lost(job, attempt_of(job), "killed while it paused")
    answer = post(f"{job.pk}/resume/")
    assert (answer.data["status"], answer.data["gpu_wanted"], answer.data["gpu_request"]) == (
        "queued",
        card,
        "auto",
    )


def test_a_pause_that_comes_while_it_is_handed_back_is_not_lost(alice: User, three_cards: list[Gpu]) -> None:
    job = run(make_job(alice), keeper=False)
    Job.objects.update(pause_requested_at=timezone.now())
    assert requeue.handed_back(job, attempt_of(job), "full", {"gpu_uuid": job.gpu_uuid, "at": "x"})
    job.refresh_from_db()
    assert (job.status, job.waiting_for) == (Status.PAUSED, None)


# Finalize -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["paused", "cancelled", "failed"])
def test_a_training_that_ended_early_is_finalized_without_a_card(post: Any, alice: User, status: str) -> None:
    job = make_job(alice, status=status, params={"steps": 9}, name="mine", priority=-3)
    keep_checkpoint(job)
    for name in (".measured.json", ".tmp-half.json"):
        (paths.checkpoints(job) / name).write_text(name)
    answer = post(f"{job.pk}/finalize/")
    made = Job.objects.get(pk=answer.data["id"])
    assert [file.read_text() for file in paths.checkpoints(made).glob(".*")] == [".measured.json"]
    assert (answer.status_code, made.status, made.device, made.needs_card) == (202, "queued", "cpu", False)
    assert (made.retry_of, made.retry_from, made.stage) == (job, "finalize", "finalize")
    assert (made.name, made.priority, made.params["steps"]) == ("mine", -3, 9)
    assert endings.newest_checkpoint(made) == "step-000000003"
    job.refresh_from_db()
    assert job.status == status


@pytest.mark.parametrize(
    ("fields", "kept", "says"),
    [
        ({"status": "failed", "kind": "model_download"}, True, "only a training does"),
        ({"status": "running"}, True, "this one is running"),
        ({"status": "succeeded"}, True, "this one is succeeded"),
        ({"status": "failed"}, False, "left no checkpoint"),
    ],
)
def test_what_cannot_be_finalized_says_why(
    post: Any, alice: User, fields: dict[str, Any], kept: bool, says: str
) -> None:
    job = make_job(alice, **fields)
    if kept:
        keep_checkpoint(job)
    answer = post(f"{job.pk}/finalize/")
    assert (answer.status_code, answer.data["code"]) == (409, "conflict")
    assert says in answer.data["detail"]


# Time limit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, 1.5, "soon", True])
def test_a_limit_is_a_whole_number_of_seconds(post: Any, limit: Any) -> None:
    assert "time_limit_seconds" in post(time_limit_seconds=limit).data["errors"]


def test_the_limit_counts_the_running_of_all_attempts(post: Any) -> None:
    job = run(Job.objects.get(pk=post(time_limit_seconds=100).data["id"]))
    job.attempts.update(ran_seconds=60)
    assert not overtime.is_up(job)
    requeue.lost(job, attempt_of(job), "killed")
    free_all()
    run(job)
    job.attempts.filter(number=2).update(ran_seconds=41)
    assert requeue.lost(job, attempt_of(job), "killed")
    job.refresh_from_db()
    assert (job.status, job.failure_reason) == ("failed", "timeout")
    assert job.error == "It ran for 101 s, over 2 attempts; its limit is 100 s."
    assert "retry" in job.hint.lower()


# Losses ---------------------------------------------------------------------------------------------------


def lose(job: Job, detail: str = "the work was ended by SIGKILL", *, counted: bool = True) -> None:
    job.refresh_from_db()
    if job.status == Status.QUEUED:
        free_all()
        run(job)
    job.attempts.filter(number=job.attempt).update(start_checkpoint=losses.progress_mark(job), ran_seconds=12)
    requeue.lost(job, attempt_of(job), detail, counted=counted)
    job.refresh_from_db()


def test_three_losses_end_it_with_their_story(alice: User, three_cards: list[Gpu]) -> None:
    job = run(make_job(alice))
    keep_checkpoint(job)
    for why in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        assert job.status != Status.FAILED
        lose(job, f"the work was ended by {why}")
    assert (job.status, job.failure_reason) == (Status.FAILED, "lost")
    assert "3 times in a row" in job.error and "step-000000003" in job.error
    for number, why in enumerate(("SIGKILL", "SIGSEGV", "SIGABRT"), 1):
        assert f"attempt {number} at " in job.error and f"ended by {why}" in job.error
    assert "after 12 s on GPU-" in job.error
    assert job.hint


def test_losses_that_are_not_its_own_count_for_nothing(alice: User, three_cards: list[Gpu]) -> None:
    """Two of its own, ten of the host, the card or the database between them, and pauses: it still may try."""
    job = run(make_job(alice))
    for counted in (True, *[False] * 5, True, *[False] * 5):
        lose(job, counted=counted)
    assert job.status == Status.QUEUED
    lose(job)
    assert job.failure_reason == "lost"
    assert "attempt 1 at" in job.error and "attempt 7 at" in job.error and "attempt 13 at" in job.error


def test_a_reboot_does_not_count_and_a_killed_keeper_does(alice: User, three_cards: list[Gpu]) -> None:
    for boot, counted in (("before", False), (None, True)):
        job = run(make_job(alice))
        values = {"boot_id": boot} if boot else {}
        job.attempts.update(keeper_pid=2**22, keeper_start=1, **values)
        recovery.end_if_orphan(attempt_of(job))
        assert (attempt_of(job).outcome, attempt_of(job).counted) == ("lost", counted)
        Job.objects.all().update(status=Status.CANCELLED)


def test_ten_pauses_are_no_losses(alice: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice)
    for _ in range(10):
        run(job)
        Job.objects.update(pause_requested_at=timezone.now())
        lose(job)
        assert job.status == Status.PAUSED
        job.move([Status.PAUSED], Status.QUEUED, pause_requested_at=None)
        free_all()
    assert not job.attempts.filter(counted=True).exists()


def test_a_launch_that_failed_says_the_last_line_of_its_log(alice: User, three_cards: list[Gpu]) -> None:
    job = run(make_job(alice), keeper=False)
    paths.log_file(job).parent.mkdir(parents=True, exist_ok=True)
    paths.log_file(job).write_text("first\nImportError: libcuda.so.1: cannot open\n\n")
    assert requeue.never_started(job, attempt_of(job), "no keeper claimed the attempt")
    job.refresh_from_db()
    assert job.waiting_for["detail"].endswith("its log ends: ImportError: libcuda.so.1: cannot open")
    assert job.waiting_for["failures"] == 1


def test_launches_that_fail_again_and_again_show_in_health(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "broker_answers", lambda: True)
    job = make_job(alice)
    for failures, status in enumerate(("ok", "ok", "degraded"), 1):
        Job.objects.update(not_before=None)
        run(job, keeper=False)
        assert requeue.never_started(job, attempt_of(job), "no keeper claimed the attempt")
        free_all()
        found = health.state()
        assert (found["status"], found["checks"]["failed_launches"]) == (status, failures // 3)


def test_only_launches_that_failed_make_the_next_one_wait_longer(alice: User, three_cards: list[Gpu]) -> None:
    """A work that found its card too full came up."""
    job = make_job(alice)
    for _ in range(4):
        run(job, keeper=False)
        skip = {"gpu_uuid": "GPU-of-another", "at": timezone.now().isoformat()}
        assert requeue.handed_back(job, attempt_of(job), "fuller than its reading said", skip)
        free_all()
    run(job, keeper=False)
    assert requeue.never_started(job, attempt_of(job), "no keeper claimed the attempt")
    job.refresh_from_db()
    assert job.waiting_for["failures"] == 1


def test_who_releases_a_job_does_not_wait_for_its_next_launch(alice: User, three_cards: list[Gpu]) -> None:
    job = run(make_job(alice), keeper=False)
    assert requeue.never_started(job, attempt_of(job), "no keeper claimed the attempt")
    free_all()
    assert dispatch.schedule() == 0
    job.refresh_from_db()
    verbs.release(verbs.hold(job, alice), alice)
    assert dispatch.schedule() == 1


# What broke it --------------------------------------------------------------------------------------------


def test_out_of_memory_tells_numbers_and_half_the_batch(alice: User) -> None:
    job = make_job(
        alice, kind="sae_training", params={"batch_size": 4096}, estimate={"memory_bytes": 3 * 2**30}
    )
    reason, says, hint = remedies.of(job, MemoryError("could not allocate"))
    assert reason == "out_of_memory"
    assert says.startswith("MemoryError: could not allocate It was estimated at 3.0 GiB; ")
    assert says.endswith(" at its peak.")
    assert '{"batch_size": 2048}' in hint


@pytest.mark.parametrize(
    ("reason", "params", "suggested"),
    [
        ("non_finite", {"lr": 0.01}, {"lr": 0.005}),
        ("out_of_memory", {"batch_size": 16}, {}),  # the kind takes no less
        ("out_of_memory", {}, {}),
        ("disk_full", {"batch_size": 64}, {}),
    ],
)
def test_a_kind_suggests_what_it_would_take(reason: str, params: dict[str, Any], suggested: Any) -> None:
    from jobs import registry

    assert registry.get("sae_training").suggest(reason, params) == suggested


# Stalled --------------------------------------------------------------------------------------------------


def pace() -> tuple[Pace, Callable[[float, int], None]]:
    now = [0.0]
    watched = Pace(lambda: now[0])

    def at(moment: float, done: int) -> None:
        now[0] = moment
        watched.see({"done": done, "rate": moment})

    return watched, at


def test_a_work_is_stalled_after_ten_times_its_usual_interval() -> None:
    watched, at = pace()
    for moment in range(0, 2000, 200):
        at(moment, moment)
    at(1800 + 2000, 1800)
    assert not watched.stalled
    at(1800 + 2001, 1800)
    assert watched.stalled
    assert watched.in_words() == "no progress for 2001 s; as a rule it reports every 200 s"
    at(1800 + 2002, 1801)
    assert not watched.stalled


def test_no_work_is_stalled_within_a_quarter_of_an_hour_or_while_nobody_could_look() -> None:
    watched, at = pace()
    for moment in range(10):
        at(moment, moment)
    at(900, 9)
    assert not watched.stalled
    watched.look_away()
    at(1799, 9)
    assert not watched.stalled
    at(1801, 9)
    assert watched.stalled


# Hosts that are silent ------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(alice: User, three_cards: list[Gpu], settings: Any) -> Job:
    """A job that runs on alpha, whose keeper would stop by itself after a minute; we are beta."""
    settings.MISTUDIO_FENCE_SECONDS = 60
    job = run(make_job(alice))
    job.attempts.update(silent_seconds=0.0)
    return job


def rounds(count: int, seconds: float) -> None:
    """So many rounds of recovery on beta, so many seconds apart."""
    beta, _ = Host.objects.get_or_create(name="beta")
    for _ in range(count):
        for attempt in takeover.silent_too_long(beta):
            recovery.take_over(attempt)
        Pulse.objects.filter(name=takeover.ROUND).update(at=timezone.now() - timedelta(seconds=seconds))


def test_others_take_over_after_one_and_a_half_times_the_fence(elsewhere: Job) -> None:
    rounds(10, 10)  # nine steps of 10 s: 90 s and a little
    elsewhere.refresh_from_db()
    attempt = attempt_of(elsewhere)
    assert (elsewhere.status, attempt.outcome, attempt.counted) == ("queued", "lost", False)
    assert attempt.detail.startswith("host alpha was silent for 90")
    assert JobEvent.objects.filter(job=elsewhere, event="lost").exists()


@pytest.mark.parametrize(
    ("count", "seconds", "why"),
    [(9, 10, "too early"), (20, 31, "no round could write in between, so no heartbeat could")],
)
def test_nobody_takes_over_sooner(elsewhere: Job, count: int, seconds: float, why: str) -> None:
    rounds(count, seconds)
    elsewhere.refresh_from_db()
    assert elsewhere.status == "running", why


def test_a_heartbeat_begins_the_count_anew(elsewhere: Job) -> None:
    rounds(8, 10)
    assert attempt_of(elsewhere).silent_seconds > 60
    elsewhere.attempts.update(silent_seconds=0.0)
    rounds(8, 10)
    elsewhere.refresh_from_db()
    assert elsewhere.status == "running"


def test_a_keeper_that_would_not_stop_itself_is_never_taken_over(elsewhere: Job) -> None:
    Attempt.objects.update(silent_seconds=None)
    rounds(20, 10)
    elsewhere.refresh_from_db()
    assert elsewhere.status == "running"


def test_a_host_takes_nothing_over_from_itself(elsewhere: Job, living_host: Host) -> None:
    for _ in range(3):
        Pulse.objects.update_or_create(
            name=takeover.ROUND, defaults={"at": timezone.now() - timedelta(seconds=29)}
        )
        assert not list(takeover.silent_too_long(living_host))
    assert attempt_of(elsewhere).silent_seconds == 0

"""What waits, what is refused, and with which numbers: cards that went away, memory in other hands, full disks."""

from __future__ import annotations

import shutil
from collections import namedtuple
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus.models import Gpu, Host
from jobs import arrival, dispatch, placement, requeue
from jobs.exceptions import JobRejected
from jobs.memory import GIB
from jobs.models import Job, Outcome, Status
from tests.conftest import make_card
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db
STRANGER = {"pid": 4_000_001, "name": "python", "type": "compute"}


def named(owner: User, card: Gpu, **fields: Any) -> Job:
    return make_job(owner, gpu_request=card.uuid, gpu_wanted=card.uuid, **fields)


def after_dispatch(job: Job) -> Job:
    dispatch.schedule()
    job.refresh_from_db()
    return job


@pytest.mark.parametrize(
    "change", [{"enabled": False}, {"selectable": False}, {"removed_at": timezone.now()}]
)
def test_a_named_card_that_went_away_refuses_and_auto_goes_elsewhere(
    alice: User, three_cards: list[Gpu], change: dict[str, Any]
) -> None:
    Gpu.objects.filter(pk=three_cards[0].pk).update(**change)
    refused, auto = after_dispatch(named(alice, three_cards[0])), after_dispatch(make_job(alice))
    assert (refused.status, refused.failure_reason) == ("refused", "card_unavailable")
    assert "card 0" in refused.error.lower()
    assert "another card" in refused.hint
    assert auto.gpu_uuid == three_cards[1].uuid


def test_a_named_card_that_is_lost_is_waited_for_ten_minutes(alice: User, three_cards: list[Gpu]) -> None:
    card = Gpu.objects.filter(pk=three_cards[0].pk)
    card.update(lost_at=timezone.now() - timedelta(seconds=590))
    job = after_dispatch(named(alice, three_cards[0]))
    assert (job.status, job.waiting_for["reason"]) == ("queued", "card")
    card.update(lost_at=timezone.now() - timedelta(seconds=601))
    assert after_dispatch(job).failure_reason == "card_unavailable"


def test_a_driver_that_broke_makes_auto_wait_with_the_repair(
    alice: User, living_host: Host, three_cards: list[Gpu]
) -> None:
    Host.objects.update(backend_error="The NVIDIA driver does not answer: reboot.")
    job = after_dispatch(make_job(alice))
    assert (job.status, job.waiting_for["reason"]) == ("queued", "driver")
    assert "reboot" in job.waiting_for["detail"]


def hold(card: Gpu, gib: float, free_gib: float) -> None:
    """A stranger with so much memory, listed now."""
    entry = STRANGER | {"memory_used_bytes": int(gib * GIB)}
    reading = card.reading | {
        "memory_used_bytes": int((24 - free_gib) * GIB),
        "memory_free_bytes": int(free_gib * GIB),
    }
    now = timezone.now()
    Gpu.objects.filter(pk=card.pk).update(
        processes=[entry], processes_at=now, reading=reading, sampled_at=now
    )


def seen_long_ago(job: Job) -> None:
    """As if the first sight of every card that is too full had been long enough ago."""
    job.refresh_from_db()
    then = (timezone.now() - timedelta(seconds=placement.SHORT_SECONDS)).isoformat()
    short = dict.fromkeys(job.waiting_for["short"], then)
    Job.objects.filter(pk=job.pk).update(waiting_for=job.waiting_for | {"short": short})


def test_it_refuses_a_named_card_only_at_the_second_reading(alice: User, three_cards: list[Gpu]) -> None:
    hold(three_cards[0], 20, free_gib=4)
    job = after_dispatch(named(alice, three_cards[0], estimate={"memory_bytes": 8 * GIB}))
    assert (job.status, job.waiting_for["reason"]) == ("queued", "outside")
    assert after_dispatch(job).status == "queued"  # the same reading proves nothing new
    seen_long_ago(job)
    hold(three_cards[0], 20, free_gib=4)
    refused = after_dispatch(job)
    assert (refused.status, refused.failure_reason) == ("refused", "insufficient_gpu_memory")
    for part in ("needs 8.0 GiB", "reserve of 0.5 GiB", "has 4.0 GiB", "20.0 of 24.0 GiB", "pid 4000001"):
        assert part in refused.error
    assert "card 1, 2" in refused.hint


def test_each_card_is_read_twice_before_auto_is_refused(alice: User, three_cards: list[Gpu]) -> None:
    for card in three_cards:
        hold(card, 20, free_gib=4)
    Gpu.objects.filter(pk=three_cards[2].pk).update(removed_at=timezone.now())
    job = after_dispatch(make_job(alice, estimate={"memory_bytes": 8 * GIB}))
    assert job.waiting_for["reason"] == "outside"
    seen_long_ago(job)
    Gpu.objects.filter(pk=three_cards[2].pk).update(
        removed_at=None
    )  # short, too, and seen for the first time
    for card in three_cards:
        hold(card, 20, free_gib=4)
    assert after_dispatch(job).status == "queued"
    seen_long_ago(job)
    for card in three_cards:
        hold(card, 20, free_gib=4)
    assert after_dispatch(job).failure_reason == "insufficient_gpu_memory"


def test_a_reading_that_got_better_starts_the_job(alice: User, three_cards: list[Gpu]) -> None:
    hold(three_cards[0], 20, free_gib=4)
    job = after_dispatch(named(alice, three_cards[0], estimate={"memory_bytes": 8 * GIB}))
    hold(three_cards[0], 2, free_gib=22)
    assert after_dispatch(job).status == "starting"


def test_it_waits_where_it_would_fit_once_our_job_ends(alice: User, living_host: Host) -> None:
    card = make_card(living_host, 0, max_jobs=2)
    first = named(alice, card, estimate={"memory_bytes": 20 * GIB})
    assert after_dispatch(first).status == "starting"
    second = after_dispatch(named(alice, card, estimate={"memory_bytes": 8 * GIB}))
    assert (second.status, second.waiting_for["reason"]) == ("queued", "memory")
    assert "4.0 GiB free now" in second.waiting_for["detail"]


def test_auto_waits_while_one_card_may_come_back(alice: User, three_cards: list[Gpu]) -> None:
    for card in three_cards[:2]:
        hold(card, 20, free_gib=4)
    Gpu.objects.filter(pk=three_cards[2].pk).update(sampled_at=timezone.now() - timedelta(seconds=60))
    job = after_dispatch(make_job(alice, estimate={"memory_bytes": 8 * GIB}))
    assert (job.status, job.waiting_for["reason"]) == ("queued", "memory")


def test_a_disk_without_room_refuses_with_the_numbers(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 * GIB, 90 * GIB, 10 * GIB))
    fits = after_dispatch(make_job(alice, estimate={"memory_bytes": 1, "disk_bytes": 5 * GIB}))
    assert fits.status == "starting"
    refused = after_dispatch(make_job(alice, estimate={"memory_bytes": 1, "disk_bytes": 5 * GIB + 1}))
    assert (refused.status, refused.failure_reason) == ("refused", "disk_full")
    assert "10.0 GiB of the disk are free, 5.0 GiB stay so" in refused.error


# On arrival -------------------------------------------------------------------------------------------------


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the agent answers for every card that is asked for freshly."""
    said: dict[str, Any] = {
        "reading": {"memory_used_bytes": 0, "memory_free_bytes": 24 * GIB},
        "processes": [],
    }
    monkeypatch.setattr("gpus.agent_client.fresh", lambda uuid: said)
    monkeypatch.setattr(arrival.time, "sleep", lambda seconds: None)
    return said


def arrived(job: Job) -> None:
    assert after_dispatch(job).status == "starting"
    arrival.check_room(job, job.attempts.get(number=job.attempt))


def fill(answer: dict[str, Any]) -> None:
    """A stranger came between the grant and the arrival."""
    answer["reading"] = {"memory_used_bytes": 20 * GIB, "memory_free_bytes": 4 * GIB}
    answer["processes"] = [STRANGER | {"memory_used_bytes": 20 * GIB}]


def test_on_arrival_a_card_with_room_is_used(alice: User, three_cards: list[Gpu], answer: Any) -> None:
    arrived(make_job(alice, estimate={"memory_bytes": 8 * GIB}))


def test_on_arrival_a_named_card_in_other_hands_refuses(
    alice: User, three_cards: list[Gpu], answer: dict[str, Any]
) -> None:
    fill(answer)
    with pytest.raises(JobRejected, match=r"needs 8\.0 GiB") as refusal:
        arrived(named(alice, three_cards[0], estimate={"memory_bytes": 8 * GIB}))
    assert refusal.value.reason == "insufficient_gpu_memory"


def test_on_arrival_auto_goes_back_and_past_that_reading_of_that_card(
    alice: User, three_cards: list[Gpu], answer: dict[str, Any]
) -> None:
    fill(answer)
    job = make_job(alice, estimate={"memory_bytes": 8 * GIB})
    with pytest.raises(arrival.HandedBack) as back:
        arrived(job)
    attempt = job.attempts.get(number=1)
    assert requeue.handed_back(job, attempt, str(back.value), back.value.skip)
    attempt.refresh_from_db()
    assert attempt.outcome == Outcome.NEVER_STARTED
    assert "had 4.0 GiB free" in attempt.detail
    job.refresh_from_db()
    assert job.status == Status.QUEUED
    again = after_dispatch(job)
    assert (again.status, again.gpu_uuid) == ("starting", three_cards[1].uuid)


def test_on_arrival_a_silent_agent_leaves_the_grant_as_it_is(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpus.agent_client.fresh", lambda uuid: None)
    arrived(make_job(alice, estimate={"memory_bytes": 8 * GIB}))


# Found in review --------------------------------------------------------------------------------------------


def test_a_job_of_ours_that_the_card_is_slow_to_forget_is_no_stranger(alice: User, living_host: Host) -> None:
    """Its lease is being released, and the driver still lists its process, which is gone."""
    settings_host = make_card(living_host, 0)
    first = named(alice, settings_host, estimate={"memory_bytes": 20 * GIB})
    assert after_dispatch(first).status == "starting"
    first.attempts.update(work_pid=STRANGER["pid"], work_start=1)
    first.attempts.get().leases.update(state="releasing")
    hold(settings_host, 20, free_gib=4)
    second = after_dispatch(named(alice, settings_host, estimate={"memory_bytes": 8 * GIB}))
    assert (second.status, second.waiting_for["reason"]) == ("queued", "lease")


def test_auto_takes_no_card_that_is_split(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, info={"mig_mode": True, "mig_parent": None})
    job = after_dispatch(make_job(alice))
    assert job.status == "queued"
    assert "MIG" in job.waiting_for["detail"]


def test_an_old_list_of_processes_says_nothing(alice: User, three_cards: list[Gpu]) -> None:
    hold(three_cards[0], 20, free_gib=24)
    Gpu.objects.update(processes_at=timezone.now() - timedelta(hours=2), reading=three_cards[0].reading)
    assert (
        after_dispatch(named(alice, three_cards[0], estimate={"memory_bytes": 8 * GIB})).status == "starting"
    )


def test_a_pause_that_came_before_the_hand_back_counts(alice: User, three_cards: list[Gpu]) -> None:
    job = after_dispatch(make_job(alice))
    Job.objects.update(pause_requested_at=timezone.now())
    requeue.handed_back(job, job.attempts.get(), "full", {"gpu_uuid": job.gpu_uuid, "at": "x"})
    job.refresh_from_db()
    assert job.status == "paused"


def test_a_full_disk_does_not_end_a_job_that_has_its_files_there(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 * GIB, 99 * GIB, GIB))
    job = make_job(alice, estimate={"memory_bytes": 1, "disk_bytes": 5 * GIB}, attempt=1)
    assert after_dispatch(job).status == "starting"

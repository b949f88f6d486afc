"""The order of the queue: lines, positions in them, limits of users, and who was passed over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from gpus.models import Gpu, Host
from jobs import dispatch, placement, places, submit
from jobs.memory import GIB
from jobs.models import Job, Lease, Status
from monitor import joblist
from tests.conftest import client_of, make_card
from tests.jobs.test_placement import after_dispatch, hold, named
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db


def queue_up(owner: User, count: int, **fields: Any) -> list[Job]:
    estimate = fields.pop("estimate", {"memory_bytes": GIB})
    rows = [Job(kind="rehearsal", owner=owner, estimate=estimate, **fields) for _ in range(count)]
    return Job.objects.bulk_create(rows)


def queries_of(act: Any) -> int:
    with CaptureQueriesContext(
        connection,
    ) as seen:
        act()
    return len(seen)


def end_all() -> None:
    Lease.objects.filter(ended_at=None).update(ended_at=timezone.now(), state=Lease.State.ENDED)


def told(job: Job) -> dict[str, Any]:
    """Why it waits, as somebody reads it who asks now."""
    job.refresh_from_db()
    places.tell([job])
    return job.waiting_for or {}


# Ten thousand -------------------------------------------------------------------------------------------------


def test_a_round_costs_what_its_lines_cost_not_what_its_jobs_cost(
    alice: User, three_cards: list[Gpu]
) -> None:
    for card in three_cards:
        make_job(alice, gpu_wanted=card.uuid)
    assert dispatch.schedule() == 3
    costs = []
    for count in (3, 300):
        for request in ("auto", three_cards[0].uuid):
            queue_up(alice, count, gpu_wanted=request)
        dispatch.schedule()  # writes down why the first of each waits
        costs.append(queries_of(dispatch.schedule))
    assert costs[0] == costs[1] < 20


def test_a_round_that_starts_one_of_many_asks_no_other(alice: User, three_cards: list[Gpu]) -> None:
    for card in three_cards:
        make_job(alice, gpu_wanted=card.uuid)
    dispatch.schedule()
    waiting = queue_up(alice, 300, gpu_wanted=three_cards[1].uuid)
    first, cost = waiting[0], []
    for _ in range(2):
        dispatch.schedule()
        Lease.objects.filter(resource=three_cards[1].resource).update(ended_at=timezone.now(), state="ended")
        cost.append(queries_of(dispatch.schedule))
        first.refresh_from_db()
        assert (first.status, first.gpu_uuid) == ("starting", three_cards[1].uuid)
        first = waiting[1]
    assert max(cost) < 70


def test_where_none_of_a_line_fits_only_its_first_is_asked(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, max_jobs=2)
    make_job(alice, estimate={"memory_bytes": 10 * GIB})
    assert dispatch.schedule() == 1
    queue_up(alice, 200, estimate={"memory_bytes": 20 * GIB})
    dispatch.schedule()
    assert queries_of(dispatch.schedule) < 20
    small = make_job(alice, estimate={"memory_bytes": 2 * GIB})
    assert after_dispatch(small).status == "starting"


def test_lists_cost_the_same_however_long_the_queue_is(alice: User, three_cards: list[Gpu]) -> None:
    client, costs = client_of(alice), []
    for count in (60, 300):
        queue_up(alice, count)
        rest = queries_of(lambda: client.get("/api/v1/jobs/?status=queued"))
        costs.append((rest, queries_of(lambda: joblist.page(alice, {}))))
    assert costs[0] == costs[1]


def test_those_who_wait_for_a_job_stand_in_no_line_and_step_up_together(
    alice: User, three_cards: list[Gpu]
) -> None:
    source = make_job(alice, status=Status.RUNNING)
    waiting = queue_up(alice, 50, waits_on=source)
    dispatch.schedule()
    assert not Job.objects.filter(line__isnull=False).exists()
    Job.objects.filter(pk=source.pk).update(status=Status.SUCCEEDED)
    assert dispatch.schedule() == 3
    assert Job.objects.filter(pk__in=[job.pk for job in waiting], line__isnull=False).count() == 47


def test_a_job_waits_for_each_of_its_forerunners_in_turn(alice: User, three_cards: list[Gpu]) -> None:
    before = [make_job(alice, status=Status.RUNNING, name=name) for name in ("one", "two")]
    data = {"after": [str(job.pk) for job in before], "steps": 1}
    job = submit.submit(alice, "rehearsal", data)
    assert job.waiting_for["reason"] == "after"
    first, second = before if job.waits_on == before[0] else reversed(before)
    for done, following in ((first, second), (second, None)):
        Job.objects.filter(pk=done.pk).update(status=Status.SUCCEEDED)
        after_dispatch(job)
        assert job.waits_on == following
    assert job.status == "starting"


def test_a_forerunner_that_failed_holds_its_followers_with_a_sentence(
    alice: User, three_cards: list[Gpu]
) -> None:
    source = make_job(alice, status=Status.RUNNING, name="source")
    job = submit.submit(alice, "rehearsal", {"after": [str(source.pk)], "steps": 1})
    Job.objects.filter(pk=source.pk).update(status=Status.FAILED)
    assert after_dispatch(job).status == "held"
    assert job.error == f"It was to start after source, which ended failed (job {source.pk})."


# Positions ----------------------------------------------------------------------------------------------------


def test_each_is_told_its_place_and_when_its_turn_may_come(alice: User, three_cards: list[Gpu]) -> None:
    card = three_cards[1]
    holder = named(alice, card, name="holder", progress={"eta_seconds": 90})
    takes = {"memory_bytes": GIB, "seconds": 60}
    waiting = [named(alice, card, estimate=takes) for _ in range(3)]
    dispatch.schedule()
    assert told(waiting[0])["detail"] == "after holder"
    third = told(waiting[2])
    assert third["reason"] == "turn"
    assert third["detail"] == "3rd in line for card 1; the first waits: after holder"
    assert (third["gpu_uuid"], third["job_id"]) == (card.uuid, str(waiting[0].pk))
    assert third["eta_seconds"] == 90 + 2 * 60
    urgent = named(alice, card, priority=5)
    assert told(waiting[2])["detail"].startswith("4th in line")
    assert told(waiting[0])["detail"].startswith("2nd in line")
    assert after_dispatch(urgent).waiting_for["job_id"] == str(holder.pk)


def test_an_unknown_length_before_it_leaves_the_start_open(alice: User, three_cards: list[Gpu]) -> None:
    named(alice, three_cards[0], progress={"eta_seconds": 90})
    jobs = [named(alice, three_cards[0]) for _ in range(2)]
    dispatch.schedule()
    assert told(jobs[1])["eta_seconds"] is None


@pytest.mark.parametrize(
    ("number", "word"), [(1, "1st"), (2, "2nd"), (11, "11th"), (23, "23rd"), (112, "112th")]
)
def test_it_counts_as_people_do(number: int, word: str) -> None:
    assert places.ordinal(number) == word


# Limits of a user ---------------------------------------------------------------------------------------------


def test_a_user_at_the_limit_waits_while_others_start(
    alice: User, bob: User, staff: User, three_cards: list[Gpu], settings: Any
) -> None:
    settings.MISTUDIO_USER_RUNNING_JOBS = 1
    first, second, other, of_staff = (make_job(owner) for owner in (alice, alice, bob, staff))
    assert dispatch.schedule() == 3
    assert [after_dispatch(job).status for job in (first, other, of_staff)] == ["starting"] * 3
    assert told(second)["reason"] == "user_limit"
    assert "runs 1 of at most 1 jobs" in told(second)["detail"]
    Job.objects.filter(pk=first.pk).update(status=Status.SUCCEEDED)
    end_all()
    assert after_dispatch(second).status == "starting"


def test_staff_run_as_many_as_there_are_cards(staff: User, three_cards: list[Gpu], settings: Any) -> None:
    settings.MISTUDIO_USER_RUNNING_JOBS = 1
    queue_up(staff, 3)
    assert dispatch.schedule() == 3


def test_a_full_queue_of_ones_own_is_a_429_with_the_number(
    alice: User, staff: User, three_cards: list[Gpu], settings: Any
) -> None:
    settings.MISTUDIO_USER_QUEUED_JOBS = 2
    submits = [client_of(alice).post("/api/v1/jobs/rehearsal/", {"hold": n == 0}) for n in range(3)]
    assert [answer.status_code for answer in submits] == [201, 201, 429]
    assert (submits[2].data["code"], submits[2].data["limit"]) == ("too_many_queued_jobs", 2)
    assert "You have 2 jobs in the queue" in submits[2].data["detail"]
    assert Job.objects.count() == 2
    assert client_of(staff).post("/api/v1/jobs/rehearsal/", {}).status_code == 201


# Passed over --------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(living_host: Host) -> Gpu:
    """A card for two jobs at once."""
    return make_card(living_host, 0, max_jobs=2)


def small(owner: User, **fields: Any) -> Job:
    return make_job(owner, estimate={"memory_bytes": 10 * GIB}, **fields)


def passed_for(job: Job, seconds: float) -> None:
    job.refresh_from_db()
    then = (timezone.now() - timedelta(seconds=seconds)).isoformat()
    Job.objects.filter(pk=job.pk).update(waiting_for=job.waiting_for | {"passed_at": then})


@pytest.mark.parametrize("reason", ["turn", "kept"])
def test_a_large_job_that_small_ones_pass_comes_to_its_turn(alice: User, shared: Gpu, reason: str) -> None:
    """In the line of the small ones (`auto`), or in another, that of a named card."""
    running = small(alice)
    assert after_dispatch(running).status == "starting"
    wanted = "auto" if reason == "turn" else shared.uuid
    large = make_job(alice, estimate={"memory_bytes": 20 * GIB}, gpu_wanted=wanted, name="large")
    passing = small(alice)
    assert after_dispatch(passing).status == "starting"
    large.refresh_from_db()
    assert large.waiting_for["passed_at"]
    end(passing)
    second = small(alice)
    assert after_dispatch(second).status == "starting"  # not for ten minutes yet
    end(second)
    passed_for(large, placement.PASSED_SECONDS + 1)
    third = small(alice)
    assert after_dispatch(third).status == "queued"
    waits = told(third)
    assert (waits["reason"], waits["job_id"]) == (reason, str(large.pk))
    answer = client_of(alice).post("/api/v1/system/gpu-fit/", {"kind": "rehearsal", "params": {}}).data
    assert (
        answer["auto"]["detail"] == "card 0 is kept for large, which needs 20.0 GiB and was passed by others"
    )
    assert "the card is kept for it" in after_dispatch(large).waiting_for["detail"]
    end(running)
    assert after_dispatch(large).status == "starting"


def end(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(status=Status.SUCCEEDED)
    Lease.objects.filter(attempt__job=job).update(ended_at=timezone.now(), state=Lease.State.ENDED)


def test_a_kept_card_takes_questions_and_whoever_stands_before(alice: User, shared: Gpu) -> None:
    assert after_dispatch(small(alice)).status == "starting"
    large = make_job(alice, estimate={"memory_bytes": 20 * GIB})
    dispatch.schedule()
    passed_for(large, placement.PASSED_SECONDS + 1)
    assert after_dispatch(small(alice)).status == "queued"
    question = make_job(alice, interactive=True, estimate={"memory_bytes": GIB})
    assert after_dispatch(question).status == "starting"
    assert after_dispatch(small(alice, priority=1)).status == "starting"


def test_other_cards_are_not_kept(alice: User, living_host: Host, shared: Gpu) -> None:
    other = make_card(living_host, 1, max_jobs=2, free_gib=12)
    hold(other, 12, free_gib=12)
    assert after_dispatch(small(alice)).gpu_uuid == shared.uuid
    large = make_job(alice, estimate={"memory_bytes": 20 * GIB})
    dispatch.schedule()
    passed_for(large, placement.PASSED_SECONDS + 1)
    assert after_dispatch(small(alice)).gpu_uuid == other.uuid


# Slots --------------------------------------------------------------------------------------------------------


def test_questions_use_their_own_slots_beside_a_training_where_memory_allows(
    alice: User, living_host: Host
) -> None:
    make_card(living_host, 0)
    training = make_job(alice, estimate={"memory_bytes": 20 * GIB})
    assert after_dispatch(training).status == "starting"
    large, fits, another = (
        make_job(alice, interactive=True, estimate={"memory_bytes": gib * GIB}) for gib in (8, 2, 1)
    )
    assert after_dispatch(fits).status == "starting"
    assert {after_dispatch(large).waiting_for["reason"], told(another)["reason"]} == {"lease", "turn"}
    assert set(Lease.objects.values_list("job_class", "slot")) == {("batch", 0), ("interactive", 0)}


def test_a_batch_job_never_takes_the_slot_of_questions(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, interactive_slots=3)
    queue_up(alice, 3)
    assert dispatch.schedule() == 1


def test_on_the_cpu_too_a_question_has_a_slot_of_its_own(alice: User, living_host: Host) -> None:
    for _ in range(3):
        make_job(alice, device="cpu")
    question = make_job(alice, device="cpu", interactive=True)
    assert after_dispatch(question).status == "starting"


def test_max_jobs_lowered_below_what_is_held_grants_nothing_until_enough_ended(
    alice: User, living_host: Host
) -> None:
    card = make_card(living_host, 0, max_jobs=3)
    running = queue_up(alice, 3)
    assert dispatch.schedule() == 3
    Gpu.objects.filter(pk=card.pk).update(max_jobs=2)
    waiting = queue_up(alice, 2)
    started = []
    for job in running:
        started.append(dispatch.schedule())
        end(job)
    assert started == [0, 0, 1]
    waiting[0].refresh_from_db()
    assert waiting[0].status == "starting"


def test_a_card_lowered_between_plan_and_grant_grants_nothing(alice: User, living_host: Host) -> None:
    card = make_card(living_host, 0, max_jobs=2)
    assert after_dispatch(make_job(alice)).status == "starting"
    job = make_job(alice)
    plan = dispatch.judged(job, dispatch.Board())
    assert plan
    Gpu.objects.filter(pk=card.pk).update(max_jobs=1)
    assert not dispatch.grant(job, plan)


@pytest.mark.parametrize("interactive", [False, True])
def test_a_card_drained_between_plan_and_grant_grants_nothing(
    alice: User, living_host: Host, interactive: bool
) -> None:
    card = make_card(living_host, 0)
    job = make_job(alice, interactive=interactive)
    plan = dispatch.judged(job, dispatch.Board())
    assert plan
    Gpu.objects.filter(pk=card.pk).update(enabled=False)
    assert not dispatch.grant(job, plan)
    assert dispatch.schedule() == 0

"""Which card, and when: `auto`, named cards, waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, connections
from django.utils import timezone

from gpus import inventory
from gpus.inventory import Sight
from gpus.models import Gpu, Host
from gpus.sampling import Card
from jobs import dispatch, maintenance, submit
from jobs.board import Board
from jobs.memory import reserve_bytes
from jobs.models import Job, Lease, Status
from tests.conftest import GIB, make_card
from tests.jobs.test_states import make_job


def placed(job: Job) -> str | None:
    job.refresh_from_db()
    return job.gpu_uuid


def test_it_chooses_the_card_with_the_most_free_memory_g14(alice: User, living_host: Host) -> None:
    cards = [make_card(living_host, n, free_gib=free) for n, free in enumerate((2, 20, 20, 6))]
    jobs = [make_job(alice) for _ in range(3)]
    Job.objects.update(estimate={"memory_bytes": 4 * GIB})
    assert dispatch.schedule() == 3
    assert [placed(job) for job in jobs] == [cards[1].uuid, cards[2].uuid, cards[3].uuid]


def test_it_counts_what_running_jobs_have_still_to_take(alice: User, living_host: Host) -> None:
    cards = [make_card(living_host, n, free_gib=free, max_jobs=2) for n, free in enumerate((24, 20))]
    first = make_job(alice, estimate={"memory_bytes": 10 * GIB})
    dispatch.schedule()
    assert placed(first) == cards[0].uuid
    second = make_job(alice)
    dispatch.schedule()
    assert placed(second) == cards[1].uuid  # 24 - 10 reserved < 20
    assert Board().slots[cards[0].resource].free_bytes() == 14 * GIB
    Lease.objects.filter(resource=cards[0].resource).update(observed_bytes=8 * GIB)
    assert Board().slots[cards[0].resource].free_bytes() == 22 * GIB


def test_two_dispatches_never_promise_the_same_memory_twice(alice: User, living_host: Host) -> None:
    """Two slots, room for one of the two jobs: whoever placed his by an older board gets nothing."""
    make_card(living_host, 0, free_gib=24, max_jobs=2)
    first, second = (make_job(alice, estimate={"memory_bytes": 16 * GIB}) for _ in "ab")
    plans = [dispatch.judged(job, Board()) for job in (first, second)]
    assert all(plans)
    pairs = zip((first, second), plans, strict=True)
    assert [bool(dispatch.grant(job, plan)) for job, plan in pairs if plan] == [True, False]
    assert dispatch.schedule() == 0
    assert (placed(second), second.waiting_for["reason"]) == (None, "memory")


def test_a_round_goes_on_with_the_board_that_a_new_look_would_give(alice: User, living_host: Host) -> None:
    """Two slots and room for two of the three; the CPU job counts on the memory of the host."""
    card = make_card(living_host, 0, free_gib=24, max_jobs=3)
    jobs = [make_job(alice, estimate={"memory_bytes": 10 * GIB}) for _ in range(3)]
    jobs.append(make_job(alice, needs_card=False, estimate={"memory_bytes": GIB}))
    board, until = Board(), time.monotonic() + 60
    while leases := dispatch.start_next(board, until):
        board = board.after(leases)
        assert known_of(board) == known_of(Board())
    assert [placed(job) for job in jobs] == [card.uuid, card.uuid, None, None]
    assert jobs[3].status == Status.STARTING


def known_of(board: Board) -> dict[str, tuple[object, ...]]:
    return {
        name: (slots.memory, slots.lately_ours, slots.host_reserved, {lease.pk for lease in slots.leases})
        for name, slots in board.slots.items()
    }


def test_it_never_moves_a_named_job(alice: User, three_cards: list[Gpu]) -> None:
    first, second = (
        make_job(alice, gpu_request=three_cards[1].uuid, gpu_wanted=three_cards[1].uuid) for _ in "ab"
    )
    assert dispatch.schedule() == 1
    assert placed(first) == three_cards[1].uuid
    assert placed(second) is None
    assert second.waiting_for["reason"] == "lease"
    assert second.waiting_for["job_id"] == str(first.pk)


def test_it_lets_no_blocked_job_block_the_others(alice: User, three_cards: list[Gpu]) -> None:
    uuid = three_cards[0].uuid
    jobs = [make_job(alice, gpu_request=uuid, gpu_wanted=uuid) for _ in range(2)] + [make_job(alice)]
    assert dispatch.schedule() == 2
    assert placed(jobs[2]) in {c.uuid for c in three_cards[1:]}


def test_it_starts_the_highest_priority_first_then_the_oldest(alice: User, living_host: Host) -> None:
    make_card(living_host, 0)
    low, old, high = make_job(alice, priority=-1), make_job(alice), make_job(alice, priority=5)
    for expected in (high, old, low):
        assert dispatch.schedule() == 1
        expected.refresh_from_db()
        assert expected.status == Status.STARTING
        Lease.objects.update(ended_at=timezone.now(), state=Lease.State.ENDED)


def test_it_waits_while_a_card_is_released_or_quarantined(alice: User, living_host: Host) -> None:
    card = make_card(living_host, 0)
    make_job(alice)
    dispatch.schedule()
    job = make_job(alice, interactive=True)
    Lease.objects.update(state=Lease.State.QUARANTINED)
    assert dispatch.schedule() == 0  # a quarantined lease closes the card to both classes
    job.refresh_from_db()
    assert "quarantined" in job.waiting_for["detail"]
    Lease.objects.update(state=Lease.State.RELEASING)
    assert dispatch.schedule() == 1  # an interactive slot is free beside it
    assert Lease.objects.filter(resource=card.resource, job_class="interactive").exists()


@pytest.mark.parametrize("field", ["enabled", "selectable"])
def test_it_gives_no_card_that_is_closed(alice: User, living_host: Host, field: str) -> None:
    make_card(living_host, 0, **{field: False})
    make_job(alice)
    assert dispatch.schedule() == 0


def test_it_gives_no_card_without_a_fresh_reading(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, sampled_at=timezone.now() - timedelta(seconds=7))
    job = make_job(alice)
    assert dispatch.schedule() == 0
    job.refresh_from_db()
    assert "stale" in job.waiting_for["detail"]


def test_it_keeps_a_reserve_on_every_card(alice: User, living_host: Host) -> None:
    make_card(living_host, 0)
    reserve = reserve_bytes(24 * GIB)
    assert reserve == 24 * GIB // 50
    job = make_job(alice)
    Job.objects.update(estimate={"memory_bytes": 24 * GIB - reserve + 1})
    assert dispatch.schedule() == 0
    Job.objects.update(estimate={"memory_bytes": 24 * GIB - reserve})
    assert dispatch.schedule() == 1
    assert placed(job)


def test_it_takes_cpu_slots_for_jobs_without_a_card(alice: User, living_host: Host) -> None:
    jobs = [make_job(alice, needs_card=False, device="cpu") for _ in range(3)]
    assert dispatch.schedule() == 2  # MISTUDIO_CPU_JOBS
    slots = Lease.objects.filter(resource="cpu:alpha").values_list("slot", flat=True)
    assert sorted(slots) == [0, 1]
    jobs[2].refresh_from_db()
    assert jobs[2].waiting_for["reason"] == "slot"


def test_it_gives_slot_zero_alone_to_kinds_that_would_need_a_card(alice: User, living_host: Host) -> None:
    for _ in range(2):
        make_job(alice, needs_card=True, device="cpu")
    assert dispatch.schedule() == 1
    make_job(alice, needs_card=False, device="cpu")
    assert dispatch.schedule() == 1


def test_it_holds_a_job_whose_input_will_never_come(alice: User, three_cards: list[Gpu]) -> None:
    source = make_job(alice, status=Status.FAILED)
    job = make_job(alice)
    job.inputs.create(parameter="activations", source_job=source)
    dispatch.schedule()
    job.refresh_from_db()
    assert job.status == Status.HELD
    assert "ended failed" in job.error


# Naming the apps makes the flush cascade: the swapped-out token table of knox refers to users, too.
RACE = pytest.mark.django_db(transaction=True, available_apps=list(settings.INSTALLED_APPS))


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No doorbell is rung: the rounds of this test are the only ones, and have the time that they need."""
    monkeypatch.setattr(dispatch, "ROUND_SECONDS", 60)
    monkeypatch.setattr("jobs.tasks.ring", lambda *args, **options: None)


@RACE
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_one_of_twenty_that_submit_at_once_gets_the_last_slot_g15(
    alice: User, living_host: Host, deaf: None, rounds: int
) -> None:
    """SIM-1: 20 threads submit `auto` and dispatch at one barrier; at most one open lease per card at any time."""
    card = make_card(living_host, 0)
    for _ in range(rounds):
        refreshed()
        jobs = at_once(20, lambda: submit_and_dispatch(alice))
        states = sorted(Job.objects.filter(pk__in=jobs).values_list("status", flat=True))
        assert states == [Status.QUEUED] * 19 + [Status.STARTING]
        assert Lease.objects.filter(resource=card.resource, ended_at=None).count() == 1
        cleared()


@RACE
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_no_slot_of_two_classes_is_given_twice_at_once_g15(
    alice: User, living_host: Host, deaf: None, rounds: int
) -> None:
    """Two batch slots and one for questions: 12 dispatches at one barrier, then again while `max_jobs` is lowered."""
    card = make_card(living_host, 0, max_jobs=2)
    for _ in range(rounds):
        refreshed()
        for n in range(12):
            make_job(alice, interactive=bool(n % 2))
        at_once(12, dispatch.schedule)
        held = Lease.objects.filter(resource=card.resource, ended_at=None)
        assert sorted(held.values_list("job_class", "slot")) == [
            ("batch", 0),
            ("batch", 1),
            ("interactive", 0),
        ]
        held.filter(slot=1).update(ended_at=timezone.now(), state=Lease.State.ENDED)
        at_once(6, lambda: (Gpu.objects.update(max_jobs=1), dispatch.schedule()))
        assert held.filter(job_class="batch").count() == 1
        cleared()
        Gpu.objects.update(max_jobs=2)


@RACE
@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_no_user_runs_one_job_too_many_when_two_cards_get_free_at_once(
    alice: User, living_host: Host, deaf: None, settings: Any, rounds: int
) -> None:
    settings.MISTUDIO_USER_RUNNING_JOBS = 1
    cards = [make_card(living_host, index) for index in range(3)]
    for _ in range(rounds):
        refreshed()
        jobs = [make_job(alice, gpu_request=card.uuid, gpu_wanted=card.uuid) for card in cards]
        plans = [(job, dispatch.judged(job, Board())) for job in jobs]
        granted = iter(plans)
        at_once(3, lambda granted=granted: dispatch.grant(*next(granted)))  # type: ignore[misc]
        assert Job.objects.filter(status=Status.STARTING).count() == 1
        cleared()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no locks of rows")
@RACE
@pytest.mark.parametrize("other", ["agent", "maintenance"])
def test_a_grant_and_who_waits_for_its_card_do_not_wait_for_each_other(
    alice: User, living_host: Host, deaf: None, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A tick of the agent, or a maintenance, has the host's row and waits for the card's, which the grant has; at its
    commit the grant looks at the host that it refers to."""
    card = make_card(living_host, 0)
    known = {"uuid": card.uuid, "index": 0, "name": card.name, "memory_total_bytes": GIB, "simulated": False}
    sight = Sight(living_host.name, "b", cards=[Card(known)])
    acts = {"agent": lambda: inventory.record(sight), "maintenance": lambda: maintenance.begin(None, alice)}
    waiting = []

    def meanwhile(point: str) -> None:
        if point == "granting":
            waiting.append(pool.submit(at_once, 1, acts[other]))
            time.sleep(0.5)

    monkeypatch.setattr(dispatch.faults, "point", meanwhile)
    make_job(alice)
    with ThreadPoolExecutor(1) as pool:
        assert dispatch.schedule() == 1
        waiting[0].result()


def refreshed() -> None:
    """As if agent and worker had just been seen."""
    now = timezone.now()
    Host.objects.update(agent_seen_at=now, worker_seen_at=now)
    Gpu.objects.update(sampled_at=now)


def cleared() -> None:
    Job.objects.update(status=Status.CANCELLED)
    Lease.objects.filter(ended_at=None).update(ended_at=timezone.now(), state=Lease.State.ENDED)


def submit_and_dispatch(user: User) -> Any:
    job = submit.submit(user, "rehearsal", {"steps": 1})
    dispatch.schedule()
    return job.pk


def at_once(count: int, act: Callable[[], Any]) -> list[Any]:
    """What `count` threads return that start at one barrier; the first error is raised."""
    barrier = threading.Barrier(count)

    def one(_: int) -> Any:
        barrier.wait()
        try:
            return act()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))

"""A maintenance: nothing new is granted, everything keeps its place, and what it paused goes on after it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from gpus.models import Gpu, Host, Maintenance
from jobs import dispatch, losses, maintenance, requeue
from jobs.board import Board
from jobs.models import Job, Lease, Outcome, Status
from tests.conftest import client_of, make_card
from tests.jobs.test_states import attempt_of, make_job, running  # noqa: F401 (a fixture)


def test_nothing_starts_and_it_says_why(alice: User, staff: User, three_cards: list[Gpu]) -> None:
    jobs = [
        make_job(alice, gpu_wanted=three_cards[0].uuid),
        make_job(alice),
        make_job(alice, needs_card=False),
    ]
    maintenance.begin(None, staff, "new driver")
    assert dispatch.schedule() == 0
    for job in jobs:
        job.refresh_from_db()
        assert job.status == Status.QUEUED
        assert job.waiting_for and job.waiting_for["reason"] == "maintenance"
        assert "(new driver): no job starts on any host until it ends" in job.waiting_for["detail"]
    maintenance.end(Maintenance.objects.get())
    assert dispatch.schedule() == 3


def test_a_card_that_is_taken_out_during_it_refuses_nobody(
    alice: User, staff: User, three_cards: list[Gpu]
) -> None:
    job = make_job(alice, gpu_wanted=three_cards[0].uuid)
    maintenance.begin(None, staff)
    Gpu.objects.filter(pk=three_cards[0].pk).update(enabled=False)
    dispatch.schedule()
    job.refresh_from_db()
    assert job.status == Status.QUEUED


def test_one_host_alone(alice: User, staff: User, living_host: Host) -> None:
    beta = Host.objects.create(
        name="beta", **{n: getattr(living_host, n) for n in ("agent_seen_at", "worker_seen_at")}
    )
    make_card(living_host, 0, free_gib=24)
    other = make_card(beta, 1, free_gib=4)
    maintenance.begin(living_host, staff)
    job = make_job(alice)
    assert dispatch.schedule() == 1
    job.refresh_from_db()
    assert job.gpu_uuid == other.uuid


def test_a_grant_that_was_judged_before_it_comes_too_late(
    alice: User, staff: User, three_cards: list[Gpu]
) -> None:
    job = make_job(alice)
    plan = dispatch.judged(job, Board())
    maintenance.begin(None, staff)
    assert plan and not dispatch.grant(job, plan)
    assert not Lease.objects.exists()


def test_what_it_paused_goes_on_and_nothing_else(running: Job, alice: User, staff: User) -> None:  # noqa: F811
    paused_before = make_job(alice, status=Status.PAUSED)
    begun = maintenance.begin(None, staff)
    assert maintenance.begin(None, staff) == begun
    assert maintenance.pause(begun, staff) == [running]
    begun.refresh_from_db()
    maintenance.end(begun)
    assert maintenance.resume(begun, staff) == ([], [running], [])  # it still writes its checkpoint
    running.move([Status.RUNNING], Status.PAUSED)
    assert maintenance.resume(begun, staff) == ([running], [], [])
    running.refresh_from_db()
    paused_before.refresh_from_db()
    assert (running.status, paused_before.status) == (Status.QUEUED, Status.PAUSED)
    assert maintenance.resume(begun, staff) == ([], [], [])


def test_one_whose_card_was_taken_out_keeps_nobody_else_from_going_on(
    alice: User, staff: User, three_cards: list[Gpu], capsys: Any
) -> None:
    """Cards are changed in maintenances; the named one is not swapped, and it is said which job stays paused."""
    gone, other = (make_job(alice, status=Status.PAUSED, gpu_request=card.uuid, name=name) for card, name in
                   zip(three_cards, ("one", "two"), strict=False))  # fmt: skip
    Job.objects.update(pause_requested_at=timezone.now())
    begun = maintenance.begin(None, staff)
    begun.paused = {str(job.pk): job.attempt for job in (gone, other)}
    begun.save()
    Gpu.objects.filter(pk=three_cards[0].pk).update(enabled=False)
    call_command("maintenance", "end")
    assert list(Job.objects.filter(status=Status.QUEUED)) == [other]
    said = capsys.readouterr().out
    assert "Resumed: 1 of the 2 jobs" in said
    assert f"stays paused: {gone}" in said and "was switched off by staff" in said
    assert not Maintenance.in_force().exists()


def test_it_is_safe_only_when_the_memory_is_back(running: Job, staff: User, capsys: Any) -> None:  # noqa: F811
    maintenance.begin(None, staff)
    lease = Lease.objects.get()
    running.move([Status.RUNNING], Status.SUCCEEDED)
    lease.state = Lease.State.RELEASING
    lease.save()
    with pytest.raises(CommandError, match="1 cards wait for memory"):
        call_command("maintenance", "begin", "--wait", "0.1")
    with pytest.raises(SystemExit):
        call_command("maintenance", "status")
    Lease.objects.update(state=Lease.State.ENDED, ended_at=timezone.now())
    call_command("maintenance", "status")
    assert "It is safe" in capsys.readouterr().out


def test_ctrl_c_ends_the_waiting_alone(running: Job, staff: User, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def pressed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mistudio.management.commands.maintenance.until_nothing_runs", pressed)
    with pytest.raises(SystemExit, match="130"):
        call_command("maintenance", "begin")
    assert Maintenance.in_force().exists()


def test_losses_during_it_do_not_count(running: Job, staff: User) -> None:  # noqa: F811
    here, mark = attempt_of(running), losses.progress_mark(running)
    before = {"host": here.host, "outcome": Outcome.LOST, "boot_id": here.boot_id}
    before |= {"start_checkpoint": mark, "counted": True}
    for number in range(losses.MAX_LOST):
        running.attempts.create(number=10 + number, **before)
    running.attempts.update(start_checkpoint=mark)
    maintenance.begin(None, staff)
    requeue.lost(running, attempt_of(running), "the work was ended by SIGKILL")
    running.refresh_from_db()
    assert running.status == Status.QUEUED


def test_every_page_and_the_api_say_so(alice: User, staff: User, living_host: Host) -> None:
    maintenance.begin(living_host, staff, "new power supply")
    browser = Client()
    browser.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    for page in ("/", "/jobs/", "/new/", "/artifacts/", "/tokens/"):
        assert (
            "by staff (new power supply): no job starts on alpha until it ends"
            in browser.get(page).content.decode()
        )
    make_card(living_host, 0)
    assert "Takes no job during the maintenance" in browser.get("/").content.decode()
    (host,) = client_of(alice).get("/api/v1/system/all").json()["hosts"]
    assert "new power supply" in host["maintenance"]

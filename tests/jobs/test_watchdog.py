"""Ends what ended jobs left on cards, by proof, and signals nobody else. Real processes on simulated cards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus import agent_client
from gpus.models import Host, Pulse
from jobs import events, processes, recovery, watchdog
from jobs.board import Board
from jobs.models import Attempt, Job, Lease, WatchdogEvent
from jobs.placement import Wait, place
from jobs.processes import Process, token_hash
from tests.jobs.holders import DEAF, GIB, MIB, TOKEN, Holders, dead
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db
State, Finding = WatchdogEvent.State, WatchdogEvent.Finding
TERM, KILL = signal.SIGTERM, signal.SIGKILL


@pytest.fixture
def cards(
    living_host: Host, alice: User, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Holders]:
    settings.MISTUDIO_HOME, settings.MISTUDIO_HOST_NAME = tmp_path, living_host.name
    (tmp_path / "run").mkdir()
    holders = Holders(living_host, alice, tmp_path, monkeypatch)
    yield holders
    holders.end()


# The ladder ---------------------------------------------------------------------------------------------


def test_it_ends_what_an_ended_job_left_and_records_what_came_back(cards: Holders) -> None:
    left = cards.process()
    attempt = cards.work(left, ended_seconds_ago=1)
    cards.round()
    row = cards.row()
    assert (row.finding, row.state, row.proof) == (Finding.LEFTOVER, State.FOUND, "recorded")
    assert (row.pid, row.start_ticks, row.gpu_uuid) == (left.pid, left.start, cards.cards[0])
    assert row.attempt == attempt and "left it behind" in row.reason
    assert row.due_at == attempt.ended_at + timedelta(seconds=120)
    cards.round()  # not due yet
    assert cards.signalled == []
    cards.due_round()
    assert cards.signalled == [(left.pid, TERM)]
    assert dead(left)
    cards.round()
    row = cards.row()
    assert (row.state, row.outcome, row.due_at) == (State.GONE, "Ended by SIGTERM.", None)
    assert row.term_at and row.closed_at and row.kill_at is None
    assert row.memory_before_bytes >= 20 * MIB
    assert row.freed_bytes == row.memory_before_bytes


def test_it_never_acts_upon_a_first_sight(cards: Holders) -> None:
    """However long ago the job has ended: it is looked at twice."""
    left = cards.process()
    cards.work(left, ended_seconds_ago=100_000)
    cards.round()
    assert cards.signalled == []
    cards.round()
    assert cards.signalled == [(left.pid, TERM)]


def test_it_kills_what_does_not_listen_ten_seconds_later(cards: Holders) -> None:
    deaf = cards.process(DEAF)
    cards.work(deaf)
    cards.round()
    cards.due_round()
    row = cards.row()
    assert row.state == State.TERM
    assert row.due_at - row.term_at == timedelta(seconds=10)
    cards.round()
    assert cards.signalled == [(deaf.pid, TERM)]
    cards.due_round()
    assert cards.signalled == [(deaf.pid, TERM), (deaf.pid, KILL)]
    assert dead(deaf)
    cards.round()
    assert (cards.row().state, cards.row().outcome) == (State.GONE, "Ended by SIGKILL.")


def test_it_tells_pages_of_every_move(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[tuple[str, str, dict[str, Any]]] = []
    monkeypatch.setattr(events, "publish", lambda *frame: frames.append(frame))
    left = cards.process()
    cards.work(left)
    for _ in range(3):
        cards.round()
        cards.due_round()
    assert {frame[:2] for frame in frames} == {("system/gpus", "watchdog:event")}
    assert [data["state"] for _, _, data in frames] == ["found", "term", "gone"]
    assert {data["pid"] for _, _, data in frames} == {left.pid}
    assert frames[-1][2]["freed_bytes"] == cards.row().freed_bytes > 0


def test_it_scales_grace_and_ladder(cards: Holders, settings: Any) -> None:
    settings.MISTUDIO_TIME_SCALE, settings.MISTUDIO_WATCHDOG_GRACE_SECONDS = 0.1, 50
    deaf = cards.process(DEAF)
    attempt = cards.work(deaf, ended_seconds_ago=1)
    cards.round()
    assert cards.row().due_at == attempt.ended_at + timedelta(seconds=5)
    cards.due_round()
    assert cards.row().due_at - cards.row().term_at == timedelta(seconds=1)


def test_it_takes_a_step_that_is_due_between_two_rounds(cards: Holders) -> None:
    """Recovery asks every 10 s, so that KILL does not wait a minute for its turn."""
    left = cards.process()
    cards.work(left)
    cards.round()
    WatchdogEvent.objects.update(due_at=timezone.now() + timedelta(seconds=60))
    recovery.recover_host(cards.host.name)
    assert cards.signalled == []
    WatchdogEvent.objects.update(due_at=timezone.now())
    recovery.recover_host(cards.host.name)
    assert cards.signalled == [(left.pid, TERM)]


def test_it_ends_the_child_whose_proof_went_with_its_parent(cards: Holders) -> None:
    """A child that only descends from the recorded work: the parent goes at TERM, the child is deaf."""
    script = f"{DEAF}; import os; pid = os.fork(); pid and signal.signal(signal.SIGTERM, signal.SIG_DFL)"
    parent = cards.process(script)
    child = child_of(parent)
    cards.hold(child, 0)
    cards.work(parent)
    cards.round()
    assert {row.proof for row in WatchdogEvent.objects.all()} == {"recorded", "descendant"}
    cards.due_round()
    assert dead(parent)
    cards.round()
    cards.due_round()
    assert dead(child)
    assert (child.pid, KILL) in cards.signalled


def child_of(parent: Process) -> Process:
    deadline = time.monotonic() + 5
    while not (found := processes.descendants(parent.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found.pop()


def test_it_reports_and_signals_nothing_when_it_may_only_report(cards: Holders, settings: Any) -> None:
    settings.MISTUDIO_WATCHDOG = "report"
    left = cards.process()
    cards.work(left)
    for _ in range(3):
        cards.due_round()
        assert (cards.row().state, cards.row().due_at, cards.signalled) == (State.REPORTED, None, [])
    settings.MISTUDIO_WATCHDOG = "clean"
    cards.round()
    assert cards.row().state == State.FOUND
    settings.MISTUDIO_WATCHDOG = "report"  # in the middle of the ladder
    cards.due_round()
    assert (cards.row().state, cards.row().due_at, cards.signalled) == (State.REPORTED, None, [])
    os.kill(left.pid, KILL)
    assert dead(left)
    cards.round()
    assert (cards.row().state, cards.row().outcome) == (State.GONE, "It went by itself.")


def test_it_gives_up_on_what_it_may_not_signal(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    left = cards.process()
    cards.work(left)
    cards.round()
    monkeypatch.setattr(signal, "pidfd_send_signal", forbidden)
    cards.due_round()
    assert (cards.row().state, cards.row().due_at) == (State.FAILED, None)
    assert "another user" in cards.row().outcome


def forbidden(*args: Any) -> None:
    raise PermissionError


def test_it_looks_at_the_cards_of_a_job_that_has_just_ended(cards: Holders) -> None:
    on_0, on_1 = cards.process(card=0), cards.process(card=1)
    for left in (on_0, on_1):
        cards.work(left)
    watchdog.watch(cards.host.name, [cards.cards[1]])
    assert cards.row().pid == on_1.pid
    assert not Pulse.objects.filter(name__startswith="watchdog").exists()  # this was no round of all cards
    cards.round()
    assert {row.pid for row in WatchdogEvent.objects.all()} == {on_0.pid, on_1.pid}
    assert Pulse.objects.filter(name=f"watchdog:{cards.host.name}").exists()


def test_it_leaves_rows_of_a_silent_card_as_they_are(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    left = cards.process()
    cards.work(left)
    cards.round()
    monkeypatch.setattr(agent_client, "fresh", lambda uuid: None)
    cards.due_round()
    assert (cards.row().state, cards.signalled) == (State.FOUND, [])


# Proofs -------------------------------------------------------------------------------------------------


def proven(cards: Holders, process: Process, proof: str) -> None:
    """One row, by this proof, and it is ended."""
    cards.round()
    assert (cards.row(pid=process.pid).finding, cards.row(pid=process.pid).proof) == (Finding.LEFTOVER, proof)
    cards.due_round()
    assert dead(process)


def test_it_proves_a_grandchild(cards: Holders) -> None:
    parent = cards.process("import os; os.fork() or os.fork()", card=None)
    deadline = time.monotonic() + 5
    while len(found := processes.descendants(parent.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    grandchild = next(p for p in found if processes.Census().row(p.pid).parent != parent.pid)  # type: ignore[union-attr]
    cards.hold(grandchild, 0)
    cards.work(parent)
    proven(cards, grandchild, "descendant")


def test_it_proves_a_child_in_a_session_of_its_own_by_the_token_it_was_executed_with(cards: Holders) -> None:
    """Its parent, the work, and everybody recorded are gone."""
    orphan = orphan_of(TOKEN)
    cards.hold(orphan, 0)
    cards.attempt(token_hash=token_hash(TOKEN), keeper_pid=2**22, keeper_start=1)
    proven(cards, orphan, "token")


def orphan_of(token: str) -> Process:
    """An executed process in a session of its own whose parent has gone."""
    options = "start_new_session=True, stdout=subprocess.DEVNULL"
    code = f"import subprocess; print(subprocess.Popen(['sleep', '600'], {options}).pid)"
    environment = os.environ | ({processes.TOKEN_VARIABLE: token} if token else {})
    told = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    found = processes.find(int(told.stdout))
    assert found is not None
    return found


def test_it_proves_a_child_in_a_session_of_its_own_that_one_heartbeat_saw(cards: Holders) -> None:
    orphan = orphan_of("")
    cards.hold(orphan, 0)
    attempt = cards.attempt(members=[[orphan.pid, orphan.start]], keeper_pid=2**22, keeper_start=1)
    cards.lease(attempt, Lease.State.QUARANTINED)
    proven(cards, orphan, "recorded")


def test_it_proves_who_is_in_the_session_and_older_than_the_last_heartbeat(cards: Holders) -> None:
    """The leader is gone, and nobody was recorded: the number of a session is not given again while it has members."""
    member = cards.process(start_new_session=True)
    later = processes.ticks_now() + 1
    cards.attempt(session_id=member.pid, seen_ticks=later)
    proven(cards, member, "session")


def test_it_takes_nobody_of_a_session_that_began_after_the_last_heartbeat(cards: Holders) -> None:
    """The number of the session was given again: same number, somebody else's session."""
    innocent = cards.process(start_new_session=True)
    cards.attempt(session_id=innocent.pid, seen_ticks=innocent.start)
    spared(cards, innocent, Finding.FOREIGN)


def test_it_takes_nobody_of_a_session_for_a_member_who_lives_in_another(cards: Holders) -> None:
    """A recorded child that left the session lives; that says nothing of who has the session's number by now."""
    child, innocent = cards.process(start_new_session=True, card=None), cards.process(start_new_session=True)
    attempt = cards.attempt(session_id=innocent.pid, members=[[child.pid, child.start]])
    cards.lease(attempt, Lease.State.QUARANTINED)
    cards.round()
    cards.due_round()
    assert cards.row(pid=innocent.pid).finding == Finding.FOREIGN
    assert {pid for pid, _ in cards.signalled} == {child.pid}


# Who is spared ------------------------------------------------------------------------------------------


def spared(cards: Holders, process: Process, finding: str | None) -> None:
    """Whatever time passes it is signalled never, and told as what it is (or not at all)."""
    for _ in range(4):
        cards.due_round()
    assert cards.signalled == []
    assert processes.alive(process)
    assert [row.finding for row in WatchdogEvent.objects.filter(pid=process.pid)] == (
        [finding] if finding else []
    )


def test_it_spares_who_is_none_of_ours(cards: Holders) -> None:
    stranger = cards.process()
    cards.work(cards.process(card=None))
    spared(cards, stranger, Finding.FOREIGN)
    row = cards.row(pid=stranger.pid)
    assert (row.state, row.attempt, row.proof) == (State.REPORTED, None, "")
    assert row.name and row.user and row.memory_before_bytes >= 20 * MIB


def test_it_spares_everybody_of_an_open_attempt(cards: Holders) -> None:
    work = cards.process("import os; os.fork()")
    child = child_of(work)
    cards.hold(child, 0)
    cards.work(work, open=True)
    spared(cards, work, None)
    spared(cards, child, None)


def test_it_spares_who_carries_the_token_of_an_ended_attempt_and_works_for_an_open_one(
    cards: Holders,
) -> None:
    """As every job of a miStudio that was started from inside a job."""
    work = cards.process(token=TOKEN)
    ended = cards.attempt(token_hash=token_hash(TOKEN))
    cards.lease(ended, Lease.State.QUARANTINED, card=1)
    cards.work(work, open=True)
    spared(cards, work, None)


def test_it_spares_who_carries_a_token_that_we_never_gave(cards: Holders) -> None:
    other = cards.process(token="f" * 32)
    cards.attempt(token_hash=token_hash(TOKEN))
    spared(cards, other, Finding.UNKNOWN)


def test_it_spares_who_carries_the_hash_of_a_token(cards: Holders) -> None:
    """The hash stands in the database, and proves nothing."""
    other = cards.process(token=token_hash(TOKEN))
    cards.attempt(token_hash=token_hash(TOKEN))
    spared(cards, other, Finding.UNKNOWN)


def test_it_spares_who_copied_a_token_and_is_older_than_the_keeper(cards: Holders) -> None:
    older = cards.process(token=TOKEN)
    cards.attempt(token_hash=token_hash(TOKEN), keeper_pid=2**22, keeper_start=older.start + 1)
    spared(cards, older, Finding.UNKNOWN)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_it_spares_who_copied_a_token_and_is_another_user(cards: Holders) -> None:
    nobody = cards.command(["sh", "-c", "echo; exec sleep 600"], token=TOKEN, user=65534)
    cards.attempt(token_hash=token_hash(TOKEN))
    spared(cards, nobody, Finding.UNKNOWN)


def test_it_spares_who_set_the_variable_after_it_was_executed(cards: Holders) -> None:
    """It does not show in `/proc/<pid>/environ`, so it proves nothing."""
    late = cards.process(f"import os; os.environ['{processes.TOKEN_VARIABLE}'] = '{TOKEN}'")
    cards.attempt(token_hash=token_hash(TOKEN))
    spared(cards, late, Finding.FOREIGN)


def test_it_spares_who_cannot_be_read(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/proc/<pid>/environ` is closed (as with hidepid, or a process that may not be dumped)."""
    hidden = cards.process(token=TOKEN)
    cards.attempt(token_hash=token_hash(TOKEN))
    real = Path.read_bytes

    def closed(path: Path) -> bytes:
        if str(path) == f"/proc/{hidden.pid}/environ":
            raise PermissionError(path)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", closed)
    spared(cards, hidden, Finding.UNKNOWN)


def test_it_spares_whom_it_cannot_see_at_all(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start time cannot be read (another PID namespace, hidepid): the recorded number proves nothing."""
    hidden = cards.process()
    cards.work(hidden, members=[[hidden.pid, hidden.start]])
    real = processes._stat
    monkeypatch.setattr(processes, "_stat", lambda pid: [] if pid == hidden.pid else real(pid))
    for _ in range(3):
        cards.due_round()
    monkeypatch.undo()
    assert (cards.signalled, processes.alive(hidden)) == ([], True)


@pytest.mark.parametrize("change", ["start", "boot", "host"])
def test_it_spares_who_only_has_a_recorded_number(cards: Holders, change: str) -> None:
    innocent = cards.process()
    attempt = cards.work(innocent)
    values: dict[str, dict[str, Any]] = {
        "start": {"work_start": innocent.start - 1},
        "boot": {"boot_id": "another"},
        "host": {"host": Host.objects.create(name="beta", boot_id="another"), "boot_id": "another"},
    }
    Attempt.objects.filter(pk=attempt.pk).update(**values[change])
    spared(cards, innocent, Finding.FOREIGN)


def test_it_spares_the_keeper(cards: Holders) -> None:
    keeper = cards.process()
    cards.attempt(keeper_pid=keeper.pid, keeper_start=keeper.start)
    spared(cards, keeper, None)


def test_it_spares_itself_and_who_started_it(cards: Holders) -> None:
    me = processes.find(os.getpid())
    assert me is not None
    cards.hold(me, 0)
    cards.work(me)
    spared(cards, me, None)


def test_it_leaves_the_end_of_a_lease_to_the_keeper(cards: Holders) -> None:
    """For 30 s after the end keeper or recovery see to it; then the lease is in quarantine."""
    left = cards.process()
    attempt = cards.work(left)
    lease = cards.lease(attempt, Lease.State.RELEASING)
    spared(cards, left, None)
    Lease.objects.filter(pk=lease.pk).update(state=Lease.State.QUARANTINED)
    proven(cards, left, "recorded")


# Leases in quarantine -----------------------------------------------------------------------------------


def test_it_ends_a_quarantine_when_the_memory_is_back(
    cards: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = cards.attempt()
    lease = cards.lease(attempt, Lease.State.QUARANTINED)
    used = {"bytes": 10 * GIB}

    def fresh(uuid: str) -> dict[str, Any]:
        reading = {"memory_used_bytes": used["bytes"], "memory_reserved_bytes": 0}
        return {"reading": reading, "processes": [], "lists": True}

    monkeypatch.setattr(agent_client, "fresh", fresh)
    cards.round()
    lease.refresh_from_db()
    row = cards.row(gpu_uuid=cards.cards[0])
    assert (lease.state, row.finding, row.state) == (Lease.State.QUARANTINED, Finding.LEASE, State.FOUND)
    used["bytes"] = 100 * MIB
    recovery.recover_host(cards.host.name)  # within 10 s, not 60: a closed card is missed
    lease.refresh_from_db()
    row.refresh_from_db()
    assert lease.state == Lease.State.ENDED and lease.ended_at
    assert (row.state, row.memory_before_bytes, row.freed_bytes) == (
        State.GONE,
        10 * GIB,
        10 * GIB - 100 * MIB,
    )


def test_recovery_leaves_quarantines_to_the_watchdog(cards: Holders) -> None:
    left = cards.process()
    attempt = cards.work(left, keeper_pid=2**22, keeper_start=1)
    cards.lease(attempt, Lease.State.QUARANTINED)
    assert recovery.unfinished_leases(cards.host) == set()


def test_it_ends_members_that_hold_a_lease_without_being_listed(cards: Holders) -> None:
    left = cards.process(card=None)
    lease = cards.lease(cards.work(left), Lease.State.QUARANTINED)
    cards.round()
    assert (cards.row(pid=left.pid).memory_before_bytes, cards.row(pid=left.pid).gpu_uuid) == (
        0,
        cards.cards[0],
    )
    cards.due_round()
    assert dead(left)
    cards.round()
    lease.refresh_from_db()
    assert lease.state == Lease.State.ENDED


def test_it_ends_a_quarantine_of_a_job_without_a_card(cards: Holders) -> None:
    left = cards.process(card=None)
    attempt = cards.work(left)
    lease = Lease.objects.create(resource="cpu:alpha", slot=0, attempt=attempt, state=Lease.State.QUARANTINED)
    cards.round()
    cards.due_round()
    assert dead(left)
    watchdog.follow_up(cards.host)
    lease.refresh_from_db()
    assert lease.state == Lease.State.ENDED
    assert {row.gpu_uuid for row in WatchdogEvent.objects.all()} == {""}


def test_it_changes_no_job_and_no_open_attempt(cards: Holders) -> None:
    left, work = cards.process(), cards.process(card=1)
    cards.lease(cards.work(left), Lease.State.QUARANTINED)
    cards.lease(cards.work(work, open=True), Lease.State.ACTIVE, card=1)
    before = list(Job.objects.order_by("pk").values()), list(Attempt.objects.filter(ended_at=None).values())
    for _ in range(3):
        cards.due_round()
    assert dead(left)
    cards.round()
    assert before == (
        list(Job.objects.order_by("pk").values()),
        list(Attempt.objects.filter(ended_at=None).values()),
    )
    assert [lease.state for lease in Lease.objects.order_by("pk")] == [Lease.State.ENDED, Lease.State.ACTIVE]


def test_it_forgets_closed_rows_after_90_days(cards: Holders) -> None:
    now = timezone.now()
    for days in (89, 91):
        WatchdogEvent.objects.create(
            host=cards.host, finding=Finding.FOREIGN, closed_at=now - timedelta(days=days)
        )
    WatchdogEvent.objects.create(host=cards.host, finding=Finding.FOREIGN, found_at=now - timedelta(days=400))
    watchdog.prune()
    assert WatchdogEvent.objects.count() == 2


def test_it_closes_the_rows_of_a_card_that_was_taken_out_and_not_of_a_lost_one(cards: Holders) -> None:
    for card in (0, 1):
        cards.process(card=card)
    cards.round()
    now = timezone.now()
    cards.host.gpus.filter(pk=cards.cards[0]).update(removed_at=now)
    cards.host.gpus.filter(pk=cards.cards[1]).update(lost_at=now)
    cards.round()
    assert cards.row(closed_at=None).gpu_uuid == cards.cards[1]
    assert "not in this host" in cards.row(gpu_uuid=cards.cards[0]).outcome


def test_two_rounds_do_not_run_at_once(cards: Holders) -> None:
    cards.work(cards.process())
    with watchdog.one_at_a_time("watchdog"):
        cards.round()
    assert not WatchdogEvent.objects.exists()


# Field cases --------------------------------------------------------------------------------------------


def test_it_signals_nobody_who_has_the_pid_of_a_dead_job_g46(cards: Holders) -> None:
    """Job row pid=P start=T1, dead; a sleep process now has P with start T2; the card still lists P."""
    innocent = cards.command(["sh", "-c", "echo; exec sleep 600"])
    dead_work = Process(innocent.pid, innocent.start - 100)
    attempt = cards.work(dead_work)
    lease = cards.lease(attempt, Lease.State.QUARANTINED)
    row = WatchdogEvent.objects.create(
        host=cards.host, finding=Finding.LEFTOVER, gpu_uuid=cards.cards[0], pid=dead_work.pid,
        start_ticks=dead_work.start, attempt=attempt, proof="recorded", due_at=timezone.now(),
    )  # fmt: skip
    for _ in range(3):
        cards.due_round()
    row.refresh_from_db()
    lease.refresh_from_db()
    assert (cards.signalled, processes.alive(innocent)) == ([], True)
    assert (row.state, row.outcome) == (State.GONE, "It went by itself.")
    assert lease.state == Lease.State.ENDED  # the number on the card is somebody else's
    assert not processes.send(dead_work, KILL)  # and the pidfd is asked again before any signal


class Card:
    """What one card answers, as the test says; the others are empty."""

    def __init__(self, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uuid, self.used, self.load, self.processes = uuid, 0, 0.0, []  # type: ignore[var-annotated]
        monkeypatch.setattr(agent_client, "fresh", self.fresh)

    def fresh(self, uuid: str, timeout: float = 1.0) -> dict[str, Any]:
        mine = uuid == self.uuid
        reading = {"memory_used_bytes": self.used if mine else 0, "memory_reserved_bytes": 0}
        reading |= {"utilization_gpu_percent": self.load if mine else 0}
        return {"reading": reading, "processes": self.processes if mine else [], "lists": True}


def test_it_tells_of_a_ghost_and_auto_passes_it_by_g48(
    cards: Holders, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A: utilization 100, 10 GiB used, process list empty, for 10 min, no job."""
    ghost = Card(cards.cards[0], monkeypatch)
    ghost.used, ghost.load = 10 * GIB, 100.0
    for minutes in range(11):
        WatchdogEvent.objects.update(found_at=timezone.now() - timedelta(minutes=minutes))
        cards.round()
        assert cards.row().state == (State.REPORTED if minutes >= 2 else State.FOUND)
    row = cards.row()
    assert (row.finding, row.pid, row.memory_before_bytes, cards.signalled) == (
        Finding.GHOST,
        None,
        10 * GIB,
        [],
    )
    assert "nvidia-smi --gpu-reset" in row.reason
    free = [14, 6, 6]  # by free memory alone, auto would take it
    for uuid, gib in zip(cards.cards, free, strict=True):
        cards.host.gpus.filter(pk=uuid).update(
            reading={"memory_free_bytes": gib * GIB, "memory_used_bytes": 0}
        )
    assert chosen(cards, make_job(alice)) in cards.cards[1:]
    assert chosen(cards, make_job(alice, gpu_wanted=cards.cards[0])) == cards.cards[0]
    ghost.used, ghost.load = 100 * MIB, 3.0
    cards.round()
    row.refresh_from_db()
    assert (row.state, row.memory_after_bytes) == (State.GONE, 100 * MIB)
    assert chosen(cards, make_job(alice)) == cards.cards[0]


def chosen(cards: Holders, job: Job) -> str:
    cards.heard()
    found = place(job, Board())
    assert not isinstance(found, Wait), found
    return found[0].resource.removeprefix("gpu:")


def test_it_waits_with_auto_when_every_card_is_haunted(
    cards: Holders, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uuid in cards.cards:
        WatchdogEvent.objects.create(
            host=cards.host, finding=Finding.GHOST, state=State.REPORTED, gpu_uuid=uuid
        )
    cards.heard()
    found = place(make_job(alice), Board())
    assert isinstance(found, Wait) and "name it" in found.detail


def test_it_takes_memory_of_a_lease_just_ended_for_no_ghost(
    cards: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(cards.cards[0], monkeypatch).used = 10 * GIB
    lease = cards.lease(cards.attempt(open=True), Lease.State.ACTIVE)
    cards.round()
    Lease.objects.filter(pk=lease.pk).update(state=Lease.State.ENDED, ended_at=timezone.now())
    cards.round()
    assert not WatchdogEvent.objects.exists()


def test_it_tells_once_of_a_process_that_does_not_die_and_closes_the_card_g49(
    cards: Holders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Signals are accepted, and it never exits, as in state D."""
    stuck = cards.process()
    lease = cards.lease(cards.work(stuck), Lease.State.QUARANTINED)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, number: None)
    cards.round()
    for _ in range(10):
        cards.due_round()
    row = cards.row(finding=Finding.LEFTOVER)
    assert (row.state, row.due_at) == (State.FAILED, None)
    assert "only a reboot" in row.outcome
    assert cards.signalled == [(stuck.pid, TERM), (stuck.pid, KILL)]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    cards.heard()
    closed = Board().closed[f"gpu:{cards.cards[0]}"]
    assert closed.word == "quarantined"
    monkeypatch.undo()
    monkeypatch.setattr(agent_client, "fresh", cards.fresh)
    os.kill(stuck.pid, KILL)
    assert dead(stuck)
    cards.round()
    row.refresh_from_db()
    lease.refresh_from_db()
    assert (row.state, lease.state) == (State.GONE, Lease.State.ENDED)


def test_it_believes_that_memory_is_back_when_the_card_forgets_the_process(
    cards: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = cards.process(card=None)
    cards.work(left)
    card = Card(cards.cards[0], monkeypatch)
    card.processes = [{"pid": left.pid, "memory_used_bytes": GIB}]
    cards.round()
    cards.due_round()
    assert dead(left)
    cards.children[0].wait()
    cards.round()
    assert (cards.row().state, cards.row().closed_at) == (State.TERM, None)
    cards.due_round()
    assert cards.row().state == State.FAILED and "driver still lists it" in cards.row().outcome
    card.processes = []
    cards.round()
    assert (cards.row().state, cards.row().freed_bytes) == (State.GONE, GIB)
    assert cards.signalled == [(left.pid, TERM)]


def test_one_row_that_cannot_be_written_keeps_no_other_from_its_turn(
    cards: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cards.process(), cards.process()
    for left in (first, second):
        cards.work(left)
    cards.round()
    real = watchdog.Round.follow

    def broken(round: watchdog.Round, row: WatchdogEvent, sight: Any) -> None:
        if row.pid == first.pid:
            raise ValueError("no")
        real(round, row, sight)

    monkeypatch.setattr(watchdog.Round, "follow", broken)
    cards.due_round()
    assert cards.signalled == [(second.pid, TERM)]


def test_it_takes_the_monitor_itself_for_nobody_g51(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists our own reader on every card, with no memory."""
    from gpus.owners import owner_of

    monitor = cards.process(card=None)
    card = Card(cards.cards[0], monkeypatch)
    entry = {"pid": monitor.pid, "memory_used_bytes": None, "own": True}
    card.processes, card.used = [entry], 10 * GIB
    lease = cards.lease(cards.attempt(), Lease.State.QUARANTINED)
    for _ in range(3):
        cards.due_round()
    assert cards.signalled == []
    assert not WatchdogEvent.objects.filter(pid=monitor.pid).exists()
    lease.refresh_from_db()
    assert lease.state == Lease.State.QUARANTINED  # its null hides no memory that has not come back
    assert owner_of("alpha", card.uuid, [entry]) == [{"owner": "self", "job_id": None}]


def test_it_uses_no_memory_as_proof_g31(cards: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL: utilization not supported, the memory of every process unknown (the backend makes a raw 2^64-1 of it)."""
    stranger, left = cards.process(card=None), cards.process(card=None)
    card = Card(cards.cards[0], monkeypatch)
    card.processes = [{"pid": p.pid, "memory_used_bytes": None} for p in (stranger, left)]
    card.used, card.load = 20 * GIB, None  # type: ignore[assignment]
    cards.work(left)
    for _ in range(2):
        cards.due_round()
    assert cards.signalled == [(left.pid, TERM)]
    assert dead(left)
    card.processes.pop()
    cards.round()
    assert not WatchdogEvent.objects.filter(finding=Finding.GHOST).exists()
    ended = cards.row(pid=left.pid)
    assert (ended.state, ended.memory_before_bytes, ended.freed_bytes) == (State.GONE, None, None)


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]


def test_it_signals_nobody_when_the_kernel_gives_the_number_again(tmp_path: Path) -> None:
    """True reuse, in a PID namespace of its own: the number of a dead work goes to an innocent process."""
    for words in (UNSHARE, ["unshare", "--user", "--map-root-user", *UNSHARE[1:]]):
        command = [*words, sys.executable, "-m", "tests.jobs.pid_reuse", str(tmp_path)]
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("MISTUDIO_", "DATABASE_URL"))}
        try:
            told = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=100, check=False
            )
        except FileNotFoundError:
            pytest.skip("unshare is not installed")
        if "unshare:" not in told.stderr:
            break
    else:
        pytest.skip(f"no PID namespace may be made here ({told.stderr.strip()})")
    if told.returncode == 77:
        pytest.skip("the kernel does not let us choose the next process number")
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.startswith("reused ")


@pytest.mark.parametrize(("age", "made_up"), [(50, False), (64, False), (70, True)])
def test_a_round_that_found_another_under_way_is_made_up(
    age: int, made_up: bool, cards: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a leftover would wait a whole period more before it is seen for the first time."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(watchdog, "watch", lambda *args: asked.append(args))
    Pulse.objects.create(name=f"watchdog:{cards.host.name}", at=timezone.now() - timedelta(seconds=age))
    watchdog.follow_up(cards.host)
    assert asked == ([(cards.host.name,)] if made_up else [])

"""Beside the work: claim, heartbeat, signals, reaping, the end of the lease. It never runs a tensor operation.

Session leader and subreaper: whatever the work starts stays under it. It runs on its own clock; a database
that does not answer makes it wait, not stop.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.db import connections
from django.utils import timezone
from setproctitle import setproctitle

from gpus import procfs, publish
from gpus.backends import simulated
from gpus.timing import scaled
from jobs import (
    cardloss,
    contact,
    dispatch,
    endings,
    events,
    faults,
    lease,
    losses,
    overtime,
    ownership,
    paths,
    processes,
    requeue,
    tasks,
)
from jobs.models import ACTIVE, Attempt, Job, Outcome, Status
from jobs.patience import AWAY, patiently, quietly
from jobs.processes import Process
from jobs.stall import Lookout

logger = logging.getLogger("mistudio.keeper")

LOOK_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0
KILL_AFTER_SECONDS = 30.0
LEASE_SECONDS = 30.0
MEMBER_TERM_SECONDS = 2.0
START_LIMIT_SECONDS = 120.0  # the start of a work is not scaled
#: Why a keeper ends its work by itself, as the attempt tells it; none of these is the job's own fault.
OUTSIDE = {
    "maintenance": "its keeper was told to end (SIGTERM): the host goes down, or somebody ends its processes",
    "fenced": "the database was away for so long that other hosts may take over",
}


def main(job_id: str, number: int) -> None:
    """The whole life of a keeper, from a fresh process to its exit."""
    if os.getsid(0) != os.getpid():  # a spawned keeper leads its session already
        os.setsid()
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a nudge may come before the loop stands
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # the fork server ignores it, and what it executes inherits that
    setproctitle(f"mistudio keeper {job_id}")
    attempt = Attempt.objects.select_related("job__owner", "host").get(job_id=job_id, number=number)
    me = processes.find(os.getpid())
    assert me is not None
    if not attempt.claim(me.pid, me.start, processes.boot_id()):
        logger.info("attempt %s of %s is not to be claimed", number, job_id)
        return
    faults.point("claimed")
    attempt.refresh_from_db()
    log_to(paths.log_file(attempt.job))
    Keeper(attempt).live()


def log_to(path: Path) -> None:
    """Everything this process and its children print goes to the job's log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


class Keeper:
    """Holds one attempt by the hand."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.job = attempt, attempt.job
        self.on_host = self.job.simulated or not attempt.gpu_uuids or settings.MISTUDIO_TORCH_DEVICE == "cpu"
        self.work: Process | None = None
        self.work_handle = -1
        self.exit_status: int | None = None
        self.stop_sent = False
        self.overdue_at = 0.0
        self.killed_for = ""
        self.ending = ""  # our own reason to end the work: card_lost, timeout, maintenance, fenced
        self.card_lost: cardloss.Loss | None = None
        self.lookout = Lookout(self.job)
        self.contact = contact.Contact()
        self.ran_before = overtime.ran_seconds(self.job)
        self.running_at: float | None = None
        self.ended_at: float | None = None
        self.peak_bytes = 0
        self.observed: int | None = None
        self.sample_at = 0.0
        self.began_at = time.monotonic()
        self.heartbeat_at = 0.0
        self.wake_reader, self.wake_writer = os.pipe()
        self.oom_kills = oom_kills()

    def live(self) -> None:
        self.start_work()
        threading.Thread(target=self.guard, daemon=True).start()
        while not self.work_ended(scaled(LOOK_SECONDS)):
            self.look()
        self.settle()
        self.end_members()
        self.end_lease()
        quietly(dispatch.schedule)
        tasks.ring_watch(self.attempt)
        publish.flush(1.0)

    # Start --------------------------------------------------------------------------------------------

    def start_work(self) -> None:
        """Fork the work, record it, hold its card, and only then let it proceed."""
        token = secrets.token_hex(16)
        gate_reader, gate_writer = os.pipe()
        checkpoint = losses.progress_mark(self.job)
        connections.close_all()  # no connection is shared over a fork
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(gate_writer)
            self._become_work(gate_reader, token)
        os.close(gate_reader)
        self._record(pid, token, checkpoint)
        signal.signal(signal.SIGUSR1, lambda *_: os.write(self.wake_writer, b"."))
        signal.signal(signal.SIGTERM, self.told_to_end)
        faults.point("work_recorded")
        os.write(gate_writer, b"1")
        os.close(gate_writer)

    def _become_work(self, gate: int, token: str) -> None:
        from jobs import work

        status = 1
        try:
            status = work.main(self.job, self.attempt, gate, token)
        except BaseException:
            logger.exception("the work ended without an end")
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _record(self, pid: int, token: str, checkpoint: str) -> None:
        self.work_handle = os.pidfd_open(pid)
        self.work = processes.find(pid)
        assert self.work is not None
        fields = {
            "work_pid": pid,
            "work_start": self.work.start,
            "token_hash": processes.token_hash(token),
            "start_checkpoint": checkpoint,
            "silent_seconds": contact.silence(self.contact.others),
        }
        Attempt.objects.filter(pk=self.attempt.pk).update(**fields)
        for name, value in fields.items():
            setattr(self.attempt, name, value)
        self.hold_card([self.work])

    def hold_card(self, members: list[Process]) -> None:
        """Simulated cards list the processes that hold them: the work and what it executes."""
        if self.job.simulated:
            for uuid in self.attempt.gpu_uuids:
                for member in members:
                    simulated.hold(uuid, member.pid, member.start)

    # Watch --------------------------------------------------------------------------------------------

    def work_ended(self, timeout: float) -> bool:
        """Wait for the work's end, a nudge, or the time-out; True once the work is reaped."""
        ready, _, _ = select.select([self.work_handle, self.wake_reader], [], [], timeout)
        if self.wake_reader in ready:
            os.read(self.wake_reader, 64)
        if self.work_handle not in ready:
            return False
        assert self.work is not None
        _, status = os.waitpid(self.work.pid, 0)
        self.exit_status = os.waitstatus_to_exitcode(status)
        self.ended_at = time.monotonic()
        return True

    def look(self) -> None:
        """Once a second: what is asked of us; every 5 s: the heartbeat."""
        self.reap_orphans()
        self.sample_memory()
        answered, row = quietly(self._read_row)
        if answered and row is not None:
            self.obey(row)
            quietly(lambda: self.watch_progress(row.job))
        else:
            self.lookout.pace.look_away()
        if time.monotonic() - self.heartbeat_at >= scaled(HEARTBEAT_SECONDS):
            self.heartbeat_at = time.monotonic()
            quietly(self.heartbeat)
            quietly(self.look_at_cards)
        if self.card_lost:
            self.end_work("card_lost")
        elif self.over_time():
            self.end_work("timeout")
        elif self.ending:
            self.end_work(self.ending)

    def look_at_cards(self) -> None:
        self.card_lost = self.card_lost or cardloss.of_card(self.attempt)

    def _read_row(self) -> Attempt:
        fields = ("status", "attempt", "cancel_requested_at", "pause_requested_at", "progress", "stalled")
        named = [f"job__{name}" for name in fields]
        return Attempt.objects.select_related("job").only("job", "outcome", *named).get(pk=self.attempt.pk)

    def obey(self, row: Attempt) -> None:
        job = row.job
        if job.attempt != self.attempt.number or row.outcome == Outcome.LOST:
            self.kill("the job is no longer this attempt's")
        elif job.status not in ACTIVE or job.cancel_requested_at:
            # A work that has just written its end has a moment left to say so and go.
            self.stop()
            self.kill_when_overdue("cancel")
        elif job.pause_requested_at:
            self.stop()
        elif job.status == Status.STARTING and time.monotonic() - self.began_at > START_LIMIT_SECONDS:
            self.kill("never_started")

    def watch_progress(self, job: Job) -> None:
        if job.status == Status.RUNNING and self.work is not None:
            self.running_at = self.running_at or time.monotonic()
            self.lookout.see(job, self.work)

    # Ends of our own ------------------------------------------------------------------------------------

    def ran(self) -> float:
        """Seconds of running so far, in this attempt."""
        if self.running_at is None:
            return 0.0
        return (self.ended_at or time.monotonic()) - self.running_at

    def over_time(self) -> bool:
        limit = self.job.time_limit_seconds
        return limit is not None and self.running_at is not None and self.ran_before + self.ran() >= limit

    def told_to_end(self, *args: object) -> None:
        self.ending = self.ending or "maintenance"
        os.write(self.wake_writer, b".")

    def guard(self) -> None:
        """Beside the loop, which a database that is stuck may hold up: end the work before others take it over."""
        while not self.contact.lost():
            time.sleep(scaled(LOOK_SECONDS))
        self.ending = self.ending or "fenced"
        self.stop()
        time.sleep(scaled(KILL_AFTER_SECONDS))
        self.kill("fenced")

    def end_work(self, why: str) -> None:
        """It may keep a checkpoint, and goes then."""
        self.ending = why
        self.stop()
        self.kill_when_overdue(why)

    def stop(self) -> None:
        """Ask once. A pause waits as long as it takes to write a checkpoint."""
        assert self.work is not None
        if not self.stop_sent:
            self.stop_sent = True
            processes.send(self.work, signal.SIGTERM)

    def kill_when_overdue(self, why: str) -> None:
        """30 s after it was asked to stop, when the work has not found the time to end."""
        self.overdue_at = self.overdue_at or time.monotonic() + scaled(KILL_AFTER_SECONDS)
        if time.monotonic() > self.overdue_at:
            self.kill(why)

    def kill(self, why: str) -> None:
        assert self.work is not None
        self.killed_for = self.killed_for or why
        processes.send(self.work, signal.SIGKILL)

    def heartbeat(self) -> None:
        seen_ticks, found = processes.ticks_now(), processes.descendants(os.getpid())
        self.hold_card([p for p in found if p != self.work])
        self.attempt.members = [[p.pid, p.start] for p in found]
        asked_at, others = contact.boot_seconds(), contact.others()
        Attempt.objects.filter(pk=self.attempt.pk, ended_at=None).update(
            heartbeat_at=timezone.now(),
            members=self.attempt.members,
            seen_ticks=seen_ticks,
            ran_seconds=self.ran(),
            silent_seconds=contact.silence(others),
            **self.peak(),
        )
        self.contact.made(asked_at, others)
        observed = self.observed if self.job.simulated else None
        self.attempt.leases.filter(ended_at=None).update(observed_bytes=observed)

    def peak(self) -> dict[str, int | None]:
        """What to write of the peak; on a real card it is the work that knows it (`jobs.peaks`)."""
        return {"peak_memory_bytes": self.peak_bytes or None} if self.on_host else {}

    def sample_memory(self) -> None:
        """The peak so far. The kernel walks the work's page tables for it (30 ms per GB, in which the work
        cannot map memory), so it is asked at most for 1 % of the time."""
        if self.work is None or not self.on_host or time.monotonic() < self.sample_at:
            return
        began = time.monotonic()
        self.observed = procfs.private_bytes(self.work.pid)
        self.peak_bytes = max(self.peak_bytes, self.observed or 0)
        self.sample_at = time.monotonic() + 100 * (time.monotonic() - began)

    def reap_orphans(self) -> None:
        """As subreaper we inherit what the work's children leave behind."""
        assert self.work is not None
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == self.work.pid:
                    return
                os.waitpid(found.si_pid, 0)

    # End ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the job its end if the work could not, trying until the database answers."""
        patiently(self._note_exit)
        patiently(self._settle_or_fail)

    def _settle_or_fail(self) -> None:
        """An end that cannot be carried out (a full disk, a value that cannot be stored) is a failure, too."""
        try:
            self._settle()
        except AWAY:
            raise
        except Exception as error:
            logger.exception("the end of %s", self.job.pk)
            endings.fail(self.job, self.attempt, *endings.reason_of_end(error))

    def _note_exit(self) -> None:
        ours = Attempt.objects.filter(pk=self.attempt.pk)
        ours.update(
            exit_status=self.exit_status,
            heartbeat_at=timezone.now(),
            ran_seconds=self.ran(),
            **self.peak(),
        )
        Job.objects.filter(pk=self.job.pk, attempt=self.attempt.number).update(
            peak_memory_bytes=ours.values_list("peak_memory_bytes", flat=True).get()
        )

    def _settle(self) -> None:
        self.job.refresh_from_db()
        ours = self.job.attempt == self.attempt.number and self.job.status in ACTIVE
        if ours and not endings.complete(self.job, self.attempt):
            self._end_without_words()

    def _end_without_words(self) -> None:
        job, attempt, status = self.job, self.attempt, self.exit_status or 0
        if job.cancel_requested_at or self.killed_for == "cancel":
            endings.cancelled(job, attempt)
        elif self.card_lost:
            requeue.card_lost(job, attempt, self.card_lost)
        elif self.ending == "timeout":
            requeue.timed_out(job, attempt)
        elif self.killed_for == "never_started":
            requeue.never_started(job, attempt, f"the work did not start in {START_LIMIT_SECONDS:.0f} s")
        elif status == -signal.SIGKILL and not self.killed_for and oom_kills() > self.oom_kills:
            endings.fail(
                job, attempt, "host_out_of_memory", *requeue.host_out_of_memory(job, self.peak_bytes)
            )
        elif self.ending:
            requeue.lost(job, attempt, OUTSIDE[self.ending], counted=False)
        elif status < 0:
            requeue.lost(job, attempt, f"the work was ended by {signal.Signals(-status).name}")
        else:
            endings.fail(job, attempt, "error", f"The work left with status {status} and no result.")

    def end_members(self) -> None:
        """What the work left behind: TERM, 2 s, KILL."""
        processes.end(self._find_members, scaled(MEMBER_TERM_SECONDS), meanwhile=self._reap_all)

    def _find_members(self) -> set[Process]:
        """Remembered, for the card may list them when they are dead."""
        found = processes.descendants(os.getpid())
        quietly(lambda: ownership.remember(self.attempt, found))
        return found

    def _reap_all(self) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def end_lease(self) -> None:
        deadline = time.monotonic() + scaled(LEASE_SECONDS)
        while quietly(lambda: lease.end_if_free(self.attempt)) != (True, True):
            if time.monotonic() > deadline:
                quietly(lambda: lease.quarantine(self.attempt))
                return
            time.sleep(scaled(0.5))
        faults.point("lease_ended")
        quietly(lambda: events.changed(self.job))


def oom_kills() -> int:
    """The host's count of processes ended by the kernel for lack of memory."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

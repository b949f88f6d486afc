"""Jobs whose processes are gone, and doorbells that were lost. Runs every 10 s on each host's queue.

It acts only where the keeper is null or proven gone on this host and boot; the job rows of other hosts are
theirs, but for launches that nobody ever claimed.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from gpus.models import Host, within
from gpus.timing import scaled
from jobs import (
    dispatch,
    endings,
    events,
    lease,
    ownership,
    paths,
    processes,
    requeue,
    takeover,
    tasks,
    watchdog,
)
from jobs.models import ACTIVE, WAITING, Attempt, Job, Lease, Outcome, Status
from jobs.patience import AWAY
from jobs.processes import Process
from jobs.turns import one_at_a_time

logger = logging.getLogger(__name__)
Row = TypeVar("Row", Attempt, Job, Host)

UNCLAIMED_SECONDS = 60.0  # the start of a work is not scaled
TERM_SECONDS = 2.0
LEASE_SECONDS = 30.0


def recover_host(name: str) -> None:
    """One round for the attempts of this host, then a dispatch."""
    host, _ = Host.objects.get_or_create(name=name)
    Host.objects.filter(pk=host.pk).update(worker_seen_at=timezone.now())
    with one_at_a_time("recovery") as mine:
        if mine:
            each(unclaimed(), lambda attempt: ring_or_give_up(attempt, host))
            each(claimed(host), end_if_orphan)
            each(takeover.silent_too_long(host), take_over)
            each(unfinished_leases(host), end_leases)
            each(asked_to_end(), end_waiting)
    each([host], watchdog.follow_up)
    dispatch.schedule()


def each(rows: Iterable[Row], repair: Callable[[Row], None]) -> None:
    """One that cannot be repaired must not keep the others from it."""
    for row in rows:
        try:
            repair(row)
        except Exception:
            logger.exception("recovery of %s", row)


def asked_to_end() -> QuerySet[Job]:
    return Job.objects.filter(status__in=WAITING).exclude(cancel_requested_at=None)


def end_waiting(job: Job) -> None:
    """A cancel that came while the job was between two states."""
    if job.move(WAITING, Status.CANCELLED):
        events.changed(job)


def open_attempts() -> QuerySet[Attempt]:
    return Attempt.objects.filter(ended_at=None).select_related("job__owner", "host")


def unclaimed() -> QuerySet[Attempt]:
    return open_attempts().filter(keeper_pid=None)


def claimed(host: Host) -> QuerySet[Attempt]:
    return open_attempts().filter(host=host).exclude(keeper_pid=None)


def ring_or_give_up(attempt: Attempt, host: Host) -> None:
    """Granted, no keeper: ring again; after 60 s the launch has failed, whatever host it was for."""
    if not within(attempt.granted_at, UNCLAIMED_SECONDS):
        if requeue.never_started(attempt.job, attempt, "no keeper claimed the attempt"):
            lease.end_unused(attempt)
    elif attempt.host_id == host.pk:
        tasks.ring_run(attempt)


def keeper_gone(attempt: Attempt) -> bool:
    """Proof that the keeper of a claimed attempt of this host no longer runs."""
    if attempt.keeper_pid is None or attempt.keeper_start is None:
        return False
    if attempt.boot_id != processes.boot_id():
        return True
    return not processes.alive(Process(attempt.keeper_pid, attempt.keeper_start))


def end_if_orphan(attempt: Attempt) -> None:
    """Members TERM, 2 s, KILL; then the end that the work wrote, else `lost` and back to the queue."""
    if not keeper_gone(attempt):
        return
    if end_members(attempt):
        return  # a process that cannot be ended yet still computes: the next round looks again
    rebooted = attempt.boot_id != processes.boot_id()
    why = "the host was started anew" if rebooted else "the keeper's process is gone"
    try:
        settle(attempt.job, attempt, why, counted=not rebooted)
    except AWAY:
        raise
    except Exception as error:
        logger.exception("the end of %s", attempt)
        endings.fail(attempt.job, attempt, *endings.reason_of_end(error))


def take_over(attempt: Attempt) -> None:
    """An attempt of a host that is silent: its keeper has ended the work by now."""
    why = f"host {attempt.host} was silent for {attempt.silent_seconds:.0f} s"
    settle(attempt.job, attempt, why, counted=False)


def settle(job: Job, attempt: Attempt, why: str, *, counted: bool) -> None:
    if endings.complete(job, attempt):
        return
    ours = job.attempt == attempt.number
    if ours and job.status == Status.STARTING:
        requeue.never_started(job, attempt, "the keeper ended before the work ran")
    elif ours and job.status == Status.RUNNING:
        requeue.lost(job, attempt, why, counted=counted)
    else:
        endings.close(attempt, Outcome.ENDED)


def end_members(attempt: Attempt) -> set[Process]:
    """TERM, 2 s, KILL; returns who is left."""

    def find() -> set[Process]:
        found = ownership.members(attempt)
        ownership.remember(attempt, found)
        return found

    return processes.end(find, min(TERM_SECONDS, scaled(TERM_SECONDS)))


def unfinished_leases(host: Host) -> set[Attempt]:
    """Attempts that have ended and not let go; those in quarantine are the watchdog's."""
    releasing = Lease.objects.filter(ended_at=None, attempt__host=host).exclude(attempt__ended_at=None)
    releasing = releasing.exclude(state=Lease.State.QUARANTINED)
    return {open_lease.attempt for open_lease in releasing.select_related("attempt__job")}


def end_leases(attempt: Attempt) -> None:
    """Leases whose keeper is gone: ended when card and processes let go, quarantined after 30 s."""
    if not (attempt.keeper_pid is None or keeper_gone(attempt)):
        return
    end_members(attempt)
    if not lease.end_if_free(attempt) and not within(attempt.ended_at, scaled(LEASE_SECONDS)):
        lease.quarantine(attempt)


def wake_keeper(job_id: str) -> None:
    """Make the keeper read its row now instead of within a second."""
    attempt = Attempt.objects.filter(job_id=job_id, ended_at=None).exclude(keeper_pid=None).last()
    if attempt and attempt.boot_id == processes.boot_id():
        processes.send(Process(attempt.keeper_pid or 0, attempt.keeper_start or 0), signal.SIGUSR1)


def prune_staging() -> None:
    """Staging of ended attempts without an end; never that of an open one."""
    open_names = {paths.staging(job, job.attempt).name for job in Job.objects.filter(status__in=ACTIVE)}
    for folder in (settings.MISTUDIO_HOME / ".staging").iterdir():
        old = time.time() - folder.stat().st_mtime > timedelta(hours=1).total_seconds()
        if old and folder.name not in open_names:
            shutil.rmtree(folder, ignore_errors=True)

"""Jobs whose processes are gone, and doorbells that were lost. Runs every 10 s on each host's queue.

It acts only where the keeper is null or proven gone on this host and boot; the job rows of other hosts are
theirs, but for launches that nobody ever claimed.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from gpus.models import Host, within
from gpus.timing import scaled
from jobs import dispatch, endings, lease, paths, processes, tasks
from jobs.models import ACTIVE, Attempt, Job, Lease, Status
from jobs.processes import Process

logger = logging.getLogger(__name__)

UNCLAIMED_SECONDS = 60.0  # the start of a work is not scaled
TERM_SECONDS = 2.0
LEASE_SECONDS = 30.0


def recover_host(name: str) -> None:
    """One round for the attempts of this host, then a dispatch."""
    host, _ = Host.objects.get_or_create(name=name)
    Host.objects.filter(pk=host.pk).update(worker_seen_at=timezone.now())
    for step in (ring_unclaimed, end_orphans, end_open_leases):
        _guarded(step, host)
    dispatch.schedule()


def _guarded(step: Callable[[Host], None], host: Host) -> None:
    """One attempt that cannot be repaired must not keep the others from it."""
    try:
        step(host)
    except Exception:
        logger.exception("recovery of %s: %s", host, step.__name__)


def _open(host: Host) -> QuerySet[Attempt]:
    return Attempt.objects.filter(host=host, ended_at=None).select_related("job__owner", "host")


def ring_unclaimed(host: Host) -> None:
    """Granted, no keeper: ring again; after 60 s the launch has failed."""
    for attempt in Attempt.objects.filter(ended_at=None, keeper_pid=None).select_related(
        "job__owner", "host"
    ):
        if not within(attempt.granted_at, UNCLAIMED_SECONDS):
            endings.never_started(attempt.job, attempt, "no keeper claimed the attempt")
            lease.end_if_free(attempt)
        elif attempt.host_id == host.pk:
            tasks.ring_run(attempt)


def keeper_gone(attempt: Attempt) -> bool:
    """Proof that the keeper of a claimed attempt of this host no longer runs."""
    if attempt.keeper_pid is None or attempt.keeper_start is None:
        return False
    if attempt.boot_id != processes.boot_id():
        return True
    return not processes.alive(Process(attempt.keeper_pid, attempt.keeper_start))


def end_orphans(host: Host) -> None:
    for attempt in _open(host).exclude(keeper_pid=None):
        if keeper_gone(attempt):
            end_orphan(attempt)


def end_orphan(attempt: Attempt) -> None:
    """Members TERM, 2 s, KILL; then the end that the work wrote, else `lost` and back to the queue."""
    end_members(attempt)
    job = attempt.job
    if endings.complete(job, attempt):
        return
    if job.status == Status.STARTING:
        endings.never_started(job, attempt, "the keeper ended before the work ran")
    elif job.status == Status.RUNNING:
        endings.lost(job, attempt, "the keeper's process is gone")
    else:
        endings.close(attempt, "ended")


def end_members(attempt: Attempt) -> None:
    left = processes.members(attempt)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in left:
            processes.send(member, number)
        deadline = time.monotonic() + min(TERM_SECONDS, scaled(TERM_SECONDS))
        while (left := {p for p in left if processes.alive(p)}) and time.monotonic() < deadline:
            time.sleep(0.02)


def end_open_leases(host: Host) -> None:
    """Leases whose keeper is gone: ended when card and processes let go, quarantined after 30 s."""
    open_leases = Lease.objects.filter(ended_at=None, attempt__host=host).exclude(attempt__ended_at=None)
    for attempt in {le.attempt for le in open_leases.select_related("attempt__job")}:
        quarantined = attempt.leases.filter(state=Lease.State.QUARANTINED).exists()
        if not (quarantined or attempt.keeper_pid is None or keeper_gone(attempt)):
            continue
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

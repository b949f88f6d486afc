"""Celery rings the bell: each task carries an id, ends within 2 s, and finding nothing to do is normal.

Losing or doubling any message changes nothing: the job table is the queue (docs/adr/0001).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import Task, shared_task
from django.conf import settings
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from gpus.models import Pulse

if TYPE_CHECKING:
    from jobs.models import Attempt, Job

logger = logging.getLogger(__name__)


def host_queue(host: str) -> str:
    return f"gpu.{host}"


def ring(task: Task, *args: Any, queue: str, expires: float = 60) -> None:
    """Send a message if the broker takes it now. If not, the next tick sees the row."""
    try:
        task.apply_async(args=args, queue=queue, expires=expires, retry=False)
    except (KombuError, RedisError, OSError) as error:
        logger.warning("the broker does not answer (%s); the next tick rings again", error)


def ring_dispatch() -> None:
    ring(dispatch, queue="cpu")


def ring_run(attempt: Attempt) -> None:
    ring(run_job, str(attempt.job_id), attempt.number, queue=host_queue(attempt.host.name))


def ring_nudge(job: Job) -> None:
    if job.host is not None:
        ring(nudge, str(job.pk), queue=host_queue(job.host.name))


def ring_watch(attempt: Attempt) -> None:
    """A job has ended: the watchdog looks at the cards that it had."""
    if attempt.gpu_uuids:
        ring(watch, attempt.gpu_uuids, queue=host_queue(attempt.host.name))


@shared_task(ignore_result=True)
def dispatch() -> None:
    from jobs.dispatch import schedule

    schedule()


@shared_task(ignore_result=True)
def run_job(job_id: str, attempt: int) -> None:
    """The doorbell of an attempt: a keeper is made, which claims it or finds that another did."""
    from jobs.worker import forkserver

    forkserver.request(job_id, attempt)


@shared_task(ignore_result=True)
def nudge(job_id: str) -> None:
    from jobs.recovery import wake_keeper

    wake_keeper(job_id)


@shared_task(ignore_result=True)
def recover() -> None:
    from jobs.recovery import recover_host

    recover_host(settings.MISTUDIO_HOST_NAME)


@shared_task(ignore_result=True)
def watch(cards: list[str] | None = None) -> None:
    """One round of this host's watchdog: all cards, or those of a job that has just ended."""
    from jobs import watchdog

    watchdog.watch(settings.MISTUDIO_HOST_NAME, cards)


@shared_task(ignore_result=True)
def canary(queue: str) -> None:
    Pulse.beat(f"canary:{queue}")


@shared_task(ignore_result=True)
def deliver() -> None:
    """A receiver may hang: the round is a thread's, and the task has ended."""
    from jobs import postman

    postman.wake()


@shared_task(ignore_result=True)
def prune() -> None:
    from jobs import postman, recovery, watchdog

    recovery.prune_staging()
    watchdog.prune()
    postman.prune()


@shared_task(ignore_result=True)
def roll_up_history() -> None:
    from gpus.rollups import roll_up

    roll_up()


@shared_task(ignore_result=True)
def prune_history() -> None:
    """What one task does not finish, after days without any, the next one does at once."""
    from gpus.rollups import prune

    if not prune():
        ring(prune_history, queue="cpu")

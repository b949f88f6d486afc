"""What beat rings, and how often: interval schedules in UTC, each task idempotent and with an expiry."""

from __future__ import annotations

import json

from celery import Task
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from gpus.timing import scaled
from jobs import tasks

DISPATCH_SECONDS = 5.0  # a safety net: submits and ends ring by themselves
RECOVERY_SECONDS = 10.0
WATCHDOG_SECONDS = 60.0
CANARY_SECONDS = 30.0
ROLL_UP_SECONDS = 60.0
DELIVERY_SECONDS = 10.0
PRUNE_SECONDS = 3600.0


def register_common() -> None:
    every("dispatch", tasks.dispatch, DISPATCH_SECONDS, "cpu")
    every("canary cpu", tasks.canary, CANARY_SECONDS, "cpu", "cpu")
    every("deliver", tasks.deliver, DELIVERY_SECONDS, "cpu")
    every("roll up history", tasks.roll_up_history, ROLL_UP_SECONDS, "cpu")
    every("prune", tasks.prune, PRUNE_SECONDS, "cpu")
    every("prune history", tasks.prune_history, PRUNE_SECONDS, "cpu")


def register_host(host: str) -> None:
    """Recovery, watchdog and canary of one host, on its own queue."""
    queue = tasks.host_queue(host)
    every(f"recover {host}", tasks.recover, RECOVERY_SECONDS, queue)
    every(f"watchdog {host}", tasks.watch, WATCHDOG_SECONDS, queue)
    every(f"canary {queue}", tasks.canary, CANARY_SECONDS, queue, queue)


def every(name: str, task: Task, seconds: float, queue: str, *args: str) -> None:
    period = scaled(seconds)
    interval, _ = IntervalSchedule.objects.get_or_create(
        every=round(period * 1_000_000), period=IntervalSchedule.MICROSECONDS
    )
    fields = {
        "task": task.name,
        "interval": interval,
        "crontab": None,
        "args": json.dumps(args),
        "queue": queue,
        "expire_seconds": max(1, round(period * 2)),
        "enabled": True,
    }
    known = PeriodicTask.objects.filter(name=name).first()
    if known is None:
        PeriodicTask.objects.create(name=name, **fields)
    elif any(getattr(known, key) != value for key, value in fields.items()):
        for key, value in fields.items():
            setattr(known, key, value)
        known.save()

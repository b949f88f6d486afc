"""The Celery application. It rings bells; the job table is the queue (docs/adr/0001)."""

from __future__ import annotations

import os

from celery import Celery
from celery.signals import beat_init, worker_ready

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")

app = Celery("mistudio")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["jobs", "monitor"])


@worker_ready.connect
def host_worker_is_ready(sender: object, **kwargs: object) -> None:
    """The host's worker warms its fork server and says at once that it is there."""
    from django.conf import settings

    from jobs import schedule, tasks
    from jobs.worker import forkserver

    queues = {queue.name for queue in sender.task_consumer.queues}  # type: ignore[attr-defined]
    for queue in queues:
        tasks.ring(tasks.canary, queue, queue=queue)  # the first sign of life, for `up` and the health page
    if tasks.host_queue(settings.MISTUDIO_HOST_NAME) in queues:
        schedule.register_host(settings.MISTUDIO_HOST_NAME)
        if settings.MISTUDIO_JOB_START == "fork":
            forkserver.warm()
        for task in (tasks.recover, tasks.watch):
            tasks.ring(task, queue=tasks.host_queue(settings.MISTUDIO_HOST_NAME))


@beat_init.connect
def schedule_common(**kwargs: object) -> None:
    from jobs import schedule
    from monitor import tasks

    schedule.register_common()
    schedule.every("prune tool calls", tasks.prune_tool_calls, schedule.PRUNE_SECONDS, "cpu")

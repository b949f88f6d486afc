"""Waiting until nothing runs any more, for the commands that ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError

from gpus.models import Host
from jobs import maintenance
from jobs.models import Job
from mistudio.telling import Progress

LOOK_SECONDS = 0.5


def host_named(name: str | None) -> Host | None:
    """The host, or `None` for all. Raises `CommandError` with the names that there are."""
    if name is None:
        return None
    host = Host.objects.filter(name=name).first()
    if host is None:
        known = ", ".join(Host.objects.order_by("name").values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no host {name!r}. There are: {known}.")
    return host


def until_nothing_runs(
    host: Host | None, stdout: Any, limit: float | None, only: Callable[[Job], bool] = lambda job: True
) -> list[Job]:
    """Tell how many still run until none does, or `limit` seconds have passed; those that are left then."""
    line, began = Progress(stdout), time.monotonic()
    while left := [job for job in maintenance.running(host) if only(job)]:
        if limit is not None and time.monotonic() - began >= limit:
            return left
        names = ", ".join(str(job) for job in left[:3]) + (", …" if len(left) > 3 else "")
        line.say(f"{len(left)} of them still run: {names}")
        time.sleep(LOOK_SECONDS)
    while (cards := maintenance.held_cards(host)) and (limit is None or time.monotonic() - began < limit):
        line.say(f"no job runs; {cards} cards wait for memory to come back")
        time.sleep(LOOK_SECONDS)
    return []


def where(job: Job) -> str:
    """`training 1a2b (sae_training, alice) on GPU-… of alpha`."""
    return f"{job} ({job.kind}, {job.owner}) on {job.gpu_uuid or 'the CPU'} of {job.host}"

"""The channels that exist, who may hear them, and their snapshots: the rows as they are now, as frames.

A snapshot has the event name of the channel's frames and `seq` 0: it stands before every published frame.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from django.contrib.auth.models import AbstractBaseUser
from django.utils import timezone

from gpus import shapes
from gpus.models import Gpu, Host
from jobs.models import Job

HOST_PARTS = ("cpu", "memory", "disk", "network")
GENERAL = frozenset({"system/gpus", "jobs", *(f"system/{part}" for part in HOST_PARTS)})
JOBS_IN_SNAPSHOT = 50

Frame = dict[str, Any]


class UnknownChannel(Exception):
    """There is no such channel, or not for this user (who is not told which)."""


def resolve(name: Any, user: AbstractBaseUser) -> str:
    """The channel behind a name: an index becomes the card's UUID, so that frames stay with the card."""
    if not isinstance(name, str) or len(name) > 200:
        raise UnknownChannel(name)
    name = name.strip("/")
    if name in GENERAL:
        return name
    if name.startswith("system/gpu/"):
        return f"system/gpu/{_card(name.removeprefix('system/gpu/')).uuid}"
    if name.startswith("jobs/"):
        return f"jobs/{_job(name.removeprefix('jobs/'), user).pk}"
    raise UnknownChannel(name)


def _card(gpu_id: str) -> Gpu:
    """By UUID, by index where only one host has it, or by `host/index`."""
    cards = Gpu.objects.select_related("host")
    position = re.fullmatch(r"(?:(?P<host>[^/]+)/)?(?P<index>\d{1,4})", gpu_id, re.ASCII)
    if position:
        cards = cards.filter(index=int(position["index"]), removed_at=None)
        found = cards.filter(host__name=position["host"]) if position["host"] else cards
    else:
        found = cards.filter(uuid__iexact=gpu_id)
    if len(found) != 1:
        raise UnknownChannel(gpu_id)
    return found[0]


def _job(job_id: str, user: AbstractBaseUser) -> Job:
    try:
        job = Job.objects.select_related("owner", "host").get(pk=UUID(job_id))
    except (ValueError, Job.DoesNotExist):
        raise UnknownChannel(job_id) from None
    if job.owner_id != user.pk and not user.is_staff:
        raise UnknownChannel(job_id)
    return job


def snapshot(channel: str, user: AbstractBaseUser) -> list[Frame]:
    if channel == "jobs":
        return [_frame(channel, "job:changed", data) for data in _jobs()]
    if channel.startswith("jobs/"):
        return [_frame(channel, "job:changed", _whole_job(channel, user))]
    return [_frame(channel, "system:metrics", data) for data in _metrics(channel)]


def _frame(channel: str, event: str, data: Any) -> Frame:
    moment = timezone.now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"channel": channel, "event": event, "seq": 0, "ts": moment, "data": data}


def _jobs() -> list[dict[str, Any]]:
    from jobs.serializers import reduced

    newest = Job.objects.select_related("owner", "host").order_by("-queued_at")[:JOBS_IN_SNAPSHOT]
    return [reduced(job) for job in reversed(newest)]


def _whole_job(channel: str, user: AbstractBaseUser) -> dict[str, Any]:
    from jobs.serializers import full

    return full(_job(channel.removeprefix("jobs/"), user))


def _metrics(channel: str) -> list[dict[str, Any]]:
    """In the shapes in which the agent publishes them."""
    if channel.startswith("system/gpu/"):
        card = _card(channel.removeprefix("system/gpu/"))
        return [{"metric_type": "gpu", "host": card.host.name, **_reading(card)}]
    if channel == "system/gpus":
        cards = [_reading(card) for card in Gpu.objects.filter(removed_at=None).select_related("host")]
        return [{"metric_type": "gpu", "gpus": cards, "aggregate": shapes.aggregate(cards)}]
    part = channel.removeprefix("system/")
    hosts = Host.objects.order_by("name")
    return [{"metric_type": part, "host": host.name, **(host.reading.get(part) or {})} for host in hosts]


def _reading(card: Gpu) -> shapes.Metrics:
    return shapes.metrics(card.index, card.uuid, card.reading, card.sampled_at)

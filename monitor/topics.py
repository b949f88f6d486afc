"""The channels that exist, who may hear them, and their snapshots: the rows as they are now, as frames.

A snapshot has the event name of the channel's frames and `seq` 0: it stands before every published frame.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib.auth.models import AbstractBaseUser
from django.utils import timezone

from gpus import shapes
from gpus.choice import KnownCards
from gpus.models import Gpu, Host
from gpus.rest import ApiError
from jobs.models import Job
from jobs.serializers import full, may_see, reduced

HOST_PARTS = ("cpu", "memory", "disk", "network")
GENERAL = frozenset({"system/gpus", "jobs", *(f"system/{part}" for part in HOST_PARTS)})
JOBS_IN_SNAPSHOT = 20

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
    """Named as everywhere: by UUID, by index where only one host is known, or by `host/index`."""
    try:
        return KnownCards().find(gpu_id)
    except ApiError:
        raise UnknownChannel(gpu_id) from None


def _job(job_id: str, user: AbstractBaseUser) -> Job:
    try:
        job = Job.objects.select_related("owner", "host").get(pk=UUID(job_id))
    except (ValueError, Job.DoesNotExist):
        raise UnknownChannel(job_id) from None
    if not may_see(job, user):
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
    rows = Job.objects.select_related("owner", "host")
    rows = rows.prefetch_related("attempts__host", "inputs__artifact", "artifacts", "after")
    newest = rows.order_by("-queued_at")[:JOBS_IN_SNAPSHOT]
    return [reduced(job) for job in reversed(newest)]


def _whole_job(channel: str, user: AbstractBaseUser) -> dict[str, Any]:
    return full(_job(channel.removeprefix("jobs/"), user))


def _metrics(channel: str) -> list[dict[str, Any]]:
    """In the shapes in which the agents publish them: one frame per host, or per card."""
    if channel.startswith("system/gpu/"):
        card = _card(channel.removeprefix("system/gpu/"))
        return [{"metric_type": "gpu", "host": card.host.name, **_reading(card)}]
    hosts = Host.objects.order_by("name").prefetch_related("gpus")
    if channel == "system/gpus":
        return [_all_cards(host) for host in hosts]
    return [_part(host, channel.removeprefix("system/")) for host in hosts]


def _reading(card: Gpu) -> shapes.Metrics:
    return shapes.metrics(card.index, card.uuid, card.reading, card.sampled_at)


def _all_cards(host: Host) -> dict[str, Any]:
    cards = [card for card in host.gpus.all() if card.removed_at is None]
    readings = [_reading(card) for card in cards]
    return {
        "metric_type": "gpus",
        "host": host.name,
        "gpus": readings,
        "aggregate": shapes.aggregate(readings),
        "errors": {card.uuid: card.error for card in cards if card.error},
        "backend_error": host.backend_error or None,
    }


def _part(host: Host, part: str) -> dict[str, Any]:
    sampled_at = host.reading.get("sampled_at")
    return {
        "metric_type": part,
        "host": host.name,
        "sampled_at": sampled_at,
        **(host.reading.get(part) or {}),
    }

"""Whether every part of miStudio answers. A part that is not built yet is `None` and degrades nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

import redis
from django.conf import settings
from django.db import Error, connection
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpus.models import Host, Pulse
from gpus.timing import scaled

BROKER_SECONDS = 0.5
#: A host that was not seen for a day was taken away, and is no fault.
FORGOTTEN = timedelta(days=1)
#: Beat ticks every 5 s, canaries every 30 s, the watchdog every 60 s: three misses are a fault.
CANARY_SECONDS, BEAT_SECONDS, WATCHDOG_SECONDS = 90.0, 60.0, 180.0
Word = Literal["ok", "down"]


class Alive(TypedDict):
    alive: int
    known: int


class Checks(TypedDict):
    database: Word
    redis: Word
    agents: Alive | None
    workers: Alive | None
    canary_age_s: float | None
    beat_age_s: float | None
    watchdog_age_s: float | None
    failed_launches: int | None


class Health(TypedDict):
    status: Literal["ok", "degraded"]
    checks: Checks


_counters: list[Callable[[], int]] = []


def register(failed_launches: Callable[[], int]) -> None:
    """Let the floor above say how many jobs wait because their launch failed again and again."""
    _counters[:] = [failed_launches]


def state() -> Health:
    """No host names, paths or versions: strangers may read this."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        checks = _checks("ok", Host.objects.all(), dict(Pulse.objects.values_list("name", "at")))
    except Error:
        checks = _checks("down", None, {})
    return {"status": "ok" if healthy(checks) else "degraded", "checks": checks}


def _checks(database: Word, hosts: Any, pulses: dict[str, datetime]) -> Checks:
    known = [host for host in hosts if not _forgotten(host)] if hosts is not None else None
    canaries = _pulses(pulses, "canary")
    return {
        "database": database,
        "redis": "ok" if broker_answers() else "down",
        "agents": None if known is None else _alive([host.agent_alive() for host in known]),
        "workers": None if known is None else _alive([host.worker_alive() for host in known]),
        "canary_age_s": _age(min(canaries, default=None)),
        "beat_age_s": _age(pulses.get("beat")),
        "watchdog_age_s": _age(min(_pulses(pulses, "watchdog"), default=None)),
        "failed_launches": None if known is None else sum(count() for count in _counters),
    }


def _pulses(pulses: dict[str, datetime], name: str) -> list[datetime]:
    """Those of every queue or host, `name:…`; the oldest of them counts. What is gone for a day is no fault."""
    return [at for key, at in pulses.items() if key.startswith(name) and timezone.now() - at < FORGOTTEN]


def _forgotten(host: Host) -> bool:
    seen = [moment for moment in (host.agent_seen_at, host.worker_seen_at) if moment]
    return not seen or timezone.now() - max(seen) > FORGOTTEN


def _alive(answers: list[bool]) -> Alive:
    return {"alive": sum(answers), "known": len(answers)}


def _age(moment: datetime | None) -> float | None:
    return round(max(0.0, (timezone.now() - moment).total_seconds()), 1) if moment else None


def broker_client() -> redis.Redis:
    """For one short question, in a `with`: half a second, and no second try."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=BROKER_SECONDS,
        socket_connect_timeout=BROKER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def broker_answers() -> bool:
    try:
        with broker_client() as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False


def healthy(checks: Checks) -> bool:
    return all(good(checks).values())


def good(checks: Checks) -> dict[str, bool]:
    """Check by check; what is not built yet is no fault."""
    return {
        "database": checks["database"] == "ok",
        "redis": checks["redis"] == "ok",
        "agents": _all_alive(checks["agents"]),
        "workers": _all_alive(checks["workers"]),
        "canary_age_s": _young(checks["canary_age_s"], CANARY_SECONDS),
        "beat_age_s": _young(checks["beat_age_s"], BEAT_SECONDS),
        "watchdog_age_s": _young(checks["watchdog_age_s"], WATCHDOG_SECONDS),
        "failed_launches": not checks["failed_launches"],
    }


def _all_alive(part: Alive | None) -> bool:
    return part is None or part["alive"] == part["known"] > 0


def _young(age: float | None, limit: float) -> bool:
    return age is None or age <= scaled(limit)

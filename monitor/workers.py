"""Who does the work around the cards: the queues and what waits in them, workers, clock; and whether all are well."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gpus import health
from gpus.models import Host, Pulse
from jobs import queues
from jobs.tasks import host_queue

#: Name of each part, and what its silence means for people.
PARTS = {
    "database": ("Database", "Nothing can be submitted or shown; running jobs compute on."),
    "redis": ("Broker", "Jobs start later, and pages are no longer live; nothing is lost."),
    "agents": ("Agents", "The cards of that host are not read, and start no jobs."),
    "workers": ("Workers", "No job starts on that host; running jobs go on."),
    "canary_age_s": ("Test message", "A worker does not take its messages; it is started anew by `up`."),
    "beat_age_s": ("Clock", "Repairs and repeated work wait; a submit still starts jobs."),
    "failed_launches": (
        "Launches",
        "Work that is started ends before it runs; the last line of its log stands below and on its page.",
    ),
    "watchdog_age_s": ("Watchdog", "Memory that ended jobs left on cards is not cleared."),
}
CANARY = "canary:"


def context(hosts: Sequence[Host]) -> dict[str, Any]:
    """`silent`: the parts that do not answer, in words; `rows`: one per queue."""
    checks = health.state()["checks"]
    pulses = dict(Pulse.objects.values_list("name", "at"))
    return {
        "silent": [PARTS[name][0] for name, fine in health.good(checks).items() if not fine],
        "checks": checks,
        "beat_at": pulses.get("beat"),
        "rows": rows(hosts, pulses),
    }


def rows(hosts: Sequence[Host], pulses: dict[str, datetime]) -> list[dict[str, Any]]:
    """Queues that a worker ever read, and those of the known hosts; each with its last test message."""
    heard = {name.removeprefix(CANARY) for name in pulses if name.startswith(CANARY)}
    names = sorted(heard | {host_queue(host.name) for host in hosts})
    depths = queues.depths(names) or {}
    return [
        {"queue": name, "waiting": depths.get(name), "canary_at": pulses.get(CANARY + name)} for name in names
    ]

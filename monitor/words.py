"""Sentences of the pages: what a card is doing, why a job waits, what needs a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.utils import timezone

from gpus import shapes
from gpus.models import Gpu, Host
from gpus.readings import is_split
from jobs.models import Job, Status
from monitor.templatetags.show import ago, duration, since, size

#: Healths of a card that need a person.
TROUBLE = ("host_lost", "lost", "quarantined", "removed")

Said = dict[str, Any]
Forerunners = Mapping[str, Mapping[str, Any]]


def said(text: str, *, bad: bool = False, **more: Any) -> Said:
    return {"text": text, "bad": bad, **more}


# Cards --------------------------------------------------------------------------------------------------
#: The share of a card's memory from which it is in other hands, not free; a desktop takes less.
TAKEN = 0.1


def state_of_card(info: shapes.Info, outside_bytes: int = 0) -> Said:
    """The word on the card's badge. `outside_bytes` of it are held by programs that are not ours."""
    if info["health"] == "ok" and not info["selectable"]:
        return said("split" if is_split(info) else "not used", tone="")
    if info["health"] == "ok" and info["jobs"]:
        return said("busy", tone="busy")
    if info["health"] == "ok":
        taken = outside_bytes >= TAKEN * (info["memory_total_bytes"] or 0) > 0
        return said("used by others" if taken else "free", tone="")
    tone = "bad" if info["health"] in TROUBLE else "warn"
    word = info["health"].replace("_", " ")
    if info["health"] in ("lost", "host_lost", "stale") and info["last_seen_at"]:
        word += f" · {since(info['last_seen_at'])}"
    return said(word, tone=tone)


def card_says(gpu: Gpu, info: shapes.Info, outside_bytes: int = 0, maintained: bool = False) -> str:
    """What stands where the job would stand when none holds the card."""
    if info["health"] == "lost":
        return f"{sentence(info['health_detail'])}. The card returns by itself when it answers again."
    if info["health"] == "host_lost":
        return f"The agent of {info['host']} is silent; these are its last readings."
    if info["health"] != "ok":
        return " ".join(part for part in (f"{sentence(info['health_detail'])}.", gpu.note) if part)
    if is_split(info):
        return "Split into MIG instances: jobs use those."
    if not info["selectable"]:
        return "Not among MISTUDIO_VISIBLE_GPUS: shown, never used."
    if maintained:
        return " ".join(part for part in ("Takes no job during the maintenance.", gpu.note) if part)
    if gpu.note:
        return gpu.note
    if outside_bytes:
        return f"takes the next job that fits beside the {size(outside_bytes)} of others"
    return "takes the next job that fits"


def sentence(text: str) -> str:
    """Begins with a capital, whatever the rest is; the full stop is the caller's."""
    text = text.strip().rstrip(".")
    return text[:1].upper() + text[1:]


# What needs a person ------------------------------------------------------------------------------------
def silent_agent(host: Host) -> Said:
    seen = f"was last heard {ago(host.agent_seen_at)}" if host.agent_seen_at else "was never heard"
    return said(
        f"The agent of {host.name} {seen}.",
        bad=True,
        more="Values below are its last readings; running jobs are not affected. "
        "`manage.py up` starts it again by itself; on a host of services: `systemctl restart mistudio-agent`.",
    )


def no_cards(host: Host) -> Said:
    return said(f"No card of {host.name} can be read.", bad=False, more=host.backend_error)


def lost_card(info: shapes.Info) -> Said:
    if info["health"] == "quarantined":
        text = f"Card {info['gpu_id']} is closed: memory of an ended job has not come back."
        return said(
            text, bad=True, uuid=info["uuid"], more="It opens by itself as soon as the memory is free."
        )
    text = f"Card {info['gpu_id']} of {info['host']} was lost {ago(info['last_seen_at'])}."
    return said(
        text,
        bad=True,
        uuid=info["uuid"],
        more="Its jobs keep their checkpoints. The other cards are not affected.",
    )


# Jobs ---------------------------------------------------------------------------------------------------
#: Reasons to wait that do not end by themselves.
NEEDS_A_PERSON = ("host", "driver", "outside")
#: States of a job that others wait for, which do not end by themselves either.
DO_NOT_GO_ON = (Status.HELD, Status.PAUSED)
#: Why a job waits, for those who may not read the details.
REASONS = {
    "after": "waits for another job to succeed",
    "input": "waits for an input that another job makes",
    "lease": "waits for the job that holds the card",
    "memory": "too little memory is free now",
    "outside": "others hold the memory of the card",
    "card": "the card takes no job now",
    "driver": "no card can be read",
    "host": "the host is silent",
    "slot": "all CPU slots are taken",
    "turn": "others stand before it in its line",
    "kept": "the card is kept for a larger job that was passed over",
    "user_limit": "its owner runs as many jobs as a user may",
    "launch": "its last launch did not come up",
    "maintenance": "no job starts during a maintenance",
}
#: What stands around the details, for its owner, where they alone do not say what happens.
AROUND = {
    "input": "{}, which makes its input",
    "outside": "{}; refused if the next reading says so too",
    "driver": "no card can be read: {}",
    "launch": "its last launch did not come up: {}",
}


def forerunners(jobs: Iterable[Job]) -> Forerunners:
    """Of the jobs which others wait for: their state, and the seconds that they still need, as they say now."""
    ids = {job.waiting_for["job_id"] for job in jobs if job.waiting_for and job.waiting_for.get("job_id")}
    rows = Job.objects.filter(pk__in=ids).values_list("pk", "status", "progress")
    return {
        str(pk): {"status": status, "eta_seconds": (progress or {}).get("eta_seconds")}
        for pk, status, progress in rows
    }


def why_waiting(job: Job, gpus: Mapping[str, Gpu], before: Forerunners, see: bool = True) -> Said:
    """Why this job does not run yet, and for about how long; only the reason to those who may not see the job."""
    if job.status == Status.STARTING:
        return said(f"starting on {card_word(job.gpu_uuid, gpus)}" if job.gpu_uuid else "starting")
    waits = job.waiting_for or {}
    sentence = reason_to_wait(waits, see)
    if waits.get("reason") == "launch":
        return said(f"{sentence}; tried again {soon(job.not_before)}")
    first = before.get(str(waits.get("job_id")))
    if first and see and first["status"] in DO_NOT_GO_ON:
        return said(f"{sentence}; that one is {first['status']}", bad=True)
    told = waits if waits.get("reason") == "turn" else first or waits  # a turn counts all who stand before it
    if told.get("eta_seconds"):
        sentence += f", about {duration(told['eta_seconds'])}"
    return said(sentence, bad=waits.get("reason") in NEEDS_A_PERSON)


def reason_to_wait(waits: Mapping[str, Any], see: bool) -> str:
    reason, detail = waits.get("reason", ""), waits.get("detail")
    if see and detail:
        return AROUND.get(reason, "{}").format(detail.rstrip("."))
    return REASONS.get(reason, "about to start")


def soon(at: datetime | None) -> str:
    left = (at - timezone.now()).total_seconds() if at else 0
    return f"in {duration(left)}" if left >= 1 else "now"


def card_word(uuid: str | None, gpus: Mapping[str, Gpu]) -> str:
    gpu = gpus.get(uuid or "")
    return f"card {gpu.index}" if gpu else "its card"

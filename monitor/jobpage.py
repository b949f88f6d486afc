"""What a job's page shows; without its details for those who may not see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from django.template.loader import select_template

from gpus.models import Gpu
from jobs import endings, logs, overtime, places, registry, verbs
from jobs.kind import JobKind
from jobs.models import FINAL, Job, JobInput, Status
from jobs.serializers import may_see
from monitor import board, figures, links, why, words
from monitor.templatetags.show import short_uuid, took

LOG_LINES = 200
#: What cancelling does, by the state that the job is in.
CANCEL_SAYS = {
    Status.HELD: "It has not started; it leaves the queue and its parameters stay on this page.",
    Status.QUEUED: "It has not started; it leaves the queue and its parameters stay on this page.",
    Status.PAUSED: "It will not be resumed. Its last checkpoint is kept, and a retry can go on from it.",
    Status.STARTING: "It is starting; it ends within seconds and its card is given back.",
    Status.RUNNING: "The work is told to stop and is ended after 30 s. Its last checkpoint is kept, and a retry can "
    "go on from it; no result is published. Its card is given back.",
}


def context(job: Job, user: User) -> dict[str, Any]:
    gpus, see = board.gpu_map(), may_see(job, user)
    places.tell([job])
    kind = kind_of(job)
    shown = {
        "job": job,
        "kind": kind,
        "see": see,
        "gpus": gpus,
        "final": job.final,
        "names": last_names(job),
        "why": why_waiting(job, gpus, see),
        "lead": lead(job),
    }
    return shown | details(job, kind, gpus) if see else shown


def why_waiting(job: Job, gpus: Mapping[str, Gpu], see: bool) -> words.Said | None:
    waits = job.status in (Status.QUEUED, Status.STARTING)
    return words.why_waiting(job, gpus, words.forerunners([job]), see) if waits else None


def details(job: Job, kind: JobKind | None, gpus: Mapping[str, Gpu]) -> dict[str, Any]:
    return {
        "why_not": why.context(job),
        "attempts": list(job.attempts.select_related("host")),
        "params": parameters(job),
        "artifacts": list(job.artifacts.all()),
        "links": links.of(job),
        "log": logs.tail(job, LOG_LINES),
        "points": figures.points(job),
        "charts": figures.chart_specs(),
        "numbers": figures.numbers(job.result),
        "values": list(figures.other_values(job.result)),
        "figures": figures.result_figures(job),
        "result_template": select_template([f"results/{job.kind}.html", "results/_none.html"]),
        "next": list(links.takers(kind)) if kind else [],
        "cancel_says": None if job.final else CANCEL_SAYS.get(Status(job.status), ""),
        "retry": retry_options(job, gpus) if job.status in (*FINAL, Status.PAUSED) else None,
        "finalizable": can_finalize(job, kind),
        "ran": overtime.ran_seconds(job) if job.time_limit_seconds else None,
        "stall": job.events.filter(event="stalled").last() if job.stalled else None,
    }


def kind_of(job: Job) -> JobKind | None:
    """`None` for jobs of a kind that this version does not have any more."""
    return registry.get(job.kind) if job.kind in registry.names() else None


def lead(job: Job) -> dict[str, Any]:
    """Where it stands: the words and the bar at the top of the page."""
    progress = job.progress or {}
    done, total = progress.get("done"), progress.get("total")
    return {
        "fraction": 1.0 if job.status == Status.SUCCEEDED else progress.get("fraction"),
        "stage": progress.get("stage"),
        "done": done,
        "total": total,
        "unit": progress.get("unit") or "",
        "rate": progress.get("rate"),
        "eta": progress.get("eta_seconds") if job.status == Status.RUNNING else None,
        "message": progress.get("message"),
        "took": took(job),
    }


def last_names(job: Job) -> str:
    """Names of the cards of the latest attempt, as its record keeps them."""
    latest = job.attempts.order_by("-number").first()
    return ", ".join(latest.gpu_names) if latest else ""


def parameters(job: Job) -> list[dict[str, Any]]:
    """Name and value of those that have one; where a parameter named an artifact, what it became and who made it."""
    rows = {row.parameter: row for row in job.inputs.select_related("artifact__job", "source_job")}
    return [
        {"name": name, "value": value, "input": rows.get(name), "maker": maker(rows.get(name))}
        for name, value in job.params.items()
        if value is not None
    ]


def maker(row: JobInput | None) -> Job | None:
    """The job that made the input, or will make it."""
    if row is None:
        return None
    return row.source_job or (row.artifact.job if row.artifact else None)


def can_finalize(job: Job, kind: JobKind | None) -> bool:
    """Whether an artifact can be made from what a training had when it ended early."""
    early = kind is not None and kind.can_finalize() and job.status in verbs.EARLY_ENDS
    return early and bool(endings.newest_checkpoint(job))


def retry_options(job: Job, gpus: Mapping[str, Gpu]) -> dict[str, Any]:
    """The same card first, the others after it; from the checkpoint where there is one."""
    same = [gpus[uuid] for uuid in job.gpu_uuids if uuid in gpus]
    return {
        "same": same_card_label(job, same),
        "others": [gpu for gpu in board.present(gpus.values()) if gpu.selectable and gpu not in same],
        "checkpoint": endings.newest_checkpoint(job),
    }


def same_card_label(job: Job, same: list[Gpu]) -> str:
    if not job.needs_card:
        return ""
    if same:
        return "same card: " + ", ".join(f"{gpu.index} {gpu.name}" for gpu in same)
    if job.gpu_uuids:
        return f"same card: {short_uuid(job.gpu_uuids[0])}, not here any more"
    return f"as asked for: {job.gpu_request}"

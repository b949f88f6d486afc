"""Typed job messages over `gpus.publish`. An event is a nudge; the row is the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpus.publish import publish

if TYPE_CHECKING:
    from jobs.models import Job, WatchdogEvent


def created(job: Job) -> None:
    from jobs.serializers import reduced

    publish("jobs", "job:created", reduced(job))


def changed(job: Job) -> None:
    """State, card or attempt changed: to everybody in reduced form, whole to those who follow the job."""
    from jobs.serializers import full, without_private

    data = full(job)
    publish("jobs", "job:changed", without_private(data))
    publish(f"jobs/{job.pk}", "job:changed", data)


def gpu_assigned(job: Job) -> None:
    data = {
        "id": str(job.pk),
        "attempt": job.attempt,
        "gpu_uuids": job.gpu_uuids,
        "gpu_request": job.gpu_request,
    }
    publish(f"jobs/{job.pk}", "job:gpu_assigned", data)


def progress(job_id: str, attempt: int, data: dict[str, Any]) -> None:
    publish(f"jobs/{job_id}", "job:progress", {"id": job_id, "attempt": attempt, "progress": data})


def metric(job_id: str, step: int, values: dict[str, float | None]) -> None:
    publish(f"jobs/{job_id}", "job:metric", {"id": job_id, "step": step, "values": values})


def log(job_id: str, line: str) -> None:
    publish(f"jobs/{job_id}", "job:log", {"id": job_id, "line": line})


def watchdog(row: WatchdogEvent) -> None:
    from jobs.serializers import WatchdogEventSerializer

    publish("system/gpus", "watchdog:event", dict(WatchdogEventSerializer(row).data))

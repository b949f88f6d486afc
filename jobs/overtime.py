"""The limit of a job's running time: seconds of running over all its attempts; waits and pauses do not count."""

from __future__ import annotations

from django.db.models import Sum

from jobs.models import Job


def ran_seconds(job: Job) -> float:
    """As the keepers counted it, each on its own clock."""
    return job.attempts.aggregate(ran=Sum("ran_seconds"))["ran"] or 0.0


def is_up(job: Job) -> bool:
    return job.time_limit_seconds is not None and ran_seconds(job) >= job.time_limit_seconds


def sentence(job: Job) -> str:
    tries = job.attempts.exclude(started_at=None).count()
    over = f", over {tries} attempts" if tries > 1 else ""
    done = (job.progress or {}).get("fraction")
    reached = f" It was at {done:.0%}." if done is not None else ""
    return f"It ran for {ran_seconds(job):.0f} s{over}; its limit is {job.time_limit_seconds} s.{reached}"


def hint(job: Job) -> str:
    return (
        "Retry from its checkpoint: the retry has as many seconds again. Or submit it with a larger "
        f"time_limit_seconds than {job.time_limit_seconds}."
    )

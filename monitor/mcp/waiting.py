"""`wait_for_job`: look at the job until it has settled or the time is over, and tell its progress meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpus.rest import ApiError
from jobs.models import FINAL, Job, Status
from monitor.lines import progress_line
from monitor.mcp.calls import Answer

#: States that a job does not leave by itself.
SETTLED = FINAL | {Status.PAUSED, Status.HELD}
LOOK_SECONDS = 0.5
#: Each wait is an open connection; an agent that forgets its waits must not take them all.
WAITS_PER_USER = 16
waiting: Counter[Any] = Counter()

Look = Callable[[], Awaitable[Answer]]
Peek = Callable[[], Awaitable[dict[str, Any]]]
Tell = Callable[[float, float | None, str | None], Awaitable[None]]


@contextmanager
def one_of_few(user: Any) -> Iterator[None]:
    if waiting[user] >= WAITS_PER_USER:
        raise ApiError(
            429,
            "too_many_waits",
            f"You wait for {WAITS_PER_USER} jobs at once already.",
            limit=WAITS_PER_USER,
        )
    waiting[user] += 1
    try:
        yield
    finally:
        waiting[user] -= 1


async def wait(look: Look, peek: Peek, seconds: float, tell: Tell) -> Answer:
    """`{settled, waited_seconds, job}`, or the error of a look that fails. Rights are asked at the first look and at
    the last; in between the row is peeked at, which costs little."""
    began, told, first = time.monotonic(), 0.0, await look()
    if first.failed:
        return first
    job = first.data
    while job["status"] not in SETTLED and (left := began + seconds - time.monotonic()) > 0:
        fraction = (job["progress"] or {}).get("fraction") or 0.0
        if fraction > told:  # the protocol wants progress that grows
            told = fraction
            await tell(fraction, 1.0, progress_line(job))
        await asyncio.sleep(min(LOOK_SECONDS, left))
        job = job | await peek()
    last = await look()
    return last if last.failed else found(last.data, time.monotonic() - began)


def found(job: dict[str, Any], waited: float) -> Answer:
    return Answer({"settled": job["status"] in SETTLED, "waited_seconds": round(waited, 1), "job": job})


def peek(job_id: Any) -> dict[str, Any]:
    """What changes while a job runs, as its row has it; nothing for a job that was deleted."""
    return dict(Job.objects.filter(pk=job_id).values("status", "progress").first() or {})

"""What a running job says about itself: published at most twice a second, stored every 5 s, fenced.

While the database does not answer, points and progress are kept and the work goes on: a thread beside it does the
storing, so that a database that hangs holds up nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from django.db import Error as DatabaseError
from django.db import transaction

from gpus.timing import scaled
from jobs import events
from jobs.exceptions import Fenced
from jobs.models import Job, JobMetric

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 0.5  # a cap on frames: not scaled
STORE_SECONDS = 5.0
#: Between two lines of progress in the job's log; the numbers of every step are in its metrics.
LOG_SECONDS = 15.0


def finite(value: float) -> float | None:
    """JSON and databases have no NaN: what is not a number is not known."""
    return float(value) if math.isfinite(value) else None


class Journal:
    """Buffers progress and metrics of one attempt. `store_now` writes both in one transaction."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self.job, self.clock = job, clock
        self.writer: Writer | None = None
        self.buffer, self.storing = threading.Lock(), threading.Lock()
        self.progress: dict[str, Any] = dict(job.progress or {})
        self.points: dict[tuple[str, int], float | None] = {}
        self.unpublished: dict[str, float | None] = {}
        self.published_at = self.stored_at = self.logged_at = self.stage_began_at = clock()
        self.stage_began_done = 0
        self.reported = False

    def write_beside(self) -> None:
        """From now on, what is due every few seconds is stored by a thread of its own."""
        self.writer = Writer(self.store_now)

    def report(self, done: int, total: int, unit: str, stage: str, message: str) -> None:
        changed = stage != self.progress.get("stage") or not self.reported
        if changed:
            if self.reported:
                self._log(self.progress)  # how the stage before ended
            self.stage_began_at, self.stage_began_done = self.clock(), done
        self.reported = True
        told = {
            "stage": stage,
            "done": done,
            "total": total,
            "unit": unit,
            "fraction": min(1.0, done / total) if total else None,
            "message": message,
            "eta_seconds": self._eta(done, total),
        }
        with self.buffer:
            self.progress |= told
        if changed:
            self._log(self.progress | {"metrics": {}})
        self._emit(force=changed)

    def _eta(self, done: int, total: int) -> float | None:
        """Seconds left at the rate of this stage so far: the rate that the page shows."""
        rate = self.rate(done)
        self.progress["rate"] = rate
        return (total - done) / rate if rate and total else None

    def rate(self, done: int) -> float | None:
        elapsed = self.clock() - self.stage_began_at
        return (
            (done - self.stage_began_done) / elapsed
            if elapsed > 0.2 and done > self.stage_began_done
            else None
        )

    def metric(self, step: int, values: dict[str, float]) -> None:
        clean = {name: finite(value) for name, value in values.items()}
        with self.buffer:
            self.points |= {(name, step): value for name, value in clean.items()}
            self.progress["metrics"] = self.progress.get("metrics", {}) | clean
        self.unpublished = clean | {"step": step}
        self._emit()

    def _emit(self, force: bool = False) -> None:
        now = self.clock()
        if force or now - self.published_at >= PUBLISH_SECONDS:
            self.published_at = now
            self._publish()
        if force or now - self.stored_at >= scaled(STORE_SECONDS):
            self._store()
        if now - self.logged_at >= LOG_SECONDS:
            self._log(self.progress)

    def _log(self, progress: Mapping[str, Any]) -> None:
        self.logged_at = self.clock()
        logger.info("%s", in_a_line(progress))

    def _publish(self) -> None:
        job_id = str(self.job.pk)
        events.progress(job_id, self.job.attempt, self.progress)
        if self.unpublished:
            step = int(self.unpublished.pop("step") or 0)
            events.metric(job_id, step, self.unpublished)
            self.unpublished = {}

    def _store(self) -> None:
        self.stored_at = self.clock()
        if self.writer is None:
            self.store_now()
        else:
            self.writer.ask()

    def store_now(self) -> None:
        """Store under the fence; raises `Fenced` when another attempt holds the job."""
        with self.storing:
            with self.buffer:
                progress, points, self.points = dict(self.progress), self.points, {}
            try:
                with transaction.atomic():
                    if not self.job.update_fenced(progress=progress):
                        raise Fenced(f"attempt {self.job.attempt} no longer holds the job")
                    self._store_points(points)
            except DatabaseError as error:
                logger.warning("progress is kept, the database does not answer: %s", error)
                with self.buffer:
                    self.points = points | self.points

    def _store_points(self, points: Mapping[tuple[str, int], float | None]) -> None:
        rows = [JobMetric(job=self.job, name=n, step=s, value=v) for (n, s), v in points.items()]
        JobMetric.objects.bulk_create(
            rows, update_conflicts=True, unique_fields=["job", "name", "step"], update_fields=["value"]
        )


class Writer(threading.Thread):
    """Stores when asked to, beside the work; what it was told to raise is raised to whoever asks next."""

    def __init__(self, store: Callable[[], None]) -> None:
        super().__init__(name="journal", daemon=True)
        self.store, self.due, self.fenced = store, threading.Event(), False
        self.start()

    def ask(self) -> None:
        if self.fenced:
            raise Fenced("another attempt holds the job")
        self.due.set()

    def run(self) -> None:
        while not self.fenced:
            self.due.wait()
            self.due.clear()
            try:
                self.store()
            except Fenced:
                self.fenced = True


def in_a_line(progress: Mapping[str, Any]) -> str:
    """`train: 1200 of 5000 steps (24%), 41.2/s, 92 s left; loss 39.8, l0 32`; of a stage without a size its name."""
    stage, unit = progress.get("stage") or "work", progress.get("unit") or ""
    parts = [stage]
    if progress.get("total"):
        parts[0] += f": {progress.get('done')} of {progress['total']} {unit}".rstrip()
    if progress.get("fraction") is not None:
        parts[0] += f" ({progress['fraction']:.0%})"
    if progress.get("rate"):
        parts.append(f"{progress['rate']:.4g}/s")
    if progress.get("eta_seconds"):
        parts.append(f"{progress['eta_seconds']:.0f} s left")
    return "; ".join(filter(None, [", ".join(parts), figures(progress.get("metrics", {}))]))


def figures(values: Mapping[str, Any]) -> str:
    """The numbers among `values`, for a line of the log."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())

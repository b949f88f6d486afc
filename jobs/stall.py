"""A work that makes no progress for long is asked for its stacks and marked; that it goes on clears the mark."""

from __future__ import annotations

import logging

from jobs import events, processes
from jobs.models import Job, JobEvent
from jobs.pace import Pace
from jobs.processes import Process

logger = logging.getLogger("mistudio.keeper")


class Lookout:
    """What the keeper of one attempt knows of its work's progress."""

    def __init__(self, job: Job) -> None:
        self.job, self.pace = job, Pace()

    def see(self, row: Job, work: Process) -> None:
        """`row` is the job as the database has it now."""
        self.pace.see(row.progress or {})
        if self.pace.stalled != row.stalled and self.job.update_fenced(stalled=self.pace.stalled):
            self._tell(work) if self.pace.stalled else self._story("goes_on", "it makes progress again")

    def _tell(self, work: Process) -> None:
        logger.warning("%s; the stacks of its threads:", self.pace.in_words())
        processes.send(work, processes.DUMP_SIGNAL)
        self._story("stalled", self.pace.in_words())

    def _story(self, event: str, detail: str) -> None:
        JobEvent.objects.create(job=self.job, event=event, detail=detail, attempt=self.job.attempt)
        events.changed(Job.objects.get(pk=self.job.pk))

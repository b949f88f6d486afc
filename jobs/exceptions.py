"""The two families of failure: the job says no (`JobRejected`), or we broke (everything else).

A kind raises `JobRejected` with a sentence for a person; the traceback of any other exception is kept.
"""

from __future__ import annotations


class JobRejected(Exception):
    """The job cannot be done as asked; the message is shown to its owner as it stands.

    Before the first `report()` the job ends `refused`, later `failed`; both with the reason given here.
    """

    def __init__(self, message: str, *, reason: str = "rejected", hint: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint

    @classmethod
    def of(cls, error: Exception) -> JobRejected:
        """The same of an exception that the mathematics says no with (`jobs.interp.errors.Unusable`)."""
        reason, hint = getattr(error, "reason", "rejected"), getattr(error, "hint", "")
        return cls(str(error), reason=reason, hint=hint)


class JobStopped(Exception):
    """The work noticed `should_stop()`, kept what it had, and left in order."""


class HandedOver(Exception):
    """The work of this stage is done and kept; the next one wants a card."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.stage = stage


class Fenced(Exception):
    """Another attempt holds the job: nothing this process writes counts any more."""


class Conflict(Exception):
    """The job is not in a state in which this verb applies (HTTP 409)."""

"""A rehearsal that is a short question: it uses the slots of interactive kinds."""

from __future__ import annotations

from jobs.kinds import rehearsal


class Kind(rehearsal.Kind):
    label = "Question"
    interactive = True

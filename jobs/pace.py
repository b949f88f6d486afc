"""How often a work makes progress, and whether it has made none for much longer than that. It is told, never ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from gpus.timing import scaled

#: No work is called stalled sooner, however often it reports as a rule.
LEAST_SECONDS = 900.0
TIMES_USUAL = 10
#: Intervals of which the usual one is the median.
REMEMBERED = 20


class Pace:
    """Fed with the progress of the row as often as somebody looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.mark: Any = None
        self.moved_at = clock()
        self.gaps: deque[float] = deque(maxlen=REMEMBERED)

    def see(self, progress: Mapping[str, Any]) -> None:
        mark = [progress.get(name) for name in ("stage", "done", "metrics")]
        if mark != self.mark:
            if self.mark is not None:
                self.gaps.append(self.clock() - self.moved_at)
            self.mark, self.moved_at = mark, self.clock()

    def look_away(self) -> None:
        """What the row could not tell is held against nobody: the wait begins anew."""
        self.moved_at = self.clock()

    @property
    def usual(self) -> float | None:
        return median(self.gaps) if self.gaps else None

    @property
    def silent_for(self) -> float:
        return self.clock() - self.moved_at

    @property
    def stalled(self) -> bool:
        return self.silent_for > max(scaled(LEAST_SECONDS), TIMES_USUAL * (self.usual or 0.0))

    def in_words(self) -> str:
        often = f"; as a rule it reports every {self.usual:.0f} s" if self.usual else ""
        return f"no progress for {self.silent_for:.0f} s{often}"

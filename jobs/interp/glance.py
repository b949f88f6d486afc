"""What a hub says of a repository in a moment, before a job is queued. Silence is no answer, and costs 3 s at most.

Asked without anybody's token: what only a token opens is left to the job. Answers are remembered for a minute, a
silent hub for five, so that a form that is being filled in asks once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jobs.interp import aside
from jobs.interp.errors import Unusable
from jobs.interp.repository import Closed, Listing, look

SECONDS = 3.0
REMEMBERED, SILENT = 60.0, 300.0
MOST = 256

Answer = Listing | Unusable | None


class Memory:
    """Answers by repository and revision. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.lock = clock, threading.Lock()
        self.answers: dict[tuple[str, str], tuple[float, Answer]] = {}
        self.silent_until = float("-inf")

    def glance(self, repository: str, revision: str) -> Listing | None:
        """The listing; None when nobody can tell now. Raises `Unusable` for what no token and no time would change."""
        from huggingface_hub import constants

        if constants.is_offline_mode():
            return None
        answer = self._remembered(repository, revision)
        if isinstance(answer, Unusable):
            raise answer
        return answer

    def _remembered(self, repository: str, revision: str) -> Answer:
        now, key = self.clock(), (repository, revision)
        until, answer = self.answers.get(key, (now, None))
        if now < until or now < self.silent_until:
            return answer
        answer = self._ask(repository, revision)
        with self.lock:
            if len(self.answers) >= MOST:
                self.answers.clear()
            self.answers[key] = self.clock() + REMEMBERED, answer
        return answer

    def _ask(self, repository: str, revision: str) -> Answer:
        deadline = time.monotonic() + SECONDS
        try:
            return aside.call(
                lambda: look(repository, revision, timeout=SECONDS),
                threading.Event(),
                lambda: time.monotonic() > deadline,
            )
        except Closed:
            return None
        except Unusable as error:
            return error
        except Exception:  # time is up, refused, unknown name, 429, 5xx: whatever it was, it is no answer
            self.silent_until = self.clock() + SILENT
        return None


glance = Memory().glance

"""Calls that wait for a network, in threads that nobody waits for: a stop is heard while a server keeps silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from jobs.interp.errors import Stopped

LOOK_SECONDS = 0.1


class Aside:
    """Functions called side by side. After a stop or the first error the others end at their next look at `stop`."""

    def __init__(self, functions: Sequence[Callable[[], Any]], at_once: int, stop: threading.Event) -> None:
        self.waiting = list(enumerate(functions))
        self.answers: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.stop, self.lock = stop, threading.Lock()
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(at_once)]

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            number, function = taken
            try:
                self.answers[number] = function()
            except BaseException as error:
                self.errors.append(error)

    def _next(self) -> tuple[int, Callable[[], Any]] | None:
        with self.lock:
            return self.waiting.pop(0) if self.waiting and not self.errors else None

    def join(self, should_stop: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
        """Until all are done; `meanwhile` is called ten times a second. Raises the first error, or `Stopped`."""
        for thread in self.threads:
            thread.start()
        try:
            for thread in self.threads:
                while thread.is_alive() and not self.errors:
                    if should_stop():
                        raise Stopped("The download was stopped; what has arrived is kept.")
                    meanwhile()
                    thread.join(LOOK_SECONDS)
            if self.errors:
                raise self.errors[0]
        except BaseException:
            self.stop.set()
            raise


def call(function: Callable[[], Any], stop: threading.Event, should_stop: Callable[[], bool]) -> Any:
    """The answer of one function."""
    aside = Aside([function], 1, stop)
    aside.join(should_stop, lambda: None)
    return aside.answers[0]

"""A line that tells how far a command is: written over on a terminal, now and then in a log."""

from __future__ import annotations

import time
from typing import Any

SECONDS_IN_A_LOG = 10.0


class Progress:
    """`say` as often as there is something to say; `done` ends the line. A log hears of what takes longer only."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.said, self.at = stream, "", time.monotonic()

    def say(self, text: str) -> None:
        if text == self.said:
            return
        if self.stream.isatty():
            self.stream.write(f"\r\033[K{text}", ending="")
            self.stream.flush()
        elif time.monotonic() - self.at >= SECONDS_IN_A_LOG:
            self.stream.write(text)
            self.stream.flush()
            self.at = time.monotonic()
        self.said = text

    def done(self, text: str) -> None:
        self.stream.write(f"\r\033[K{text}" if self.stream.isatty() else text)
        self.stream.flush()

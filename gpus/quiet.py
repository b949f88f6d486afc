"""Saying once that something is away, and once that it is back: a log is no metronome."""

from __future__ import annotations

import logging


class Outage:
    """A part that may be away for a while; `sentence` says which, and what it means."""

    def __init__(self, logger: logging.Logger, sentence: str) -> None:
        self.logger = logger
        self.sentence = sentence
        self.now = False

    def note(self, error: object) -> None:
        if not self.now:
            self.logger.warning("%s: %s", self.sentence, error)
        self.now = True

    def over(self) -> None:
        if self.now:
            self.logger.info("Over: %s", self.sentence)
        self.now = False

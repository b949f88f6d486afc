"""What the mathematics says to its caller when it cannot or shall not go on. Plain Python, no torch."""

from __future__ import annotations


class Stopped(Exception):
    """`should_stop()` answered true; everything worth keeping is on disk."""


class Unusable(ValueError):
    """The input cannot give what was asked; the message is a sentence with the numbers and the remedy."""


class NoField(Unusable):
    """A record has no field of the name asked for."""


class NonFinite(ArithmeticError):
    """A loss or activation became NaN or infinite; the message names the step."""


class MissingExtra(Unusable):
    """A library that only this needs is not installed; `hint` is the command that brings it."""

    reason = "missing_extra"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

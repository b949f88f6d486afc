"""Paths that people may name, as opposed to any path. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jobs.interp.errors import Unusable


def inside(text: str, roots: Iterable[Path]) -> Path:
    """The existing file or folder at `text`, with links followed, if it lies in one of `roots`.

    Raises `Unusable` in the same words for what is outside and what is missing there, so that nobody can ask
    which files exist elsewhere.
    """
    allowed = [Path(root).expanduser().resolve() for root in roots]
    try:
        path = Path(text).expanduser().resolve()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user unknown, a NUL
        raise Unusable(f"{text[:100]} is not a path: {error}.") from error
    if not any(path.is_relative_to(root) for root in allowed):
        named = ", ".join(map(str, allowed)) or "none"
        raise Unusable(
            f"{text} is not in a folder that jobs may read. Those are: {named} (MISTUDIO_IMPORT_ROOTS)."
        )
    if not there:
        raise Unusable(f"{text} does not exist.")
    return path

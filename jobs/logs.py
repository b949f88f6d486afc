"""A job's log, read from its end or from an offset."""

from __future__ import annotations

from dataclasses import dataclass

from jobs import paths
from jobs.models import Job

MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class Piece:
    """Bytes `offset … next_offset` of a log of `size` bytes, as text."""

    text: str
    offset: int
    next_offset: int
    size: int


def read(job: Job, offset: int = 0, limit: int = MAX_BYTES) -> Piece:
    try:
        with open(paths.log_file(job), "rb") as file:
            size = file.seek(0, 2)
            offset = min(offset, size)
            file.seek(offset)
            raw = file.read(limit)
    except FileNotFoundError:
        return Piece("", 0, 0, 0)
    return Piece(raw.decode(errors="replace"), offset, offset + len(raw), size)


def last_line(job: Job, characters: int = 300) -> str:
    """The last line that says something, cut to a length for a sentence."""
    lines = [line for line in tail(job, 20).text.splitlines() if line.strip()]
    return lines[-1].strip()[:characters] if lines else ""


def tail(job: Job, lines: int = 200) -> Piece:
    """The last lines, at most 256 KiB of them."""
    size = read(job, 0, 0).size
    piece = read(job, max(0, size - MAX_BYTES))
    kept = piece.text.splitlines(keepends=True)[-lines:] if lines else []
    text = "".join(kept)
    return Piece(text, piece.next_offset - len(text.encode()), piece.next_offset, piece.size)

"""What the kernel says of a process under `/proc` (man 5 proc). Loads nothing: readers and keepers use it."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    """The fields of `/proc/<pid>/stat` that matter here (man 5 proc)."""

    state: str
    start: int
    cpu_ticks: int


def stat(pid: int) -> Stat | None:
    """`None` when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Stat(state=fields[0], start=int(fields[19]), cpu_ticks=int(fields[11]) + int(fields[12]))


def private_bytes(pid: int) -> int | None:
    """Memory that only this process has; `None` when the kernel does not tell us."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))
    )


def name_of(pid: int) -> str | None:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")[:200] or None
        )
    except OSError:
        return None


def user_of(pid: int) -> str | None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
    except OSError:
        return None


def resident_bytes(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None


def memory(text: str | None = None) -> tuple[int, int]:
    """The host's memory, and what of it is available without swapping, in bytes; `text`: `/proc/meminfo`."""
    lines = (text or Path("/proc/meminfo").read_text()).splitlines()
    known = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in lines)}
    return known["MemTotal"], known["MemAvailable"]

"""Who is a member of an attempt, by proof, and signals that reach nobody else.

A pid alone proves nothing: it is used again. A process is named by its pid *and* its start time in clock
ticks (field 22 of `/proc/<pid>/stat`), on one boot. Signals go through pidfds, re-checked after opening.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.models import Attempt

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TOKEN_VARIABLE = "MISTUDIO_JOB_TOKEN"


@dataclass(frozen=True)
class Process:
    pid: int
    start: int  # clock ticks since boot


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the state on; the name before them may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def find(pid: int) -> Process | None:
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def alive(process: Process) -> bool:
    """Whether exactly this process runs; a zombie holds no memory and counts as gone."""
    fields = _stat(process.pid)
    return bool(fields) and int(fields[19]) == process.start and fields[0] != "Z"


def parents() -> dict[int, tuple[int, int, int]]:
    """Of every process: parent pid, session id, start ticks."""
    table = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] != "Z":
            table[int(entry.name)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return table


def descendants(roots: Iterable[int], table: dict[int, tuple[int, int, int]] | None = None) -> set[Process]:
    """All living descendants of `roots`, themselves excluded."""
    table = parents() if table is None else table
    family = set(roots)
    grown = True
    while grown:
        children = {pid for pid, (parent, _, _) in table.items() if parent in family} - family
        family |= children
        grown = bool(children)
    return {Process(pid, table[pid][2]) for pid in family - set(roots) if pid in table}


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def tokens(pid: int) -> list[str]:
    """Hashes of the attempts' tokens in the environment that the process was executed with."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return []
    prefix = f"{TOKEN_VARIABLE}=".encode()
    carried = [e.removeprefix(prefix) for e in environment.split(b"\0") if e.startswith(prefix)]
    return [token_hash(token.decode(errors="replace")) for token in carried]


def lineage(process: Process) -> Iterator[Process]:
    """The process, its parent, and so on upwards."""
    pid = process.pid
    while pid and (fields := _stat(pid)):
        yield Process(pid, int(fields[19]))
        pid = int(fields[1])


def members(attempt: Attempt) -> set[Process]:
    """The living processes that provably belong to the attempt, on this host and boot.

    Recorded keeper, work and descendants; what descends from them now; their session while one of them
    lives; and executed processes that carry the attempt's token.
    """
    if attempt.boot_id != boot_id():
        return set()
    pairs = [
        (attempt.keeper_pid, attempt.keeper_start),
        (attempt.work_pid, attempt.work_start),
        *attempt.members,
    ]
    recorded = {p for pid, start in pairs if pid and start and alive(p := Process(pid, start))}
    table = parents()
    found = recorded | descendants((p.pid for p in recorded), table)
    if recorded and attempt.session_id:
        found |= {Process(pid, row[2]) for pid, row in table.items() if row[1] == attempt.session_id}
    if attempt.token_hash:
        found |= {Process(pid, row[2]) for pid, row in table.items() if attempt.token_hash in tokens(pid)}
    return {p for p in found if p.pid != os.getpid()}


def send(process: Process, number: int) -> bool:
    """Signal exactly this process; False when it is gone or is somebody else by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's main thread ends; leave at once if it already has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

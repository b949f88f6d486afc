"""Who is a member of an attempt, by proof, and signals that reach nobody else.

A pid alone proves nothing: it is used again. A process is named by its pid *and* its start time in clock
ticks (field 22 of `/proc/<pid>/stat`), on one boot. Signals go through pidfds, re-checked after opening.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jobs.models import Attempt

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TOKEN_VARIABLE = "MISTUDIO_JOB_TOKEN"
#: Asks a work where it is: its handler writes the stacks of all threads to the log, from C, and what it
#: interrupted is started again.
DUMP_SIGNAL = signal.SIGUSR2


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


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def ticks_now() -> int:
    """This moment on the clock of start times: ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


# Whose is it? -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What `/proc/<pid>/stat` says of a living process."""

    parent: int
    session: int
    start: int


def recorded(attempt: Attempt) -> set[Process]:
    """Keeper, work and the descendants seen, as they stand in the attempt's row."""
    pairs = [
        (attempt.keeper_pid, attempt.keeper_start),
        (attempt.work_pid, attempt.work_start),
        *attempt.members,
    ]
    return {Process(pid, start) for pid, start in pairs if pid and start}


class Census:
    """The living processes of one moment, and whose they are by proof. What was read once is not read again, so
    that all questions are answered from one picture."""

    def __init__(self) -> None:
        self._rows: dict[int, Row | None] = {}
        self._tokens: dict[Process, list[str] | None] = {}

    def row(self, pid: int) -> Row | None:
        if pid not in self._rows:
            fields = _stat(pid)
            living = bool(fields) and fields[0] not in "ZX"
            self._rows[pid] = Row(int(fields[1]), int(fields[3]), int(fields[19])) if living else None
        return self._rows[pid]

    def find(self, pid: int) -> Process | None:
        row = self.row(pid)
        return Process(pid, row.start) if row else None

    def everybody(self) -> list[Process]:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [process for pid in pids if (process := self.find(pid))]

    def lineage(self, process: Process) -> Iterator[Process]:
        """The process, its parent, and so on upwards; an ancestor is never younger than its child."""
        row = self.row(process.pid)
        while row and row.start == process.start:
            yield process
            parent = self.find(row.parent)
            if parent is None or parent.start > process.start or parent.pid == process.pid:
                return
            process, row = parent, self.row(parent.pid)

    def session(self, process: Process) -> int | None:
        row = self.row(process.pid)
        return row.session if row else None

    def tokens(self, process: Process) -> list[str] | None:
        """Hashes of the attempts' tokens that the process was executed with; `None` when that cannot be read."""
        if process not in self._tokens:
            self._tokens[process] = _tokens(process)
        return self._tokens[process]

    def proof(self, process: Process, attempt: Attempt) -> str:
        """Why the process is a member of the attempt (contract, section 6); empty when nothing proves it."""
        return self._proof(process, attempt, recorded(attempt))

    def members(self, attempt: Attempt) -> set[Process]:
        """The living members of the attempt on this host and boot."""
        known = recorded(attempt)
        return {process for process in self.everybody() if self._proof(process, attempt, known)}

    def _proof(self, process: Process, attempt: Attempt, known: set[Process]) -> str:
        if attempt.boot_id != boot_id():
            return ""
        if process in known:
            return "recorded"
        if any(ancestor in known for ancestor in self.lineage(process)):
            return "descendant"
        if self._in_session(process, attempt, known):
            return "session"
        return "token" if self._carries_token(process, attempt) else ""

    def _in_session(self, process: Process, attempt: Attempt, known: set[Process]) -> bool:
        """A session's number is not given again while anybody is in it: so a recorded member who is in it now, or a
        start before the last moment that one was seen alive, says that it still is the attempt's."""
        session = attempt.session_id
        if not session or self.session(process) != session:
            return False
        if attempt.seen_ticks and process.start < attempt.seen_ticks:
            return True
        return any(self.find(p.pid) == p and self.session(p) == session for p in known)

    def _carries_token(self, process: Process, attempt: Attempt) -> bool:
        """Executed with the attempt's token. Whoever is older than the attempt's keeper, or another user's, did not
        get it from the work: such a token was copied."""
        if not attempt.token_hash or process.start < (attempt.keeper_start or 0):
            return False
        return attempt.token_hash in (self.tokens(process) or []) and user_id(process) == os.geteuid()


def _tokens(process: Process) -> list[str] | None:
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return None
    if find(process.pid) != process:  # the number was given to somebody else meanwhile
        return None
    prefix = f"{TOKEN_VARIABLE}=".encode()
    carried = [e.removeprefix(prefix) for e in environment.split(b"\0") if e.startswith(prefix)]
    return [token_hash(token.decode(errors="replace")) for token in carried]


def user_id(process: Process) -> int | None:
    try:
        return os.stat(f"/proc/{process.pid}").st_uid
    except OSError:
        return None


def descendants(root: int) -> set[Process]:
    """All living descendants of the process with this pid, itself excluded."""
    census = Census()
    return {
        process
        for process in census.everybody()
        if process.pid != root and any(ancestor.pid == root for ancestor in census.lineage(process))
    }


# Signals ----------------------------------------------------------------------------------------------


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


def end(
    find: Callable[[], set[Process]], seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> set[Process]:
    """TERM, up to `seconds`, KILL, up to `seconds`, to whom `find` names; returns who is left all the same.

    It is asked again before the KILL: who was told to end may have started others. `meanwhile` is called while waiting.
    """
    left: set[Process] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        left |= find()
        for process in left:
            send(process, number)
        deadline = time.monotonic() + seconds
        while (left := {p for p in left if alive(p)}) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.02)
    return left


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's main thread ends; leave at once if it already has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

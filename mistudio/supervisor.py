"""Runs the processes of a single host together: starts, restarts, ends them; never touches keepers."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
FIRST_PAUSE, LONGEST_PAUSE, CALM_SECONDS = 1.0, 30.0, 60.0
_libc = ctypes.CDLL(None)


def procfile(path: Path, values: dict[str, str]) -> dict[str, list[str]]:
    """The commands of a Procfile by name, variables filled in, `python` being this interpreter."""
    commands = {}
    for line in path.read_text().splitlines():
        name, colon, command = line.partition(":")
        if colon:
            words = [string.Template(word).safe_substitute(values) for word in shlex.split(command)]
            commands[name.strip()] = [sys.executable if word == "python" else word for word in words if word]
    return commands


def _die_with_parent() -> None:
    """The children of a killed supervisor are asked to end, so that a new one finds the place free."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Service:
    """One process, with the pause before its next start."""

    def __init__(self, name: str, command: list[str], log: Path, cwd: Path) -> None:
        self.name, self.command, self.log, self.cwd = name, command, log, cwd
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.pause = FIRST_PAUSE
        self.start_at = 0.0

    def start(self) -> None:
        with self._open_log() as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # Out of the terminal's process group: Ctrl-C reaches `up` alone, which ends all in order.
                process_group=0,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (`up` has one thread)
            )
        self.started_at = time.monotonic()

    def _open_log(self) -> IO[bytes]:
        return open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tend(self, say: Callable[[str], None]) -> None:
        """Start again what ended: after 1 s, doubling to 30 s while it keeps ending."""
        now = time.monotonic()
        if self.running():
            if now - self.started_at > CALM_SECONDS:
                self.pause = FIRST_PAUSE
        elif self.start_at == 0.0:
            status = self.process.returncode if self.process else None
            say(
                f"{self.name} ended (status {status}); starting it again in {self.pause:.0f} s, see {self.log.name}"
            )
            self.start_at, self.pause = now + self.pause, min(LONGEST_PAUSE, 2 * self.pause)
        elif now >= self.start_at:
            self.start_at = 0.0
            self.start()

    def send(self, number: int) -> None:
        if self.running() and self.process is not None:
            self.process.send_signal(number)


def end_all(services: list[Service], seconds: float) -> None:
    """TERM to all, KILL to those still there after `seconds`."""
    for service in services:
        service.send(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while any(s.running() for s in services) and time.monotonic() < deadline:
        time.sleep(0.05)
    for service in services:
        service.send(signal.SIGKILL)

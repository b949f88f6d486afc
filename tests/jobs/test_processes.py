"""Who is a member of an attempt, and that a signal reaches nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpus import procfs
from jobs import processes
from jobs.processes import Census, Process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def attempt(**fields: Any) -> Any:
    names = ("keeper_pid", "keeper_start", "work_pid", "work_start", "session_id", "token_hash", "seen_ticks")
    empty = dict.fromkeys(names)
    return SimpleNamespace(**empty | {"members": [], "boot_id": processes.boot_id()} | fields)


def members_of(attempt: Any) -> set[Process]:
    return Census().members(attempt)


def test_it_signals_nobody_whose_start_time_is_another(sleeper: subprocess.Popen[bytes]) -> None:
    """The recorded process died and its number was given to somebody else."""
    real = processes.find(sleeper.pid)
    assert real is not None
    assert not processes.send(Process(real.pid, real.start - 1), signal.SIGKILL)
    assert sleeper.poll() is None
    assert processes.send(real, signal.SIGKILL)
    assert sleeper.wait(5) == -signal.SIGKILL


def test_it_takes_a_zombie_for_gone() -> None:
    child = subprocess.Popen(["true"])
    found = processes.find(child.pid)
    time.sleep(0.2)
    assert found is not None
    assert not processes.alive(found)
    child.wait()


def test_it_finds_no_member_of_another_boot(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.find(sleeper.pid)
    assert found is not None
    assert members_of(attempt(work_pid=found.pid, work_start=found.start)) == {found}
    assert not members_of(attempt(work_pid=found.pid, work_start=found.start, boot_id="another"))
    assert not members_of(attempt(work_pid=found.pid, work_start=found.start + 1))


def test_it_knows_an_orphan_by_its_token() -> None:
    script = "import os, subprocess; subprocess.Popen(['setsid', 'sleep', '60'])"
    token = "0123456789abcdef"
    before = {process.pid for process in Census().everybody()}
    subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {processes.TOKEN_VARIABLE: token}, check=True
    )
    time.sleep(0.2)
    members = members_of(attempt(token_hash=processes.token_hash(token)))
    try:
        assert len(members) == 1
        assert members.pop().pid not in before
        assert not members_of(attempt(token_hash=processes.token_hash("another")))
    finally:
        for member in members_of(attempt(token_hash=processes.token_hash(token))):
            processes.send(member, signal.SIGKILL)


def test_it_lists_descendants_of_all_depths() -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 5
        while len(processes.descendants(child.pid)) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes.descendants(child.pid)) == 1
    finally:
        for member in processes.descendants(child.pid):
            processes.send(member, signal.SIGKILL)
        child.kill()
        child.wait()


def test_it_sees_the_memory_that_a_process_alone_holds() -> None:
    touch = "x = bytearray(100 << 20); x[::4096] = b'x' * len(x[::4096])"
    script = f"import time; {touch}; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert 100 << 20 <= (procfs.private_bytes(child.pid) or 0) < 130 << 20
        assert procfs.private_bytes(2**22 + 1) is None
    finally:
        child.kill()
        child.wait()

"""The same states, dispatch and races on PostgreSQL: locks that SQLite does not have, a cluster of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.system import ROOT

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not BINARIES, reason="PostgreSQL is not installed"),
]


def as_owner(*command: str | Path) -> list[str]:
    """PostgreSQL refuses root: there, its own account runs it."""
    words = [str(word) for word in command]
    return ["runuser", "-u", "postgres", "--", *words] if os.geteuid() == 0 else words


@pytest.fixture
def cluster() -> Iterator[str]:
    """A private cluster on a unix socket in a short folder of its own; its URL."""
    folder = Path(tempfile.mkdtemp(prefix="mspg", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    data, binary = folder / "data", BINARIES[0]
    run = {"check": True, "capture_output": True, "cwd": "/"}
    subprocess.run(as_owner(binary / "initdb", "-D", data, "-A", "trust", "-U", "mistudio"), **run)
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    start = as_owner(binary / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start")
    subprocess.run(start, check=True, cwd="/", stdout=subprocess.DEVNULL)
    try:
        yield f"postgres://mistudio@{quote(str(folder), safe='')}/postgres"
    finally:
        subprocess.run(as_owner(binary / "pg_ctl", "-D", data, "-m", "immediate", "stop"), **run)
        shutil.rmtree(folder, ignore_errors=True)


def test_it_holds_on_postgresql_too(cluster: str) -> None:
    tests = ["tests/jobs/test_states.py", "tests/jobs/test_dispatch.py", "tests/jobs/test_submit.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *tests, "-k", "not documents"]
    env = os.environ | {"MISTUDIO_TEST_DATABASE_URL": cluster}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in ran.stdout

"""The same states, dispatch, races and card history on PostgreSQL: locks that SQLite lacks, a cluster of our own."""

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
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BINARIES, reason="PostgreSQL is not installed"),
]


def run(*command: str | Path) -> None:
    """PostgreSQL refuses root: there, its own account runs it."""
    words = [str(word) for word in command]
    owner = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    # Not captured: the server that pg_ctl leaves behind would hold the pipe open.
    subprocess.run([*owner, *words], check=True, cwd="/", stdout=subprocess.DEVNULL)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A private cluster on a unix socket in a short folder of its own; its URL."""
    folder = Path(tempfile.mkdtemp(prefix="mspg", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    data, binary = folder / "data", BINARIES[0]
    run(binary / "initdb", "-D", data, "-A", "trust", "-U", "mistudio")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    run(binary / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start")
    try:
        yield f"postgres://mistudio@{quote(str(folder), safe='')}/postgres"
    finally:
        run(binary / "pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_holds_on_postgresql_too(cluster: str, slow: bool) -> None:
    """`slow` runs the hundred rounds of the race for the last slot."""
    names = ("test_states", "test_dispatch", "test_queue", "test_submit", "test_requests")
    cards = ("test_history", "test_history_api")
    fast = [f"tests/jobs/{name}.py" for name in names] + [f"tests/gpus/{name}.py" for name in cards]
    tests = ["tests/jobs/test_dispatch.py"] if slow else fast
    chosen = ["-k", "g15 or at_once", "-m", "slow"] if slow else ["-k", "not documents", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *tests, *chosen]
    env = os.environ | {"MISTUDIO_TEST_DATABASE_URL": cluster}
    ran = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in ran.stdout

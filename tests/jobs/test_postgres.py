"""The same states, dispatch, races and card history on PostgreSQL: locks that SQLite lacks, a cluster of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.postgres import BINARIES, Cluster
from tests.system import ROOT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BINARIES, reason="PostgreSQL is not installed"),
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_holds_on_postgresql_too(cluster: Cluster, slow: bool) -> None:
    """`slow` runs the hundred rounds of the race for the last slot."""
    names = ("test_states", "test_dispatch", "test_queue", "test_submit", "test_requests")
    cards = ("test_history", "test_history_api")
    fast = [f"tests/jobs/{name}.py" for name in names] + [f"tests/gpus/{name}.py" for name in cards]
    tests = ["tests/jobs/test_dispatch.py"] if slow else fast
    chosen = ["-k", "g15 or at_once", "-m", "slow"] if slow else ["-k", "not documents", "-m", "not slow"]
    run_there(cluster, *tests, *chosen)


@pytest.mark.slow
def test_stages_losses_and_takeovers_hold_there(cluster: Cluster) -> None:
    run_there(cluster, "tests/jobs/test_engine.py", "tests/jobs/test_repairs.py")


def run_there(cluster: Cluster, *arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", *arguments]
    env = os.environ | {"MISTUDIO_TEST_DATABASE_URL": cluster.url}
    ran = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in ran.stdout

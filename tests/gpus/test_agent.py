"""`manage.py agent` as it runs: its rows, its socket, its end, and what it does while the database is away."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from gpus import agent_client
from gpus.backends import simulated
from gpus.backends.simulated import SimulatedBackend, stat
from mistudio import home as home_of_settings

ROOT = django_settings.BASE_DIR
Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.MISTUDIO_HOME, settings.MISTUDIO_SOCKETS = tmp_path, home_of_settings.socket_folder(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return os.environ | {
        "MISTUDIO_HOME": str(home),
        "MISTUDIO_HOST_NAME": "vm",
        "MISTUDIO_GPU_BACKEND": "simulated",
        "MISTUDIO_SIMULATED_GPUS": "1GiB,2GiB",
        "MISTUDIO_TIME_SCALE": "0.1",
        "DJANGO_SETTINGS_MODULE": os.environ.get("DJANGO_SETTINGS_MODULE", "mistudio.settings"),
    }


@pytest.fixture
def log(home: Path) -> Path:
    return home / "agent.log"


@pytest.fixture
def start(environment: dict[str, str], log: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run() -> subprocess.Popen[bytes]:
        command = [sys.executable, "manage.py", "agent", "--skip-checks"]
        with log.open("ab") as file:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def migrate(environment: dict[str, str]) -> None:
    command = [sys.executable, "manage.py", "migrate", "gpus", "-v0", "--skip-checks"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)


def until(true: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def rows(home: Path, query: str) -> list[Any]:
    try:
        with sqlite3.connect(home / "db.sqlite3") as database:
            return database.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []


def test_it_samples_before_there_is_a_database_and_writes_when_there_is(
    start: Start, environment: dict[str, str], home: Path, log: Path, child: Any
) -> None:
    agent = start()
    uuid = next(iter(SimulatedBackend(home, "vm", [2**30]).cards))
    assert until(lambda: agent_client.fresh(uuid))
    time.sleep(1.0)  # several beats without a database and without a broker
    assert log.read_text().count("The database does not take readings") == 1
    assert log.read_text().count("The broker does not answer") == 1
    migrate(environment)
    assert until(lambda: rows(home, "SELECT uuid FROM gpus_gpu"))
    assert [row[0] for row in rows(home, "SELECT memory_total_bytes FROM gpus_gpu ORDER BY 'index'")] == [
        2**30,
        2**31,
    ]
    assert "Over: The database" in log.read_text()

    # A process that takes the card now is seen now.
    busy = child(
        "import time; b = bytearray(50 * 2**20); b[::4096] = b'x' * len(b[::4096]);"
        "print('ready', flush=True); time.sleep(60)"
    )
    known = stat(busy.pid)
    assert known
    simulated.hold(uuid, busy.pid, known.start)
    began = time.monotonic()
    fresh = agent_client.fresh(uuid)
    assert time.monotonic() - began < 0.5
    assert fresh
    assert [process["pid"] for process in fresh["processes"]] == [busy.pid]
    assert fresh["reading"]["memory_used_bytes"] > 50 * 2**20
    assert agent_client.fresh("GPU-unknown") is None

    # One agent per folder; nothing of torch; the socket is ours alone.
    assert "mistudio agent" in Path(f"/proc/{agent.pid}/cmdline").read_text()
    assert "torch" not in Path(f"/proc/{agent.pid}/maps").read_text()
    assert os.stat(agent_client.socket_path()).st_mode & 0o777 == 0o600
    second = start()
    assert second.wait(20) == 1
    assert "Another agent" in log.read_text()

    # It ends in order, and its reader with it.
    (reader,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(5) == 0
    assert stat(int(reader)) is None
    assert agent_client.fresh(uuid) is None
    assert "Traceback" not in log.read_text()


def test_the_client_is_silent_where_no_agent_is(home: Path) -> None:
    assert agent_client.fresh("GPU-x") is None

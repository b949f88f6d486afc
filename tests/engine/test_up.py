"""`manage.py up`: one per data folder, on a port of its own, and what it tells."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system import ROOT, System, free_port

pytestmark = pytest.mark.engine


def up(env: dict[str, str], port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "manage.py", "up", "--port", str(port)]
    return subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_it_refuses_a_second_up_on_the_same_folder(system: System) -> None:
    refused = up(system.env, free_port())
    assert refused.returncode == 1
    assert "already runs" in refused.stderr


def test_it_refuses_a_port_that_is_taken(system: System, tmp_path: Path) -> None:
    refused = up(system.env | {"MISTUDIO_HOME": str(tmp_path)}, system.port)
    assert refused.returncode == 1
    assert f"PORT={system.port + 1}" in refused.stderr


def test_it_refuses_a_malformed_setting_with_a_sentence(system: System, tmp_path: Path) -> None:
    refused = up(
        system.env | {"MISTUDIO_HOME": str(tmp_path), "MISTUDIO_SIMULATED_GPUS": "24 apples"}, free_port()
    )
    assert refused.returncode == 1
    assert "MISTUDIO_SIMULATED_GPUS='24 apples': expected sizes such as 24GiB" in refused.stderr


def test_it_says_where_it_runs_and_how_to_sign_in(system: System) -> None:
    ready = json.loads((system.home / "run" / "ready.json").read_text())
    assert ready["url"] == system.url
    assert set(ready["processes"]) == {"broker", "web", "agent", "worker", "worker-cpu", "beat"}
    assert f"{system.url}/signin/link/?key=" in (system.home / "up.log").read_text()
    assert (system.home / "operator-token").stat().st_mode & 0o777 == 0o600
    assert (system.home / "secret-key").stat().st_mode & 0o777 == 0o600


def test_it_is_healthy(system: System) -> None:
    health = system.get("system/health")
    assert health["status"] == "ok", health


def test_a_beat_that_sends_nothing_is_found_out_and_started_again(system: System) -> None:
    silent = system.kill("beat", signal.SIGSTOP)
    until(lambda: system.call("GET", "system/health")[0] == 503, "health is degraded")
    until(lambda: system.pid("beat") != silent, "another beat runs")
    until(lambda: system.call("GET", "system/health")[0] == 200, "health is good again")


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)

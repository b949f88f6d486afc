"""`manage.py check` and the service that the worker runs in. The `systemctl` is a stand-in: no systemd runs here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from jobs import checks

SYSTEM = "0::/system.slice/mistudio-worker.service\n"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process with the command line of this host's worker."""
    words = ["celery", "worker", "-Q", f"gpu.{settings.MISTUDIO_HOST_NAME}"]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
    while process.pid not in list(checks.workers()):
        time.sleep(0.01)
    monkeypatch.setattr(checks, "cgroup", lambda pid: SYSTEM if pid == process.pid else "")
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answers with what the file beside it says, and writes down what it was asked."""
    script = tmp_path / "systemctl"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/answer\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def answer(systemctl: Path, *lines: str) -> list[Any]:
    (systemctl / "answer").write_text("\n".join(lines) + "\n")
    return checks.worker_unit()


def test_it_warns_of_the_defaults_and_says_what_they_do(worker: int, systemctl: Path) -> None:
    found = answer(systemctl, "KillMode=control-group", "OOMPolicy=stop", "LimitNOFILE=1024")
    assert [warning.id for warning in found] == ["jobs.W001"] * 3
    assert "mistudio-worker.service: KillMode is control-group, not process: stopping" in found[0].msg
    assert "manage.py units" in found[0].hint
    assert (systemctl / "asked").read_text().split()[-1] == "mistudio-worker.service"


def test_our_own_units_are_fine(worker: int, systemctl: Path) -> None:
    assert answer(systemctl, "KillMode=process", "OOMPolicy=continue", "LimitNOFILE=65536") == []
    assert answer(systemctl, "KillMode=process", "LimitNOFILE=infinity") == []


def test_it_is_silent_where_there_is_nothing_to_say(
    worker: int, systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemctl / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    assert checks.worker_unit() == []
    monkeypatch.setenv("PATH", str(systemctl / "nothing"))
    assert checks.worker_unit() == []


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        (SYSTEM, ("mistudio-worker.service", False)),
        (
            "9:name=systemd:/system.slice/mistudio.service\n1:cpu:/other.service\n",
            ("mistudio.service", False),
        ),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/mi.service\n", ("mi.service", True)),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/term.scope\n", None),
        ("0::/user.slice/user-7.slice/session-2.scope\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_it_finds_the_unit(cgroups: str, unit: tuple[str, bool] | None) -> None:
    assert checks.unit_in(cgroups) == unit

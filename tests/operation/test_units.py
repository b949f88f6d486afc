"""The unit files: what they say, and that what they say about ending keeps running jobs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from mistudio import units
from mistudio.supervisor import procfile
from tests.chaos.test_kills import attempt_of, journal, steps_after, wait_until
from tests.system import ROOT, System

SERVICES = ("web", "agent", "worker", "worker-cpu", "beat")


def written(**changes: Any) -> dict[str, str]:
    of = units.Installation("mistudio", Path('/srv/mi "100%"/data'), Path("/etc/mistudio.env"), **changes)
    return units.files(of)


def lines(unit: str) -> dict[str, str]:
    """The settings; of one that may stand several times, the last."""
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))


def test_every_process_of_the_procfile_has_its_unit() -> None:
    files = written(port=8123)
    assert set(SERVICES) == set(procfile(ROOT / "Procfile", {}))
    for name in SERVICES:
        unit = lines(files[f"mistudio-{name}.service"])
        assert unit["User"] == "mistudio"
        assert unit["PartOf"] == "mistudio.target"
        assert unit["Environment"] == r'"MISTUDIO_HOME=/srv/mi \"100%%\"/data"'
        assert unit["EnvironmentFile"] == "-/etc/mistudio.env"
        assert int(unit["LimitNOFILE"]) >= 4096
        assert f"mistudio-{name}.service" in lines(files["mistudio.target"])["Wants"]
        assert "After=mistudio-migrate.service mistudio-broker.service" in files[f"mistudio-{name}.service"]
    assert " -p 8123 " in files["mistudio-web.service"]
    assert not [name for name, text in files.items() if "@" in text.replace("@%%h", "")]


def test_a_broker_of_ones_own_needs_no_unit() -> None:
    files = written(own_broker=True)
    assert not [name for name, text in files.items() if "broker" in name or "mistudio-broker" in text]


def test_the_worker_leaves_jobs_alone() -> None:
    unit = lines(written()["mistudio-worker.service"])
    assert (unit["KillMode"], unit["OOMPolicy"]) == ("process", "continue")
    # Each of these would reach into the jobs, or into the driver's set-uid helper.
    for name in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "MemoryDenyWriteExecute", "ProtectHome"):
        assert name not in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    of = units.Installation("daemon", tmp_path / "data", tmp_path / "env")
    for name, text in units.files(of).items():
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(p) for p in tmp_path.glob("mistudio*"))]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_command_names_an_ordinary_user(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(CommandError, match="must not run as root"):
        call_command("units", str(tmp_path), "--user", "root")
    with pytest.raises(CommandError, match="no user 'nobody-here'"):
        call_command("units", str(tmp_path), "--user", "nobody-here")
    call_command("units", str(tmp_path), "--user", "daemon", "--home", "/srv/data")
    assert 'Environment="MISTUDIO_HOME=/srv/data"' in (tmp_path / "mistudio-web.service").read_text()
    assert "daemon-reload" in capsys.readouterr().out


# Ending it as systemd does ------------------------------------------------------------------------------


class Unit:
    """The processes of a service in a control group of their own, ended by the rules of systemd.kill(5).

    No systemd runs on a test machine; the group is the kernel's, where it may be made (as root). Elsewhere what the
    worker started is told by its environment, which is the same set here.
    """

    def __init__(self, system: System, name: str) -> None:
        self.system, self.main = system, system.pid("worker")
        self.group: Path | None = None
        for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
            with suppress(OSError):
                if (root / "cgroup.procs").exists():
                    (root / name).mkdir()
                    self.group = root / name
                    break
        for pid in self.by_environment() if self.group else ():
            self.enter(pid)

    def enter(self, pid: int) -> None:
        assert self.group
        (self.group / "cgroup.procs").write_text(str(pid))

    def by_environment(self) -> list[int]:
        others = {pid for name, pid in self.services().items() if name != "worker"} | {
            self.system.process.pid
        }  # type: ignore[union-attr]
        return [pid for pid, command in self.system.ours() if pid not in others and "reader" not in command]

    def services(self) -> dict[str, int]:
        return {name: self.system.pid(name) for name in ("broker", *SERVICES)}

    def members(self) -> list[int]:
        if self.group is None:
            return self.by_environment()
        return [int(pid) for pid in (self.group / "cgroup.procs").read_text().split()]

    def stop(self, kill_mode: str, timeout: float) -> None:
        """TERM, and after the time-out KILL: to the main process, or to all of the group."""
        whom = self.members() if kill_mode == "control-group" else [self.main]
        send(whom, signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while any(Path(f"/proc/{pid}").exists() for pid in whom) and time.monotonic() < deadline:
            time.sleep(0.05)
        send(whom, signal.SIGKILL)

    def close(self) -> None:
        for pid in self.members() if self.group else ():
            with suppress(OSError):
                (self.group.parent / "cgroup.procs").write_text(str(pid))  # type: ignore[union-attr]
        if self.group:
            self.group.rmdir()


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path / "home", time_scale=0.2) as running:
        yield running


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("kill_mode", ["as shipped", "control-group"])
def test_a_stop_keeps_the_job_with_our_setting_and_not_with_the_default(
    rig: System, tmp_path: Path, kill_mode: str
) -> None:
    shipped = lines(written()["mistudio-worker.service"])
    path = tmp_path / "journal"
    unit = Unit(rig, f"mistudio-test-{os.getpid()}")
    try:
        job = rig.submit("rehearsal", gpu=1, steps=200, seconds_per_step=0.05, journal=str(path))
        steps_after(path, job["id"], 5)
        before = attempt_of(rig, job["id"])
        assert {before["keeper_pid"], before["work_pid"], unit.main} <= set(unit.members())
        unit.stop(
            shipped["KillMode"] if kill_mode == "as shipped" else kill_mode, float(shipped["TimeoutStopSec"])
        )
        assert not Path(f"/proc/{unit.main}").exists()
        if kill_mode == "as shipped":
            assert Path(f"/proc/{before['work_pid']}").exists()
        wait_until(lambda: rig.pid("worker") != unit.main, "the service is started again", 20)
        done = rig.wait(job["id"])
        ends = [line for line in journal(path) if line["event"] == "end"]
        assert done["status"] == "succeeded" and len(ends) == 1
        same = ends[0]["pid"] == before["work_pid"]
        assert (same, done["attempt"]) == ((True, 1) if kill_mode == "as shipped" else (False, 2))
    finally:
        unit.close()

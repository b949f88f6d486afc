"""A whole miStudio for tests: real processes started by `manage.py up`, spoken to over REST as users do."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.postgres import Cluster
from tests.stubs.driver import StandIn

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL = ROOT / "tests" / "rehearsal"
FINAL = ("succeeded", "failed", "refused", "cancelled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class System:
    """Start with `with`; everything of it ends with the block, jobs included."""

    def __init__(
        self,
        home: Path,
        *,
        cards: str = "24GiB,24GiB,80GiB",
        time_scale: float = 0.1,
        driver: StandIn | None = None,
        cluster: Cluster | None = None,
        **env: str,
    ) -> None:
        """`driver`: a stand-in whose cards take the place of the simulated ones. `cluster`: a PostgreSQL to use
        instead of SQLite (by another way than its own, where `DATABASE_URL` says so)."""
        self.cluster = cluster
        self.home, self.port = home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("MISTUDIO_")} | {
            "MISTUDIO_HOME": str(home),
            "MISTUDIO_GPU_BACKEND": "simulated",
            "MISTUDIO_SIMULATED_GPUS": cards,
            "MISTUDIO_KIND_PATHS": str(REHEARSAL),
            "MISTUDIO_TIME_SCALE": str(time_scale),
            "MISTUDIO_HOST_NAME": "testhost",
            **env,
        }
        if cluster is not None:
            self.env = {"DATABASE_URL": cluster.url} | self.env
        if driver is not None:
            self.env |= driver.environment | {"MISTUDIO_GPU_BACKEND": "nvml", "MISTUDIO_TORCH_DEVICE": "cpu"}
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> System:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()
        self.end_keepers()

    # Life -----------------------------------------------------------------------------------------------

    def start(self, timeout: float = 90) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = open(self.home / "up.log", "a")
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--port", str(self.port)],
            cwd=ROOT, env=self.env, stdout=self.log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not (self.home / "run" / "ready.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"up did not come up: {self.logs()}")
            time.sleep(0.05)

    def stop(self) -> float:
        """SIGTERM; the seconds until it had ended everything."""
        began = time.monotonic()
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.log.close()
        return time.monotonic() - began

    def end_keepers(self) -> None:
        """Jobs outlive the services by design; a test leaves none behind."""
        for pid, command in self.ours():
            if "keeper" in command or "work" in command:
                _kill(pid, signal.SIGKILL)

    def ours(self) -> list[tuple[int, str]]:
        """Every process whose environment names this data folder."""
        mark = f"MISTUDIO_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(
                        (int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                    )
            except OSError:
                continue
        return found

    def logs(self) -> str:
        files = [self.home / "up.log", *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in files if f.exists())

    # Processes ------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """The pid of a service now: `up` writes `ready.json` again when it has started one anew."""
        if name == "forkserver":
            return next(pid for pid, command in self.ours() if "mistudio forkserver" in command)
        return json.loads((self.home / "run" / "ready.json").read_text())["processes"][name]

    def manage(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`manage.py` as the operator of this installation calls it."""
        command = [sys.executable, "manage.py", *words]
        return subprocess.run(
            command, check=False, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout
        )

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    # REST -----------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        return (self.home / "operator-token").read_text().strip()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def get(self, path: str) -> Any:
        status, body = self.call("GET", path)
        assert status == 200, (status, body)
        return body

    def submit(self, kind: str, **body: Any) -> dict[str, Any]:
        status, job = self.call("POST", f"jobs/{kind}/", body)
        assert status == 201, (status, job)
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get(f"jobs/{job_id}/")

    def wait(self, job_id: str, *statuses: str, timeout: float = 60) -> dict[str, Any]:
        """Until the job is in one of `statuses` (default: any final one)."""
        deadline = time.monotonic() + timeout
        while (job := self.job(job_id))["status"] not in (statuses or FINAL):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"still {job['status']} after {timeout} s: {job['waiting_for']}\n{self.logs()}"
                )
            if job["status"] in FINAL and statuses:
                raise AssertionError(f"ended {job['status']}: {job['error']}")
            time.sleep(0.03)
        return job

    def cards(self) -> list[dict[str, Any]]:
        return self.get("system/gpu-list")["gpus"]

    # The database, past all of our code -------------------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        if self.cluster is not None:
            return self.cluster.rows(query)
        with sqlite3.connect(f"file:{self.home}/db.sqlite3?mode=ro", uri=True, timeout=20) as connection:
            return connection.execute(query).fetchall()

    def open_leases(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT resource, job_class, slot, state FROM jobs_lease WHERE ended_at IS NULL")

    def wait_for_free_cards(self, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while leases := self.open_leases():
            assert time.monotonic() < deadline, f"leases stay open: {leases}"
            time.sleep(0.05)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

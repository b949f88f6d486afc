"""Real processes that hold simulated cards, and rows of the attempts that left them; for the watchdog's tests."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus import agent_client
from gpus.backends import simulated
from gpus.backends.simulated import SimulatedBackend
from gpus.models import Gpu, Host
from jobs import processes, watchdog
from jobs.models import Attempt, Job, Lease, Outcome, Status, WatchdogEvent
from jobs.processes import Process

GIB, MIB = 2**30, 2**20
#: Another one in every run: what a run that was cut off left behind is not this one's.
TOKEN = secrets.token_hex(16)
HOLD = "import sys, time; ballast = b'x' * (20 << 20); {}; print(flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Holders:
    """A host with three simulated cards, read as the agent's reader reads them; who holds them, who was signalled."""

    def __init__(self, host: Host, owner: User, home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.owner, self.home = host, owner, home
        self.backend = SimulatedBackend(home, host.name, [24 * GIB] * 3)
        self.cards = list(self.backend.cards)
        self.children: list[subprocess.Popen[bytes]] = []
        self.held: list[Process] = []
        self.signalled: list[tuple[int, int]] = []
        for info in self.backend.list_cards():
            Gpu.objects.create(
                uuid=info.uuid, host=host, index=info.index, name=info.name, sampled_at=timezone.now(),
                memory_total_bytes=24 * GIB, reading=self.backend.read(info.uuid).as_dict(), simulated=True,
            )  # fmt: skip
        monkeypatch.setattr(agent_client, "fresh", self.fresh)
        monkeypatch.setattr(processes, "send", spying(processes.send, self.signalled))

    def fresh(self, uuid: str, timeout: float = 1.0) -> dict[str, Any]:
        listed = [entry.as_dict() for entry in self.backend.processes(uuid)]
        return {"reading": self.backend.read(uuid).as_dict(), "processes": listed, "lists": True}

    # Processes -------------------------------------------------------------------------------------------

    def process(self, code: str = "pass", card: int | None = 0, **options: Any) -> Process:
        """A Python that has run `code` and holds 20 MiB; on this card."""
        return self.command([sys.executable, "-c", HOLD.format(code)], card, **options)

    def command(self, words: list[str], card: int | None = 0, token: str = "", **options: Any) -> Process:
        environment = {name: value for name, value in os.environ.items() if name != processes.TOKEN_VARIABLE}
        environment |= {processes.TOKEN_VARIABLE: token} if token else {}
        child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, **options)
        self.children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        found = processes.find(child.pid)
        assert found is not None
        self.hold(found, card)
        return found

    def hold(self, process: Process, card: int | None) -> None:
        self.held.append(process)
        if card is not None:
            simulated.hold(self.cards[card], process.pid, process.start)

    def end(self) -> None:
        families = [process for child in self.children for process in processes.descendants(child.pid)]
        for process in [*self.held, *families]:
            if processes.alive(process) and process.pid != os.getpid():
                os.kill(process.pid, signal.SIGKILL)
        for child in self.children:
            child.wait()

    # Rows ------------------------------------------------------------------------------------------------

    def attempt(self, *, open: bool = False, ended_seconds_ago: float = 3600, **fields: Any) -> Attempt:
        """Of a job that succeeded; `open`: of one that runs."""
        now = timezone.now()
        status = Status.RUNNING if open else Status.SUCCEEDED
        job = Job.objects.create(
            kind="rehearsal", owner=self.owner, status=status, attempt=1, name="left it behind"
        )
        ended = (
            {} if open else {"ended_at": now - timedelta(seconds=ended_seconds_ago), "outcome": Outcome.ENDED}
        )
        values = {"boot_id": processes.boot_id(), "gpu_uuids": [self.cards[0]]} | ended | fields
        return Attempt.objects.create(job=job, number=1, host=self.host, **values)

    def work(self, process: Process, **fields: Any) -> Attempt:
        return self.attempt(work_pid=process.pid, work_start=process.start, **fields)

    def lease(self, attempt: Attempt, state: str, card: int = 0) -> Lease:
        return Lease.objects.create(
            resource=f"gpu:{self.cards[card]}",
            slot=0,
            attempt=attempt,
            state=state,
            releasing_at=attempt.ended_at,
        )

    # Rounds ----------------------------------------------------------------------------------------------

    def heard(self) -> None:
        """The agent was seen and the cards were read just now, however slow this machine is."""
        now = timezone.now()
        Host.objects.filter(pk=self.host.pk).update(agent_seen_at=now, worker_seen_at=now)
        self.host.gpus.update(sampled_at=now)

    def round(self) -> None:
        watchdog.watch(self.host.name)

    def due_round(self) -> None:
        """A round after the time that every row waits for."""
        WatchdogEvent.objects.exclude(due_at=None).update(due_at=timezone.now())
        self.round()

    def row(self, **fields: Any) -> WatchdogEvent:
        return WatchdogEvent.objects.get(**fields)


def dead(process: Process, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while processes.alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes.alive(process)


def spying(
    send: Callable[[Process, int], bool], log: list[tuple[int, int]]
) -> Callable[[Process, int], bool]:
    """`send`, and a note of it."""

    def sent(process: Process, number: int) -> bool:
        log.append((process.pid, signal.Signals(number)))
        return send(process, number)

    return sent

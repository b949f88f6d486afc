"""Processes that ended jobs left on cards, planted by the dozen while jobs run: all are ended in time, and nobody else
is signalled once."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs import processes
from jobs.processes import Process
from tests.chaos.test_kills import wait_until
from tests.system import System

pytestmark = pytest.mark.chaos
SCALE, MIB = 0.2, 2**20
GRACE, PERIOD, LADDER = 60 * SCALE, 60 * SCALE, (10 + 5) * SCALE
#: Ballast, a file of its own, and a line for every signal that can be caught.
SCRIPT = """
import os, signal, sys, time
log, deaf, fork = sys.argv[1], sys.argv[2] == "deaf", sys.argv[2] == "fork"
def note(number, frame):
    with open(log, "a") as file: print(os.getpid(), number, file=file)
    if deaf or log.endswith("innocent"): return
    os._exit(0)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}: signal.signal(number, note)
child = fork and os.fork()
ballast = b"x" * (8 << 20)  # after the fork: what a fork shares is nobody's
if child is False or child: print(os.getpid(), child or os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(
        tmp_path_factory.mktemp("watchdog"), time_scale=SCALE, MISTUDIO_WATCHDOG_GRACE_SECONDS="60"
    ) as running:
        yield running


@dataclass
class Field:
    """What is planted: leftovers that must go, and others that must not be touched."""

    rig: System
    log: Path
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    leftovers: dict[Process, float] = field(default_factory=dict)  # and when their attempts ended
    innocent: list[Process] = field(default_factory=list)

    def start(self, how: str, log: str, card: str, token: str = "") -> list[Process]:
        return self.run([sys.executable, "-c", SCRIPT, str(self.log / log), how], card, token)

    def run(self, words: list[str], card: str, token: str, **options: Any) -> list[Process]:
        """Processes that print their numbers, on this card."""
        environment = {"PATH": os.environ["PATH"]} | ({processes.TOKEN_VARIABLE: token} if token else {})
        child = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, start_new_session=True, **options
        )
        self.children.append(child)
        assert child.stdout is not None
        pids = {int(word) for word in child.stdout.readline().split()}
        found = [process for pid in sorted(pids) if (process := processes.find(pid))]
        for process in found:
            folder = self.rig.home / "run" / "cards" / card
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{process.pid}.{process.start}").touch()
        return found

    def ended_attempt(self, **values: Any) -> float:
        """The last attempt of a job that has just run, changed as the planted processes need it; ended now."""
        job = self.rig.submit("rehearsal", steps=0)
        self.rig.wait(job["id"])
        wait_until(lambda: not self.holds(job["id"]), "its lease stays open")
        values |= {"ended_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")}
        columns = ", ".join(f"{name} = ?" for name in values)
        with sqlite3.connect(self.rig.home / "db.sqlite3", timeout=20) as database:
            database.execute(
                f"UPDATE jobs_attempt SET {columns} WHERE job_id = ?",
                [*values.values(), job["id"].replace("-", "")],
            )
        return time.time()

    def holds(self, job_id: str) -> list[Any]:
        query = "SELECT l.id FROM jobs_lease l JOIN jobs_attempt a ON a.id = l.attempt_id WHERE l.ended_at IS NULL"
        return self.rig.rows(f"{query} AND a.job_id = '{job_id.replace('-', '')}'")

    def wave(self, count: int, card: str) -> None:
        """Leftovers of one ended attempt: by token in sessions of their own, deaf ones, forked ones, its work."""
        token = secrets.token_hex(16)
        left = self.start("plain", "left", card)
        ended_at = self.ended_attempt(
            token_hash=processes.token_hash(token),
            work_pid=left[0].pid,
            work_start=left[0].start,
            keeper_start=1,
        )
        for number in range(count - 1):
            left += self.start(("plain", "deaf", "fork")[number % 3], "left", card, token)
        self.leftovers |= dict.fromkeys(left, ended_at)

    def spare(self, card: str) -> None:
        """A stranger; a token that nobody gave; a copied one, older than its keeper; the number of a dead work; what
        another user started with a true token."""
        token = secrets.token_hex(16)
        others = self.start("deaf", "innocent", card) + self.start(
            "deaf", "innocent", card, secrets.token_hex(16)
        )
        copied = self.start("deaf", "innocent", card, token)
        reused = self.start("deaf", "innocent", card)
        self.ended_attempt(
            token_hash=processes.token_hash(token), keeper_start=copied[0].start + 1,
            work_pid=reused[0].pid, work_start=reused[0].start - 1, members=json.dumps([[reused[0].pid, 7]]),
        )  # fmt: skip
        if os.geteuid() == 0:
            others += self.run(["sh", "-c", "echo $$; exec sleep 600"], card, token, user=65534)
        self.innocent += others + copied + reused

    def end(self) -> None:
        for process in self.leftovers:
            processes.send(process, signal.SIGKILL)
        for child in self.children:
            child.kill()
            child.wait()


def test_twenty_leftovers_go_in_time_and_nobody_else(rig: System, tmp_path: Path) -> None:
    plant_and_watch(rig, tmp_path, waves=4, each=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_leftovers_go_in_time_and_nobody_else(rig: System, tmp_path: Path) -> None:
    plant_and_watch(rig, tmp_path, waves=10, each=20)


def plant_and_watch(rig: System, folder: Path, waves: int, each: int) -> None:
    cards = [card["uuid"] for card in rig.cards()]
    planted = Field(rig, folder)
    try:
        long = rig.submit("rehearsal", gpu=2, steps=100_000, children=2)
        work = rig.wait(long["id"], "running")["attempts"][-1]["work_pid"]
        planted.spare(cards[0])
        for number in range(waves):
            planted.wave(each, cards[number % 2])
        died = wait_for_the_end(planted)
        for process, ended_at in planted.leftovers.items():
            assert GRACE - 0.1 <= died[process] - ended_at <= GRACE + PERIOD + LADDER, process
        wait_until(
            lambda: not open_leftovers(rig), f"rows stay open: {open_leftovers(rig)}", timeout=PERIOD + 5
        )
        told = {row["pid"]: row for row in events(rig, "finding=leftover&state=gone")}
        assert {process.pid for process in planted.leftovers} == set(told)
        assert all(row["freed_bytes"] >= 8 * MIB and row["term_at"] for row in told.values())
        assert all(map(processes.alive, planted.innocent))
        assert not (folder / "innocent").exists(), (folder / "innocent").read_text()
        assert processes.find(work) and rig.job(long["id"])["status"] == "running"
        assert {row["term_at"] for row in events(rig, "") if row["finding"] != "leftover"} <= {None}
        rig.call("POST", f"jobs/{long['id']}/cancel")
        assert rig.wait(long["id"])["attempt"] == 1
        rig.wait_for_free_cards()
    finally:
        planted.end()


def wait_for_the_end(planted: Field) -> dict[Process, float]:
    """Of every leftover the moment it was gone."""
    died: dict[Process, float] = {}
    deadline = max(planted.leftovers.values()) + GRACE + PERIOD + LADDER + 5
    while len(died) < len(planted.leftovers) and time.time() < deadline:
        gone = [p for p in planted.leftovers if p not in died and not processes.alive(p)]
        died |= dict.fromkeys(gone, time.time())
        time.sleep(0.05)
    left = planted.leftovers.keys() - died.keys()
    assert not left, (left, events(planted.rig, "open=true"), planted.rig.logs())
    return died


def open_leftovers(rig: System) -> list[dict[str, Any]]:
    return events(rig, "finding=leftover&open=true")


def events(rig: System, query: str) -> list[dict[str, Any]]:
    pages, number = [], 1
    while number:
        page = rig.get(f"system/watchdog-events?page_size=200&page={number}&{query}")
        pages += page["results"]
        number = number + 1 if page["next"] else 0
    return pages

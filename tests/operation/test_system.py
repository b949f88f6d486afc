"""A whole installation under its operator's commands: maintenance, stop-jobs, messages while things are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.test_kills import attempt_of, journal, steps_after, wait_until
from tests.stubs.receivers import Mailbox, Receiver
from tests.system import ROOT, System

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


@pytest.fixture(scope="module")
def mailbox() -> Iterator[Mailbox]:
    server = Mailbox()
    yield server
    server.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, mailbox: Mailbox) -> Iterator[System]:
    told = {
        "MISTUDIO_WEBHOOK_URL": receiver.url,
        "MISTUDIO_EMAIL_URL": mailbox.url,
        "MISTUDIO_EMAIL_FROM": "mistudio@example.org",
    }
    with System(tmp_path_factory.mktemp("operation"), time_scale=0.1, **told) as running:
        assert running.manage("user", "email", "operator", "boss@example.org").returncode == 0
        yield running


def reason(system: System, job_id: str) -> str:
    return (system.job(job_id)["waiting_for"] or {}).get("reason", "")


def test_a_maintenance_over_a_restart(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    runs = rig.submit("rehearsal", gpu=0, steps=400, seconds_per_step=0.05, journal=str(path))
    short = rig.submit("rehearsal", gpu=1, steps=1)
    rig.wait(short["id"])
    steps_after(path, runs["id"], 5)
    began = rig.manage("maintenance", "begin", "--pause", "--note", "new driver")
    assert began.returncode == 0, began.stderr
    assert "Asked to pause: 1 jobs" in began.stdout and "It is safe: nothing runs" in began.stdout
    assert rig.job(runs["id"])["status"] == "paused"
    waits = rig.submit("rehearsal", gpu=0, steps=1)
    wait_until(lambda: reason(rig, waits["id"]) == "maintenance", "it says why it waits")
    rig.stop()
    rig.start()
    assert "new driver" in (rig.home / "up.log").read_text()
    assert "new driver" in rig.get("system/all")["hosts"][0]["maintenance"]
    time.sleep(2)  # four dispatches of this system's clock
    assert rig.job(waits["id"])["status"] == "queued"
    assert rig.manage("maintenance", "status").returncode == 0
    ended = rig.manage("maintenance", "end")
    assert "Resumed: 1 of the 1 jobs" in ended.stdout, ended.stderr
    assert rig.manage("maintenance", "status").returncode == 1
    rig.wait(waits["id"])
    done = rig.wait(runs["id"])
    assert (done["status"], done["attempt"]) == ("succeeded", 2)
    assert [line["step"] for line in journal(path, runs["id"]) if line["event"] == "start"][1] >= 5
    rig.wait_for_free_cards()


def test_a_maintenance_waits_for_what_does_not_pause(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = rig.submit("rehearsal", gpu=0, steps=60, seconds_per_step=0.1, journal=str(path))
    steps_after(path, job["id"], 1)
    too_soon = rig.manage("maintenance", "begin", "--wait", "0.5")
    assert too_soon.returncode == 1
    assert f"still runs: rehearsal {job['id'].replace('-', '')[-6:]} (rehearsal, operator)" in too_soon.stdout
    began = rig.manage("maintenance", "begin")
    assert began.returncode == 0 and rig.job(job["id"])["status"] == "succeeded"
    assert rig.manage("maintenance", "end").returncode == 0


def test_stop_jobs_says_what_did_not_end(rig: System, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    deaf = rig.submit("rehearsal", gpu=0, steps=4000, seconds_per_step=0.05, deaf=True, journal=str(path))
    other = rig.submit("rehearsal", gpu=1, steps=4000, seconds_per_step=0.05, journal=str(path))
    steps_after(path, deaf["id"], 2)
    steps_after(path, other["id"], 2)
    paused = rig.manage("stop-jobs", "--pause", "--wait", "5")
    assert paused.returncode == 1 and "1 of 2 jobs still run after 5 s" in paused.stderr
    assert "did not end: " in paused.stdout and rig.job(other["id"])["status"] == "paused"
    ended = rig.manage("stop-jobs", "--cancel", "--wait", "30")
    assert ended.returncode == 0, ended.stdout
    assert rig.job(deaf["id"])["status"] == "cancelled"
    assert not Path(f"/proc/{attempt_of(rig, deaf['id'])['work_pid']}").exists()
    rig.call("POST", f"jobs/{other['id']}/cancel/")
    rig.wait_for_free_cards()


def names(receiver: Receiver) -> list[str]:
    return [json.loads(body)["job"]["name"] for _, body in receiver.got]


def test_a_receiver_that_hangs_delays_no_job_and_no_repair(rig: System, receiver: Receiver) -> None:
    """Its deliveries hang in a thread of `worker-cpu`, which also dispatches and answers the canary."""
    receiver.got.clear()
    receiver.plan = ["hang"] * 3 + [500, 500]
    before = rig.pid("worker-cpu")
    took = []
    for number in range(6):
        began = time.monotonic()
        job = rig.submit("rehearsal", gpu=0, steps=1, name=f"hang {number}")
        rig.wait(job["id"])
        took.append(time.monotonic() - began)
    assert max(took) < 10
    wait_until(lambda: {f"hang {n}" for n in range(6)} <= set(names(receiver)), "all are delivered", 90)
    assert len(names(receiver)) == len(set(names(receiver)))
    assert rig.pid("worker-cpu") == before, "its canary was answered all the time"
    assert rig.get("system/health")["status"] == "ok"


def test_a_delivery_that_is_killed_loses_no_message(
    rig: System, receiver: Receiver, mailbox: Mailbox
) -> None:
    receiver.got.clear()
    receiver.plan = ["hang"]
    asked = receiver.asked
    job = rig.submit("rehearsal", gpu=0, steps=1, fail_at=0, name="killed delivery")
    rig.wait(job["id"])
    wait_until(lambda: receiver.asked > asked, "the delivery hangs")
    rig.kill("worker-cpu")
    wait_until(lambda: names(receiver) == ["killed delivery"], "it is delivered after all", 60)
    wait_until(
        lambda: any("killed delivery has failed (error)" in text for _, _, text in mailbox.got),
        "and mailed",
        60,
    )
    assert {tuple(to) for _, to, _ in mailbox.got} == {("boss@example.org",)}


def test_a_delivery_to_nobody_costs_a_job_nothing(tmp_path: Path) -> None:
    """A host that does not answer at all, and a broker that is away: the row is all that a job's end needs."""
    env = {"MISTUDIO_WEBHOOK_URL": "http://10.255.255.1/"}
    with System(tmp_path / "home", time_scale=0.1, **env) as one:
        job = one.submit("rehearsal", gpu=0, steps=1)
        assert one.wait(job["id"], timeout=20)["status"] == "succeeded"
        assert one.rows("SELECT event, sent_at FROM jobs_message") == [("job.succeeded", None)]
    command = [sys.executable, "manage.py", "notify"]
    told = subprocess.run(command, check=True, cwd=ROOT, env=one.env, capture_output=True, text=True)
    assert told.stdout.startswith("1 wait")

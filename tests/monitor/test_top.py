"""`manage.py top`: every card, every job, in text."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import OperationalError

from gpus.models import Gpu, Host
from jobs import processes
from jobs.models import Attempt, Job, Lease, Status
from monitor import board
from monitor.management.commands.top import picture_or_why
from tests.conftest import make_card
from tests.system import ROOT, System


def top() -> str:
    output = StringIO()
    call_command("top", "--once", stdout=output)
    return output.getvalue()


@pytest.fixture
def busy(alice: User, living_host: Host, three_cards: list[Gpu]) -> Job:
    """A job that runs on card 1, one without a card, and one that waits."""
    job = Job.objects.create(
        kind="sae_training", owner=alice, name="first", status=Status.RUNNING, attempt=1, host=living_host,
        gpu_uuid=three_cards[1].uuid, gpu_uuids=[three_cards[1].uuid],
        progress={"stage": "training", "done": 1, "total": 4, "fraction": 0.25, "eta_seconds": 90},
    )  # fmt: skip
    attempt = Attempt.objects.create(job=job, number=1, host=living_host, boot_id=processes.boot_id())
    Lease.objects.create(resource=f"gpu:{three_cards[1].uuid}", slot=0, attempt=attempt)
    Job.objects.create(
        kind="model_download", owner=alice, name="second", status=Status.RUNNING, needs_card=False
    )
    Job.objects.create(
        kind="rehearsal", owner=alice, name="third", gpu_wanted=three_cards[1].uuid,
        waiting_for={"reason": "lease", "detail": "Behind job first."},
    )  # fmt: skip
    return job


@pytest.mark.django_db
def test_it_shows_cards_jobs_and_the_queue(busy: Job) -> None:
    lines = top().splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert rows["0"].split()[:5] == ["0", "Card", "24", "GiB", "free"]
    assert "–" in rows["0"]  # a temperature that the card does not say
    first, second, third = (
        next(line for line in lines if word in line) for word in ("first ", "second", "third")
    )
    assert (first.split()[0], "25 %" in first, "2 min" in first) == ("1", True, True)
    assert second.split()[0] == "CPU"
    assert "Behind job first" in third
    assert third.startswith("1 ")
    assert max(len(line) for line in lines) <= 140


@pytest.mark.django_db
def test_a_name_is_no_markup(busy: Job) -> None:
    Job.objects.update(name="[/x] [red]a[/red] :smile:")
    assert top().count("[/x] [red]a[/red] :smile:") == 3


@pytest.mark.django_db
def test_it_shows_what_is_wrong(living_host: Host) -> None:
    make_card(living_host, 0, sampled_at=None, reading={}, memory_total_bytes=None)
    Host.objects.update(agent_seen_at=None)
    text = top()
    assert "agent silent" in text
    assert "– / –" in text


def test_it_lives_on_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise OperationalError("gone")

    monkeypatch.setattr(board, "gpu_map", away)
    assert "does not answer" in str(picture_or_why())


@pytest.mark.django_db
def test_it_works_on_an_empty_database() -> None:
    assert "Cards" in top()


@pytest.mark.slow
@pytest.mark.engine
def test_it_lives_in_a_terminal(system: System) -> None:
    """It draws again and again, shows a job that started meanwhile, and Ctrl-C gives the screen back."""
    parent, child = pty.openpty()
    command = [sys.executable, "manage.py", "top", "--seconds", "0.5"]
    env = system.env | {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
    live = subprocess.Popen(command, cwd=ROOT, env=env, stdin=child, stdout=child, stderr=child)
    os.close(child)
    seen = read_until(parent, "Simulated")
    job = system.submit("rehearsal", steps=200, name="appears", gpu=1)
    seen += read_until(parent, "appears")
    live.send_signal(signal.SIGINT)
    seen += read_until(parent, "\x1b[?1049l")
    assert live.wait(10) == 0
    assert "\x1b[?1049h" in seen
    system.call("POST", f"jobs/{job['id']}/cancel/")
    os.close(parent)


def read_until(terminal: int, text: str, seconds: float = 20) -> str:
    seen, deadline = "", time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen

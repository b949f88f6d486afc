"""`manage.py submit`: REST's way and REST's sentences, from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import InterfaceError, OperationalError
from django.utils import timezone

from gpus.models import Gpu
from jobs import serializers
from jobs.models import Job, Status
from monitor.lines import Pace, progress_line
from monitor.management.commands import submit as command
from tests.conftest import client_of
from tests.system import ROOT, System


def submit(*words: str) -> Job:
    """The job whose id the command prints."""
    output = StringIO()
    call_command("submit", *words, "--user", "alice", stdout=output, stderr=StringIO())
    return Job.objects.get(pk=output.getvalue().strip())


@pytest.mark.django_db
def test_it_queues_what_rest_would_queue(alice: User, three_cards: list[Gpu], tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"steps": 7, "reject": true, "gpu": 0}')
    job = submit(
        "rehearsal", "--json", str(tmp_path / "params.json"), "--gpu", "1", "--name", "mine",
        "--set", "reject=false", "--set", "seconds_per_step=0.5", "--set", "journal=a=b", "--set", "hold=true",
    )  # fmt: skip
    assert (job.owner, job.name, job.gpu_request, job.status) == (alice, "mine", three_cards[1].uuid, "held")
    assert job.params["steps"] == 7
    assert (job.params["reject"], job.params["seconds_per_step"], job.params["journal"]) == (
        False,
        0.5,
        "a=b",
    )


@pytest.mark.django_db
def test_it_queues_a_sweep_as_a_group(alice: User, three_cards: list[Gpu]) -> None:
    output = StringIO()
    words = ("--user", "alice", "--gpu", "1", "--set", "steps=[1, 2, 3]")
    call_command("submit", "rehearsal", *words, stdout=output, stderr=StringIO())
    jobs = [Job.objects.get(pk=line) for line in output.getvalue().split()]
    assert [job.params["steps"] for job in jobs] == [1, 2, 3]
    assert len({job.group_id for job in jobs}) == 1
    assert {job.gpu_request for job in jobs} == {three_cards[1].uuid}


@pytest.mark.django_db
def test_a_database_that_is_away_ends_no_following(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.objects.create(kind="rehearsal", owner=alice, started_at=timezone.now())
    full, answers = serializers.full, iter([OperationalError("gone"), InterfaceError("closed"), None])

    def away_at_first(job: Job) -> dict[str, Any]:
        if error := next(answers, None):
            raise error
        Job.objects.update(status=Status.SUCCEEDED, finished_at=timezone.now())
        return full(job)

    monkeypatch.setattr(serializers, "full", away_at_first)
    monkeypatch.setattr(command, "LOOK_SECONDS", 0)
    monkeypatch.setattr(command, "close_old_connections", lambda: None)  # the test's own is one
    said = StringIO()
    command.Command(stderr=said).follow([job])
    assert [line.partition(" ")[0] for line in said.getvalue().splitlines()] == [
        "The",
        "rehearsal:",
        "succeeded",
    ]


@pytest.mark.django_db
def test_it_reads_parameters_from_standard_input(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO('{"steps": 9}'))
    assert submit("rehearsal", "--json", "-").params["steps"] == 9


@pytest.mark.django_db
def test_several_values_print_an_id_each(alice: User, three_cards: list[Gpu]) -> None:
    output = StringIO()
    words = ["rehearsal", "--set", "steps=[1, 2]", "--set", "seconds_per_step=[0.1, 0.2]", "--user", "alice"]
    call_command("submit", *words, stdout=output, stderr=StringIO())
    made = Job.objects.order_by("queued_at")
    assert output.getvalue().split() == [str(job.pk) for job in made]
    assert [job.params["steps"] for job in made] == [1, 1, 2, 2]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["--gpu", "cuda:0"], {"gpu": "cuda:0"}),
        (["--gpu", "7"], {"gpu": "7"}),
        (["--gpu", "0", "--gpu", "1"], {"gpu": ["0", "1"]}),
        (["--set", "priority=5"], {"priority": 5}),
        (["--set", "stepz=5"], {"stepz": 5}),
    ],
)
def test_it_refuses_as_rest_refuses(
    alice: User, three_cards: list[Gpu], words: list[str], body: dict[str, Any]
) -> None:
    over_rest = client_of(alice).post("/api/v1/jobs/rehearsal/", body, format="json").json()
    with pytest.raises(CommandError) as refusal:
        submit("rehearsal", *words)
    assert over_rest["detail"] in str(refusal.value)
    assert over_rest.get("hint", "") in str(refusal.value)
    assert not Job.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "There are: "),
        (["rehearsal", "--set", "steps"], "KEY=VALUE"),
        (["rehearsal", "--set", "=1"], "KEY=VALUE"),
        (["rehearsal", "--json", "/nowhere"], "No JSON can be read"),
        (["rehearsal", "--user", "nobody"], "no active user"),
    ],
)
def test_it_says_what_is_wrong(alice: User, words: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        call_command("submit", "--user", "alice", *words, stdout=StringIO(), stderr=StringIO())


def test_the_line_tells_rate_and_rest() -> None:
    progress = {
        "stage": "training",
        "done": 1500,
        "total": 3000,
        "unit": "tokens",
        "fraction": 0.5,
        "eta_seconds": 61,
    }
    job = {
        "kind": "sae_training",
        "status": "running",
        "progress": progress,
        "waiting_for": None,
        "error": "",
    }
    assert progress_line(job, 250.4) == (
        "sae_training: running · training ████████████············ 1 500/3 000 tokens · 250 tokens/s · 1 min left"
    )
    waiting = job | {"status": "queued", "waiting_for": {"detail": "behind job abc"}}
    assert progress_line(waiting) == "sae_training: queued · behind job abc"
    pace = Pace()
    assert pace.rate(progress, 10.0) is None
    assert pace.rate(progress | {"done": 1600}, 14.0) == 25.0
    assert pace.rate(progress | {"stage": "measuring", "done": 0}, 15.0) is None


# Against a running system -------------------------------------------------------------------------------
def start(system: System, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "manage.py", "submit", "rehearsal", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=system.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.engine
def test_it_waits_for_success(system: System) -> None:
    waiting = start(system, "--gpu", "2", "--set", "steps=4", "--wait")
    output, told = waiting.communicate(timeout=60)
    job = system.job(output.strip())
    assert (waiting.returncode, job["status"], job["owner"]) == (0, "succeeded", "operator")
    assert job["gpu_uuid"] == system.cards()[2]["uuid"]
    assert f"{system.url}/jobs/{job['id']}/" in told
    assert "succeeded after" in told


@pytest.mark.slow
@pytest.mark.engine
def test_it_fails_with_the_job(system: System) -> None:
    waiting = start(system, "--set", "fail_at=1", "--wait")
    _, told = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "ended failed." in told
    assert "told to fail at step 1" in told


@pytest.mark.slow
@pytest.mark.engine
def test_an_interrupt_leaves_the_job_alone(system: System) -> None:
    waiting = start(system, "--set", "steps=60", "--wait")
    assert waiting.stdout
    job = waiting.stdout.readline().strip()
    system.wait(job, "running")
    time.sleep(1)
    os.kill(waiting.pid, signal.SIGINT)
    _, told = waiting.communicate(timeout=20)
    assert (waiting.returncode, f"{job} goes on" in told) == (130, True)
    assert system.wait(job)["status"] == "succeeded"

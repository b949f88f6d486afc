"""What may be loaded where: torch in the fork server and the work only, CUDA nowhere before the work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import ROOT, System

pytestmark = pytest.mark.engine


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.fixture(scope="module")
def posted(system: System) -> None:
    """A job of every kind was posted, and one has run."""
    for kind in system.get("job-kinds/"):
        status, job = system.call("POST", f"jobs/{kind['name']}/", kind["example"] | {"gpu": 1})
        assert status in (201, 400)
        if status == 201:
            system.call("POST", f"jobs/{job['id']}/cancel/")
    system.wait(system.submit("rehearsal", gpu=1, steps=1)["id"])


@pytest.mark.parametrize("service", ["web", "agent", "worker", "worker-cpu", "beat"])
def test_it_loads_no_torch_into_a_service_g21(system: System, posted: None, service: str) -> None:
    """None of the services has torch, so none can have initialised CUDA."""
    assert "libtorch" not in maps(system.pid(service))


def test_it_starts_a_job_in_a_new_process_whose_card_was_set_before_g21(system: System) -> None:
    uuid = system.cards()[1]["uuid"]
    done = system.wait(system.submit("rehearsal", gpu=uuid, steps=1)["id"])
    attempt = system.get(f"jobs/{done['id']}/attempts/")[-1]
    assert done["result"]["visible"] == uuid
    services = {system.pid(name) for name in ("web", "agent", "worker", "worker-cpu", "beat", "forkserver")}
    assert not {attempt["work_pid"], attempt["keeper_pid"]} & services


def test_it_keeps_the_fork_server_single_threaded_and_off_the_cards(system: System) -> None:
    system.wait(system.submit("rehearsal", steps=1)["id"])
    server = system.pid("forkserver")
    assert "libtorch" in maps(server)
    assert threads(server) == 1
    assert not [fd for fd in Path(f"/proc/{server}/fd").iterdir() if "nvidia" in os.readlink(fd)]


def test_it_makes_a_new_fork_server_when_the_old_one_is_killed(system: System) -> None:
    system.wait(system.submit("rehearsal", steps=1)["id"])
    old = system.pid("forkserver")
    os.kill(old, signal.SIGKILL)
    assert system.wait(system.submit("rehearsal", steps=1)["id"])["status"] == "succeeded"
    assert system.pid("forkserver") != old


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folders = f"{ROOT / 'tests' / 'rehearsal'}:{ROOT / 'tests' / 'poison'}"
    home = tmp_path_factory.mktemp("poisoned")
    with System(home, time_scale=0.1, MISTUDIO_KIND_PATHS=folders, PYTHONPATH=str(ROOT)) as running:
        yield running


def test_it_starts_fresh_processes_when_cuda_was_touched_before_the_fork_g39(poisoned: System) -> None:
    jobs = [poisoned.submit("rehearsal", gpu=card, steps=2) for card in (0, 1)]
    for job in jobs:
        assert poisoned.wait(job["id"])["status"] == "succeeded"
    log = (poisoned.home / "logs" / "worker.log").read_text()
    assert "CUDA is initialised" in log
    assert "jobs.kinds.poison" in log


def test_it_runs_a_job_once_though_its_message_comes_again_g40(tmp_path: Path) -> None:
    """visibility_timeout=10 s, acks late, a job of 35 s on the only card."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.late_acks", "PYTHONPATH": str(ROOT)}
    with System(tmp_path / "home", cards="24GiB", time_scale=0.1, **settings) as system:
        journal = tmp_path / "journal"
        job = system.submit("rehearsal", gpu=0, steps=35, seconds_per_step=1, journal=str(journal))
        system.wait(job["id"], "running")
        ring_again(system, job["id"])
        done = system.wait(job["id"], timeout=80)
        assert (done["status"], done["attempt"]) == ("succeeded", 1)
        assert journal.read_text().count('"event": "start"') == 1
        assert journal.read_text().count('"event": "end"') == 1


def ring_again(system: System, job_id: str) -> None:
    """Deliver the doorbell fifty times more."""
    import subprocess
    import sys

    script = (
        "import django; django.setup()\n"
        "from jobs import tasks\n"
        f"for _ in range(50): tasks.run_job.apply_async(args=['{job_id}', 1], queue='gpu.testhost')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=system.env, check=True, timeout=60)


def test_it_runs_on_the_cpu_where_no_driver_ever_was(tmp_path: Path) -> None:
    with System(tmp_path / "home", time_scale=0.1, MISTUDIO_GPU_BACKEND="auto") as system:
        assert system.get("system/gpu-list") == {"gpu_count": 0, "gpus": []}
        done = system.wait(system.submit("rehearsal", steps=1)["id"])
        assert (done["status"], done["device"], done["gpu_uuid"]) == ("succeeded", "cpu", None)
        status, refused = system.call("POST", "jobs/rehearsal/", {"gpu": 0})
        assert (status, refused["code"]) == (400, "unknown_gpu")

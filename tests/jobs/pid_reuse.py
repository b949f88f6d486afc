"""Runs inside a PID namespace of its own, where a process number can be given twice on purpose:

    unshare --pid --fork --mount-proc python -m tests.jobs.pid_reuse <data folder>

A recorded work dies, an innocent process gets its number and is listed by the card; recovery and the watchdog come.
Says `reused <pid>` and exits 0 when nobody was signalled; 77 when the kernel did not give the number again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

GIVEN_UP = 77


def born_as(number: int) -> subprocess.Popen[bytes]:
    """A process with this number: the kernel is told the last one that it gave, or gives numbers until it comes."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
        except OSError:
            break
        child = subprocess.Popen(["sleep", "600"])
        if child.pid == number:
            return child
        child.kill()
        child.wait()
    sys.exit(GIVEN_UP)


def main(home: str) -> None:
    os.environ |= {
        "MISTUDIO_HOME": home,
        "MISTUDIO_HOST_NAME": "alpha",
        "DJANGO_SETTINGS_MODULE": "mistudio.settings",
    }
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.utils import timezone

    from gpus import agent_client
    from gpus.backends import simulated
    from gpus.models import Gpu, Host
    from jobs import processes, recovery, watchdog
    from jobs.models import Attempt, Job, Lease, WatchdogEvent

    call_command("migrate", verbosity=0)
    work = subprocess.Popen(["sleep", "600"])
    before = processes.find(work.pid)
    assert before is not None
    work.kill()
    work.wait()
    time.sleep(0.05)  # start times count in hundredths of a second
    innocent = born_as(before.pid)
    after = processes.find(innocent.pid)
    assert after is not None and after.pid == before.pid and after.start != before.start

    backend = simulated.SimulatedBackend(home, "alpha", [2**30])
    uuid = backend.list_cards()[0].uuid
    simulated.hold(uuid, after.pid, after.start)
    agent_client.fresh = lambda uuid, timeout=1.0: {  # as the agent answers
        "reading": backend.read(uuid).as_dict(),
        "processes": [entry.as_dict() for entry in backend.processes(uuid)],
        "lists": True,
    }
    now = timezone.now()
    host = Host.objects.create(
        name="alpha", boot_id=processes.boot_id(), agent_seen_at=now, worker_seen_at=now
    )
    Gpu.objects.create(uuid=uuid, host=host, index=0, name="one", sampled_at=now, simulated=True)
    owner = User.objects.create(username="alice")
    recorded = {
        "work_pid": before.pid,
        "work_start": before.start,
        "keeper_pid": before.pid,
        "keeper_start": before.start,
    }
    for status, ended in (("succeeded", now - timedelta(hours=1)), ("running", None)):
        job = Job.objects.create(kind="model_download", owner=owner, status=status, attempt=1)
        attempt = Attempt.objects.create(
            job=job, number=1, host=host, boot_id=processes.boot_id(), session_id=before.pid, ended_at=ended,
            members=[[before.pid, before.start]], seen_ticks=after.start, claimed_at=now, **recorded,
        )  # fmt: skip
        state = Lease.State.QUARANTINED if ended else Lease.State.ACTIVE
        Lease.objects.create(resource=f"gpu:{uuid}", slot=0 if ended else 1, attempt=attempt, state=state)
    for _ in range(4):
        WatchdogEvent.objects.exclude(due_at=None).update(due_at=now)
        recovery.recover_host("alpha")
        watchdog.watch("alpha")
    assert innocent.poll() is None, f"signalled: {innocent.returncode}"
    assert not processes.send(before, signal.SIGKILL)
    assert innocent.poll() is None
    told = WatchdogEvent.objects.filter(pid=after.pid).values_list("finding", "term_at")
    assert list(told) == [("foreign", None)], list(WatchdogEvent.objects.values())
    assert not Lease.objects.filter(ended_at=None, state=Lease.State.QUARANTINED).exists()
    print(f"reused {after.pid}", flush=True)
    innocent.kill()


if __name__ == "__main__":
    main(sys.argv[1])

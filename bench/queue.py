"""Claim: with 10 000 queued jobs a round of dispatch takes less than 50 ms, a page of jobs less than 200 ms, and a
submit, its commit included, less than 150 ms (p99).

    .venv/bin/python -m bench.queue [jobs]           DATABASE_URL=postgres://…   the rounds on that database instead

The rounds run in this process, over eight cards of a living host that are all held: eight lines for named cards, one
for `auto`, one for the CPU, and a tenth of the jobs waits for another job. Pages and submits are asked of a whole
system (`manage.py up`, SQLite) whose four cards are held, over HTTP on the same machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.system import ROOT, System

GIB = 2**30
CARDS = 8
ROUNDS = 30


def milliseconds(act: Callable[[], Any], times: int = ROUNDS) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def told(name: str, values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100)
    print(
        f"{name:64} p50 {statistics.median(values):6.1f} ms, p99 {cuts[98]:6.1f} ms, max {max(values):6.1f} ms"
    )


# Rounds, in this process ---------------------------------------------------------------------------------------


def rounds(count: int) -> None:
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from jobs import dispatch, tasks

    call_command("migrate", verbosity=0)
    tasks.ring = lambda *args, **options: None
    cards, before = stock(count)
    print(f"{connection.vendor}, {count} queued jobs, {CARDS} cards")
    told("a round while all cards are held", milliseconds(round_that_starts(0)))
    told("a card gets free: the round that starts the right job", milliseconds_of_grants(cards))
    lease_all(cards)
    before.update(status="running")
    everybody("auto", need=20 * GIB)
    half_full(cards[0])
    told("a free slot, and none of a line of all fits beside its job", milliseconds(round_that_starts(0)))
    told("the same, with all jobs in the queue waiting for another", waiting_for_another(before))
    assert dispatch.schedule() == 0


def stock(count: int) -> tuple[list[Any], Any]:
    """Cards of a living host, all held, and the queue."""
    from django.contrib.auth.models import User
    from django.utils import timezone

    from gpus.models import Host
    from jobs.models import Job
    from tests.conftest import make_card

    now = timezone.now()
    host, _ = Host.objects.update_or_create(
        name="bench", defaults={"agent_seen_at": now, "worker_seen_at": now}
    )
    cards = [make_card(host, n) for n in range(CARDS)]
    user = User.objects.create_user("bench")
    source = Job.objects.create(kind="rehearsal", owner=user, status="running")
    Job.objects.bulk_create(queue(count, user, cards, source), batch_size=500)
    lease_all(cards)
    return cards, Job.objects.filter(pk=source.pk)


def queue(count: int, user: Any, cards: list[Any], source: Any) -> Iterator[Any]:
    from jobs.models import Job

    lines = [card.uuid for card in cards] + ["auto"]
    for n in range(count):
        gpu = lines[n % len(lines)]
        estimate = {
            "memory_bytes": (n % 20) * GIB,
            "breakdown": {"buffers": n},
            "disk_bytes": 0,
            "basis": "formula",
        }
        waits = {"reason": "after", "job_id": str(source.pk), "detail": "after it"}
        more = {"waits_on": source, "waiting_for": waits} if n % 10 == 9 else {}
        yield Job(kind="rehearsal", owner=user, gpu_request=gpu, gpu_wanted=gpu, estimate=estimate,
                  params={"steps": n, "text": "x" * 300}, needs_card=n % 50 != 1, **more)  # fmt: skip


def lease_all(cards: list[Any]) -> None:
    from jobs.models import Attempt, Job, Lease

    for card in cards:
        job = Job.objects.filter(status="queued").last()
        Job.objects.filter(pk=job.pk).update(status="running", attempt=1)
        attempt = Attempt.objects.create(
            job=job, number=1, host=card.host, boot_id="x", gpu_uuids=[card.uuid]
        )
        if not Lease.objects.filter(resource=card.resource, ended_at=None).exists():
            Lease.objects.create(resource=card.resource, job_class="batch", slot=0, attempt=attempt)
    for slot in range(2):
        Lease.objects.get_or_create(
            resource="cpu:bench", job_class="batch", slot=slot, ended_at=None, defaults={"attempt": attempt}
        )


def free(card: Any) -> None:
    from django.utils import timezone

    from jobs.models import Lease

    Lease.objects.filter(resource=card.resource, ended_at=None).update(ended_at=timezone.now(), state="ended")


def half_full(card: Any) -> None:
    """A second slot beside a job that has 10 GiB."""
    from gpus.models import Gpu
    from jobs.models import Lease

    Gpu.objects.filter(pk=card.pk).update(max_jobs=2)
    Lease.objects.filter(resource=card.resource, ended_at=None).update(estimate_bytes=10 * GIB)


def alive() -> None:
    from django.utils import timezone

    from gpus.models import Gpu, Host

    now = timezone.now()
    Host.objects.update(agent_seen_at=now, worker_seen_at=now)
    Gpu.objects.update(sampled_at=now)


def round_that_starts(expected: int) -> Callable[[], None]:
    from jobs import dispatch

    def once() -> None:
        assert dispatch.schedule() == expected

    alive()
    once()  # writes down what the first of each line waits for
    return once


def milliseconds_of_grants(cards: list[Any]) -> list[float]:
    """Each frees one card, and starts who is first of those that may have it: in its own line or in that of `auto`."""
    from jobs import dispatch
    from jobs.models import Job

    taken = []
    for n in range(ROUNDS):
        card = cards[n % len(cards)]
        alive()
        free(card)
        asked = Job.objects.filter(line__in=[f"batch {card.uuid}", "batch auto"])
        expected = asked.order_by("-priority", "queued_at").first()
        taken += milliseconds(dispatch.schedule, 1)
        expected.refresh_from_db()
        assert (expected.status, expected.gpu_uuid) == ("starting", card.uuid)
    return taken


def everybody(request: str, need: int) -> None:
    from jobs.models import Job

    queued = Job.objects.filter(status="queued")
    queued.update(
        gpu_wanted=request, needs_card=True, waits_on=None, estimate={"memory_bytes": need, "breakdown": {}}
    )


def waiting_for_another(source: Any) -> list[float]:
    from jobs.models import Job

    Job.objects.filter(status="queued").update(waits_on=source.get())
    return milliseconds(round_that_starts(0))


# Pages and submits, of a whole system --------------------------------------------------------------------------

FILL = """
import django; django.setup()
from django.contrib.auth.models import User
from gpus.models import Gpu
from jobs.models import Job
from bench.queue import queue
user = User.objects.filter(is_superuser=True).first()
source = Job.objects.filter(status="running").first()
Job.objects.bulk_create(queue({count}, user, list(Gpu.objects.all()), source), batch_size=500)
"""


def over_http(count: int) -> None:
    home = Path(tempfile.mkdtemp()) / "home"
    with System(home, cards="24GiB,24GiB,24GiB,24GiB", time_scale=1) as system:
        for card in range(4):
            held = system.submit("rehearsal", steps=6000, seconds_per_step=0.1, gpu=card)
            system.wait(held["id"], "running")
        for _ in range(2):
            held = system.submit("rehearsal", steps=6000, seconds_per_step=0.1, on_card=False)
            system.wait(held["id"], "running")
        fill = [sys.executable, "-c", FILL.format(count=count)]
        env = system.env | {"DJANGO_SETTINGS_MODULE": "mistudio.settings"}
        subprocess.run(fill, cwd=ROOT, env=env, check=True)
        time.sleep(12)  # two ticks of dispatch
        print(f"over HTTP: {system.get('jobs/?status=queued&page_size=1')['count']} queued jobs, four cards")
        told("GET jobs/ (50 jobs)", milliseconds(lambda: system.get("jobs/")))
        told(
            "GET jobs/?status=queued&page=100",
            milliseconds(lambda: system.get("jobs/?status=queued&page=100")),
        )
        open_page = signed_in(system)
        told("the page Jobs (50 rows)", milliseconds(lambda: open_page("/jobs/")))
        told("the page Jobs, only queued", milliseconds(lambda: open_page("/jobs/?status=queued")))
        told("the Monitor", milliseconds(lambda: open_page("/")))
        told("a submit", milliseconds(lambda: system.submit("rehearsal", steps=1, gpu=0), 200))


def signed_in(system: System) -> Callable[[str], bytes]:
    """Opens pages as the operator's browser does."""
    from http.cookiejar import CookieJar

    make = [sys.executable, "-c", SESSION]
    env = system.env | {"DJANGO_SETTINGS_MODULE": "mistudio.settings"}
    key = subprocess.run(make, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.split()[
        -1
    ]
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.addheaders = [("Cookie", f"sessionid={key}")]

    def page(path: str) -> bytes:
        with opener.open(system.url + path, timeout=20) as answer:
            assert answer.url == system.url + path
            return answer.read()

    return page


SESSION = """
import django; django.setup()
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
from monitor.signin import BACKEND
user, session = User.objects.filter(is_superuser=True).first(), SessionStore()
session[SESSION_KEY], session[BACKEND_SESSION_KEY] = str(user.pk), BACKEND
session[HASH_SESSION_KEY] = user.get_session_auth_hash()
session.create()
print(session.session_key)
"""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    os.environ |= {"DJANGO_SETTINGS_MODULE": "mistudio.settings", "MISTUDIO_GPU_BACKEND": "simulated"}
    os.environ |= {"MISTUDIO_HOME": tempfile.mkdtemp(), "MISTUDIO_HOST_NAME": "bench"}
    os.environ["MISTUDIO_KIND_PATHS"] = str(ROOT / "tests" / "rehearsal")
    rounds(count)
    if "DATABASE_URL" not in os.environ:
        over_http(count)


if __name__ == "__main__":
    main()

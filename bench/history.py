"""Claim: a 30-day question takes < 50 ms and a 24-hour one < 100 ms (p95) while everything else writes.

    .venv/bin/python -m bench.history [days]

Lives through 30 days of one card, then of eight, on SQLite: readings every 2 s in the order in which they come, rolled
up and pruned every hour. Then it asks, first alone, then beside an agent (eight cards every 2 s), eight jobs that
store metrics twice a second each, and an upkeep that rolls up and prunes without a pause. Printed are p50 and p95 of
`history.query` and of the REST view, what the writers waited, megabytes per card and month, and two floors: the same
answer from the readings alone, and a database that keeps every reading. CPU time is told beside the clock's.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

ROUNDS = 200
LOAD_SECONDS = 60.0
HOUR_MS = 3_600_000
QUIET = {"MISTUDIO_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def main() -> None:
    if len(sys.argv) > 2:
        case(int(sys.argv[1]), float(sys.argv[2]))
        return
    days = sys.argv[1] if len(sys.argv) > 1 else "30"
    for cards in ("1", "8"):
        with tempfile.TemporaryDirectory() as home:
            env = os.environ | QUIET | {"MISTUDIO_HOME": home, "MISTUDIO_GPU_BACKEND": "simulated"}
            subprocess.run([sys.executable, "-m", "bench.history", cards, days], check=True, env=env)


def case(cards: int, days: float) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "mistudio.settings"
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    print(f"\n{cards} card{'s' if cards > 1 else ''}, {days:g} days")
    uuids = [f"GPU-{number:08d}-0000-0000-0000-000000000000" for number in range(cards)]
    live(uuids, days)
    sizes(cards, days)
    alone = ask(uuids)
    print("  alone")
    show(alone)
    if cards > 1:
        beside_writers(uuids, alone)


# Thirty days -----------------------------------------------------------------------------------------------


def live(uuids: list[str], days: float) -> None:
    """Every reading as it came, upkeep every hour, up to now."""
    from django.db import connection
    from django.utils import timezone

    from gpus import recorder, rollups, samples
    from gpus.models import GpuSeries

    began = time.monotonic()
    now = samples.milliseconds(timezone.now())
    start = samples.floor(now - int(days * 24 * HOUR_MS), HOUR_MS)
    recorder.write([recorder.Sample(uuid, start, (0, 0, 0, 0)) for uuid in uuids])
    numbers = list(GpuSeries.objects.filter(uuid__in=uuids).order_by("pk").values_list("pk", flat=True))
    connection.cursor().execute("PRAGMA synchronous=OFF")
    hours = []
    for hour in range(start, now, HOUR_MS):
        insert(numbers, hour + 2_000, min(hour + HOUR_MS + 2_000, now))
        moment = datetime.fromtimestamp(min(hour + HOUR_MS + 11_000, now) / 1000, UTC)
        hours.append(timed(lambda at=moment: rollups.roll_up(at, 60)))
        rollups.prune(moment, 60)
    connection.cursor().execute("PRAGMA synchronous=FULL")
    readings = len(numbers) * int((now - start) / 2_000)
    print(
        f"  lived in {time.monotonic() - began:.0f} s: {readings:,} readings;"
        f" an hour's roll-up {p50(one.cpu for one in hours):.0f} ms of CPU"
    )


def insert(numbers: list[int], start: int, end: int) -> None:
    """Readings of all cards in time order, past the ORM: this is not what is measured."""
    from django.db import connection, transaction

    from gpus import samples

    dice = random.Random(start)
    used = [dice.randrange(2**30, 80 * 2**30) for _ in numbers]

    def rows() -> Iterator[tuple[int, ...]]:
        for at in range(start, end, 2_000):
            for number, memory in zip(numbers, used, strict=True):
                jitter = dice.randrange(1 << 16)
                yield (
                    samples.key(number, at + jitter % 40),
                    jitter % 1001,
                    memory + (jitter & 0xFF00) * 4096,
                    400 + jitter % 400,
                    2_000 + jitter % 5_000,
                )

    with transaction.atomic(), connection.cursor() as cursor:
        connection.connection.executemany(
            "INSERT OR IGNORE INTO gpus_gpusample VALUES (?, ?, ?, ?, ?)", rows()
        )
        cursor.execute("SELECT 1")


def sizes(cards: int, days: float) -> None:
    from django.db import connection

    tables = ("gpus_gpusample", "gpus_gpuminute", "gpus_gpuhour")
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        cursor.execute("SELECT name, sum(pgsize), sum(ncell) FROM dbstat GROUP BY name")
        found = {name: (size, cells) for name, size, cells in cursor.fetchall()}
        rows = {}
        for table in tables:
            cursor.execute(f"SELECT count(*) FROM {table}")
            rows[table] = cursor.fetchone()[0]
        cursor.execute("PRAGMA freelist_count")
        free = cursor.fetchone()[0] * 4096
    total = sum(found[table][0] for table in tables)
    for table in tables:
        size = found[table][0]
        print(
            f"  {table[5:]:10} {rows[table]:>9,} rows {size / 1e6:6.1f} MB, {size / rows[table]:.1f} B a row"
        )
    every = cards * days * 43_200 * found["gpus_gpusample"][0] / rows["gpus_gpusample"]
    print(
        f"  together {total / 1e6:.1f} MB ({free / 1e6:.1f} MB free besides): {total / 1e6 / cards:.2f} MB per card;"
    )
    print(f"  every reading kept would be {every / 1e6:.1f} MB, {every / total:.1f} ×")


# Questions -------------------------------------------------------------------------------------------------


class Took(NamedTuple):
    """Seconds by the clock, and of our own CPU time: on a machine that others use, the difference is theirs."""

    wall: float
    cpu: float


def timed(act: Callable[[], Any]) -> Took:
    began, cpu = time.perf_counter(), time.thread_time()
    act()
    return Took(time.perf_counter() - began, time.thread_time() - cpu)


def questions(uuids: list[str]) -> dict[str, Callable[[], Any]]:
    from gpus import history

    metric, one = "memory_used_bytes", uuids[:1]
    asked: dict[str, Callable[[], Any]] = {
        "30 d, one card": lambda: history.last(30 * 1440, metric, one),
        "24 h, one card": lambda: history.last(1440, metric, one),
        "24 h, one card, 2000 points": lambda: history.last(1440, metric, one, 2000),
        "1 h, one card": lambda: history.last(60, metric, one),
        "15 min, all cards": lambda: history.last(15, metric, uuids),
        "30 d, all cards": lambda: history.last(30 * 1440, metric, uuids),
        "30 d, all cards, over REST": over_rest(uuids),
        "floor: 24 h from readings": lambda: from_readings(one, 24),
    }
    return asked


def over_rest(uuids: list[str]) -> Callable[[], Any]:
    """Through the view, signed in, to bytes; the card rows as an agent left them."""
    from django.contrib.auth.models import User
    from rest_framework.test import APIClient

    from gpus.models import Gpu, Host

    host, _ = Host.objects.get_or_create(name="bench")
    for index, uuid in enumerate(uuids):
        Gpu.objects.get_or_create(uuid=uuid, defaults={"host": host, "index": index, "name": "bench"})
    client = APIClient()
    client.force_authenticate(User.objects.get_or_create(username="bench")[0])

    def ask() -> None:
        query = {"metric": "memory_used_bytes", "from": "-30d"}
        answer = client.get("/api/v1/system/gpu-history", query, headers={"host": "localhost"})
        assert answer.status_code == 200, answer.content

    return ask


def from_readings(uuids: list[str], hours: float) -> None:
    """What `history.query` would do without minutes and hours."""
    from django.utils import timezone

    from gpus import history, samples
    from gpus.models import GpuSample, GpuSeries

    end = samples.milliseconds(timezone.now())
    start = end - int(hours * HOUR_MS)
    numbers = list(GpuSeries.objects.filter(uuid__in=uuids).values_list("pk", flat=True))
    history._aggregate(GpuSample, "memory_used_bytes", numbers, start, end, (end - start) // 300)


def ask(
    uuids: list[str], stop: Callable[[int], bool] = lambda number: number >= ROUNDS
) -> dict[str, list[Took]]:
    """Each question in turn."""
    asked = questions(uuids)
    took: dict[str, list[Took]] = {name: [] for name in asked}
    for act in asked.values():
        act()
    number = 0
    while not stop(number):
        for name, act in asked.items():
            took[name].append(timed(act))
        number += 1
    return took


def p50(values: Iterable[float]) -> float:
    return 1000 * statistics.median(values)


def p95(values: Iterable[float]) -> float:
    return 1000 * statistics.quantiles(values, n=20)[-1]


def show(took: dict[str, list[Took]], before: dict[str, list[Took]] | None = None) -> None:
    """Milliseconds; and, beside writers, how much more than alone."""
    for name, values in took.items():
        wall, cpu = [one.wall for one in values], [one.cpu for one in values]
        line = f"    {name:28} p50 {p50(wall):6.1f} p95 {p95(wall):6.1f} ms;"
        line += f" CPU p50 {p50(cpu):6.1f} p95 {p95(cpu):6.1f} ms"
        if before:
            alone = before[name]
            line += f"; p50 {p50(wall) / p50(one.wall for one in alone):.1f} × alone,"
            line += f" CPU p50 {p50(cpu) / p50(one.cpu for one in alone):.1f} ×"
        print(line)


# Everything else writes ------------------------------------------------------------------------------------


def beside_writers(uuids: list[str], alone: dict[str, list[Took]]) -> None:
    """Readers here, each kind of writer in a process of its own."""
    begin = time.time() + 8
    roles = ["agent", "upkeep", *["job"] * 8]  # the last job speaks for all
    writers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from bench import history; history.write_as({role!r}, {uuids!r}, {begin})",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    time.sleep(max(0.0, begin - time.time()))
    took = ask(uuids, lambda number: time.time() > begin + LOAD_SECONDS)
    print(f"  beside an agent, eight jobs and upkeep, {len(took['30 d, one card'])} rounds")
    show(took, alone)
    for role, writer in zip(roles, writers, strict=True):
        said = writer.communicate()[0]
        if role != "job" or writer is writers[-1]:
            print(f"    {role}: {said.strip()}")


def write_as(role: str, uuids: list[str], begin: float) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "mistudio.settings"
    import django

    django.setup()
    period, act = WRITERS[role](uuids)
    time.sleep(max(0.0, begin - time.time()))
    took: list[float] = []
    while time.time() < begin + LOAD_SECONDS:
        took.append(timed(act).wall)
        time.sleep(max(0.0, begin + len(took) * period - time.time()))
    print(
        f"{len(took)} transactions, p50 {p50(took):.1f} ms, p95 {p95(took):.1f} ms, max {1000 * max(took):.0f} ms"
    )


def agent(uuids: list[str]) -> tuple[float, Callable[[], None]]:
    """All cards every 2 s, with an agent's settings of the database."""
    from django.db.backends.signals import connection_created

    from gpus import recorder
    from gpus.management.commands.agent import relax_sqlite

    connection_created.connect(relax_sqlite)

    def act() -> None:
        at = int(time.time() * 1000)
        recorder.write([recorder.Sample(uuid, at, (500, 2**35, 600, 3_000)) for uuid in uuids])

    return 2.0, act


def job(uuids: list[str]) -> tuple[float, Callable[[], None]]:
    """Twelve points and the progress of a job in one transaction twice a second: ten times a real job's pace."""
    from django.contrib.auth.models import User
    from django.db import transaction

    from jobs.models import Job, JobMetric

    row = Job.objects.create(kind="sae_training", owner=User.objects.get(username="bench"))
    steps = iter(range(10**9))

    def act() -> None:
        with transaction.atomic():
            step = next(steps)
            points = [JobMetric(job=row, name=f"curve {n}", step=step, value=n / 7) for n in range(12)]
            JobMetric.objects.bulk_create(points)
            Job.objects.filter(pk=row.pk).update(progress={"done": step})

    return 0.5, act


def upkeep(uuids: list[str]) -> tuple[float, Callable[[], None]]:
    """Beat's tasks, five times a second instead of every minute and hour; an hour of readings goes every 2 s."""
    from django.utils import timezone

    from gpus import rollups

    began = time.time()

    def act() -> None:
        rollups.roll_up()
        rollups.prune(timezone.now() + 1800 * timedelta(seconds=time.time() - began))

    return 0.2, act


WRITERS = {"agent": agent, "job": job, "upkeep": upkeep}


if __name__ == "__main__":
    main()

"""Card history in a running system: the agent writes it, beat rolls it up, and no kill takes any of it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.system import ROOT, System

pytestmark = pytest.mark.engine


def until(true: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := true()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


def readings(system: System) -> int:
    return system.rows("SELECT count(*) FROM gpus_gpusample")[0][0]


def test_the_agent_writes_and_a_killed_one_leaves_what_it_wrote(system: System) -> None:
    until(lambda: readings(system) > 30)
    stops = time.time()
    system.kill("agent")
    before = readings(system)
    until(lambda: readings(system) > before + 15)
    body = system.get("system/gpu-history?metric=memory_used_bytes&from=-10m&points=2000")
    assert body["gpu_count"] == 3
    assert body["resolution_s"] == 1
    for card in body["gpus"]:
        said = [at for at, value in zip(body["t"], card["max"], strict=True) if value is not None]
        assert said[0] < time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stops)) < said[-1]
    one = system.get(
        f"system/gpu-history?gpu_id={body['gpus'][2]['uuid']}&from=-1m&metric=temperature_celsius"
    )
    assert any(value and value > 10 for value in one["mean"])


def test_a_reading_is_one_row(system: System) -> None:
    """Five a second and card at these clocks; the newest of a card is the one that its own row shows, or is newer."""
    until(lambda: readings(system) > 60)
    per_second = "SELECT count(*) FROM gpus_gpusample GROUP BY id / 1000"
    assert max(count for (count,) in system.rows(per_second)) <= 7
    shown = {card["uuid"]: card["sampled_at"] for card in system.get("system/gpu-metrics")["gpus"]}
    time.sleep(1)
    newest = (
        "SELECT s.uuid, max(h.id % 10000000000000) FROM gpus_gpuseries s"
        " JOIN gpus_gpusample h ON h.id / 10000000000000 = s.id GROUP BY 1"
    )
    for uuid, at in system.rows(newest):
        assert at / 1000 >= datetime.fromisoformat(shown.pop(uuid)).timestamp() - 0.001
    assert not shown


def test_beat_rolls_it_up(system: System) -> None:
    """Every 6 s at these clocks."""

    def rolled_to() -> float:
        return system.rows("SELECT min(minutes_to) FROM gpus_gpuseries")[0][0] / 1000

    until(lambda: time.time() - rolled_to() < 75)
    names = dict(system.rows("SELECT name, expire_seconds FROM django_celery_beat_periodictask"))
    assert names["roll up history"] == 12
    assert names["prune history"] == 720


@pytest.mark.slow
def test_minutes_come_by_themselves(system: System) -> None:
    """Nobody asks for it: a whole minute of readings is a row a few seconds later."""
    seen = "SELECT temperature_decicelsius_count FROM gpus_gpuminute ORDER BY id DESC LIMIT 1"
    assert until(lambda: system.rows(seen), 150)[0][0] > 10


# A roll-up that is killed, again and again ----------------------------------------------------------------

SEED = """
import random
from gpus.recorder import Sample, write
dice = random.Random(1)
for at in range({start}, {start} + 3 * 3_600_000, 60_000):
    write([Sample("GPU-a", at + n * 2_000, (dice.randrange(1001), dice.choice([None, n]), 400, n)) for n in range(30)])
"""
ROLL_UP = """
import os, signal
from datetime import UTC, datetime
from gpus import rollups
rollups.MINUTES_AT_ONCE, rollups.HOURS_AT_ONCE, rollups.HOLD_SECONDS = 40 * 60_000, 3_600_000, 0
summarize, left = rollups._summarize, [{lives}]
def dying(*arguments):
    summarize(*arguments)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
rollups._summarize = dying
assert rollups.roll_up(datetime.fromtimestamp({now}, UTC), seconds=60)
"""
EXPECTED = """
SELECT id - id % 10000000000000 % {period}, min({c}), sum({c}), max({c}), count({c}) FROM gpus_gpusample GROUP BY 1
"""


def test_a_roll_up_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    start = 1_790_000_000_000 // 3_600_000 * 3_600_000
    env = os.environ | {"MISTUDIO_HOME": str(tmp_path), "MISTUDIO_GPU_BACKEND": "simulated"}

    def python(*arguments: str) -> int:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments], cwd=ROOT, env=env, check=False
        ).returncode

    assert python("migrate", "gpus", "-v0") == 0
    assert python("shell", "-v0", "-c", SEED.format(start=start)) == 0
    now = start / 1000 + 3 * 3600 + 30
    for lives in (1, 2, 2, 3):
        assert python("shell", "-v0", "-c", ROLL_UP.format(lives=lives, now=now)) == -signal.SIGKILL
    assert python("shell", "-v0", "-c", ROLL_UP.format(lives=0, now=now)) == 0
    with sqlite3.connect(tmp_path / "db.sqlite3") as database:
        for table, period in (("gpuminute", 60_000), ("gpuhour", 3_600_000)):
            for c in ("utilization_gpu_permille", "memory_used_bytes"):
                found = f"SELECT id, {c}_min, {c}_sum, {c}_max, {c}_count FROM gpus_{table} ORDER BY id"
                wanted = database.execute(EXPECTED.format(period=period, c=c)).fetchall()
                assert database.execute(found).fetchall() == sorted(wanted)
                assert len(wanted) == 3 * 3_600_000 / period

"""A past for the charts: readings of the last hours or days, written as the agent writes them and rolled up."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

from tests.system import ROOT, System

#: Runs in a process of the system's own environment: a test's database is another one.
SCRIPT = """
import django, random, sys, time
django.setup()
from gpus import recorder, rollups
minutes, every, shares = float(sys.argv[1]), float(sys.argv[2]), [float(share) for share in sys.argv[3].split(",")]
from gpus.models import Gpu, GpuHour, GpuMinute, GpuSample, GpuSeries
for table in (GpuSample, GpuMinute, GpuHour):
    table.objects.all().delete()
GpuSeries.objects.update(minutes_to=0, hours_to=0)
cards = list(Gpu.objects.filter(removed_at=None).order_by("host__name", "index"))
now, dice = int(time.time() * 1000), random.Random(0)
readings, load = [], list(shares)
for at in range(now - int(minutes * 60_000), now, int(every * 1000)):
    for n, card in enumerate(cards):
        share = shares[n % len(shares)]
        load[n % len(shares)] += 0.2 * (share - load[n % len(shares)]) + dice.gauss(0, 0.06 * (share > 0))
        busy = min(1.0, max(0.0, load[n % len(shares)]))
        total = card.memory_total_bytes or 24 * 2**30
        limit = card.reading.get("power_limit_watts") or 350
        used = card.reading.get("memory_used_bytes") or int(total * (0.02 + 0.8 * share))
        values = (int(1000 * busy), used, int(10 * (36 + 42 * busy)), int(10 * limit * (0.07 + 0.8 * busy)))
        readings.append(recorder.Sample(card.uuid, at, values))
for first in range(0, len(readings), 5000):
    recorder.write(readings[first : first + 5000])
while not rollups.roll_up(seconds=60):
    pass
"""


def live_through(system: System, minutes: float, shares: Sequence[float] = (0.6,), steps: int = 1500) -> None:
    """The last `minutes` of every card that the system knows; `shares`: how busy each was, from 0 to 1.

    It takes the place of what is there. Memory was used all the time as it is now.
    """
    every = max(1.0, math.ceil(minutes * 60 / steps))
    command = [sys.executable, "-c", SCRIPT, str(minutes), str(every), ",".join(map(str, shares))]
    env = system.env | {"DJANGO_SETTINGS_MODULE": "mistudio.settings"}
    subprocess.run(command, cwd=ROOT, env=env, check=True)

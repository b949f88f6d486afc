"""Claim: the agent and its reader take at most 3 % of a core for 8 cards, sampled every 2 s; 64 cards beside it.

    .venv/bin/python -m bench.agent_cpu [seconds]

A real `manage.py agent` at the real clock over the stand-in library, with a private broker and a SQLite file, and
a process listed on every card. Counted is the CPU time of the processes themselves (`utime + stime` of /proc), so
that other work on the machine hardly shows; the stand-in's own share is in the reader's. Needs gcc.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.stubs import driver
from tests.system import System

TICK = os.sysconf("SC_CLK_TCK")
WARM_SECONDS = 10


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        library = driver.build(Path(folder))
        for count in (8, 64):
            home = Path(folder) / str(count)
            home.mkdir()
            agent, reader = measured(home, library, count, seconds)
            print(
                f"{count:2} cards: agent {agent:.2f} %, reader {reader:.2f} %, both {agent + reader:.2f} % of a core"
            )


def measured(home: Path, library: Path, count: int, seconds: float) -> tuple[float, float]:
    """Percent of a core that agent and reader take."""
    cards = [
        driver.StandInCard(bus=f"00000000:{n + 1:02X}:00.0", processes=[("compute", os.getpid(), 1000)])
        for n in range(count)
    ]
    standin = driver.StandIn(home, library, cards)
    with System(home / "home", driver=standin, time_scale=1) as system:
        while len(system.cards()) < count:
            time.sleep(0.2)
        time.sleep(WARM_SECONDS)
        agent = system.pid("agent")
        (reader,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        before = cpu_seconds(agent), cpu_seconds(int(reader))
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        after = cpu_seconds(agent), cpu_seconds(int(reader))
    return tuple(100 * (b - a) / passed for a, b in zip(before, after, strict=True))  # type: ignore[return-value]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


if __name__ == "__main__":
    main()

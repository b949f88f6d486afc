"""Claim: from the answer of the submit to `running` it takes less than 0.5 s (p95), fork server warm.

    .venv/bin/python -m bench.job_start [jobs]

Starts a system of its own at the real clock and submits jobs of the rehearsal kind over REST, one after another,
in turn to three simulated cards. Printed are both spans that the job's row keeps (`queued_at` to `started_at`)
and what a client sees that asks every 20 ms, from before its POST on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.system import System


def one(system: System, number: int) -> tuple[float, float]:
    """Seconds by the row's own times, and by the client's clock."""
    began = time.monotonic()
    job = system.submit("rehearsal", steps=8, seconds_per_step=0.05, gpu=number % 3)
    while (found := system.job(job["id"]))["status"] in ("queued", "starting"):
        time.sleep(0.02)
    seen = time.monotonic() - began
    system.wait(job["id"])
    system.wait_for_free_cards()
    return moment(found["started_at"]) - moment(found["queued_at"]), seen


def moment(text: Any) -> float:
    return datetime.fromisoformat(str(text)).timestamp()


def told(name: str, values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=20)
    return f"{name}: p50 {statistics.median(values):.3f} s, p95 {cuts[18]:.3f} s, max {max(values):.3f} s"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with System(Path(tempfile.mkdtemp()) / "home", time_scale=1) as system:
        one(system, 0)  # the fork server's imports
        found = [one(system, number) for number in range(count)]
    print(f"{count} jobs, one after another, three simulated cards, time scale 1")
    print(told("submit to running, the row's times", [row for row, _ in found]))
    print(told("submit to running, as a client sees", [seen for _, seen in found]))


if __name__ == "__main__":
    main()

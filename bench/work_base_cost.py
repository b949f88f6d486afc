"""Claim: a work process takes no more than `jobs.estimates.WORK_BASE_BYTES` of private memory beside its kind's own.

    .venv/bin/python -m bench.work_base_cost

Runs a job that measures itself (`bench/kinds/base_cost.py`) on a system of its own, made by the fork server and
as a fresh process (`MISTUDIO_JOB_START`). Private means Private_Clean + Private_Dirty of `smaps_rollup`, as
simulated cards count: pages of libraries that another process maps as well are not in it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")
django.setup()

from jobs.estimates import WORK_BASE_BYTES  # noqa: E402
from tests.system import ROOT, System  # noqa: E402

TIMES = 3


def measured(mode: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    kinds = str(ROOT / "bench" / "kinds")
    home = Path(tempfile.mkdtemp()) / "home"
    with System(home, MISTUDIO_JOB_START=mode, MISTUDIO_KIND_PATHS=kinds) as system:
        for _ in range(TIMES):
            job = system.wait(system.submit("base_cost", gpu=0)["id"])
            assert job["status"] == "succeeded", job
            for moment, count in job["result"].items():
                found.setdefault(moment, []).append(count)
    return found


def main() -> None:
    print(f"private memory of a work in MiB, median of {TIMES}; the constant is {WORK_BASE_BYTES >> 20} MiB")
    for mode in ("fork", "spawn"):
        for moment, counts in measured(mode).items():
            print(f"{mode:6} {moment:30} {statistics.median(counts) / 2**20:6.1f}")


if __name__ == "__main__":
    main()

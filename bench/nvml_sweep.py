"""Claim: reading every value of eight cards costs at most twice what bare pynvml needs for the same calls.

    .venv/bin/python -m bench.nvml_sweep [rounds]

Over the stand-in library, whose answers cost next to nothing, so that what is measured is Python; a real driver takes
tens of microseconds and more for most of these calls. `four` is what most monitors ask of a card. Needs gcc.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.stubs import driver

CARDS = 8


def main() -> None:
    if "NVML_STANDIN" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            again(Path(folder))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    sweeps = {"four": four, "bare": bare, "ours": ours}
    made = {name: sweep() for name, sweep in sweeps.items()}
    took: dict[str, list[float]] = {name: [] for name in sweeps}
    for _ in range(rounds):
        for name in ("four", "bare", "ours", "bare", "four"):
            began = time.perf_counter()
            made[name]()
            took[name].append(1000 * (time.perf_counter() - began))
    medians = {name: statistics.median(times) for name, times in took.items()}
    for name, times in took.items():
        print(f"{name:5} {medians[name]:.2f} ms [{min(times):.2f}, {max(times):.2f}] for {CARDS} cards")
    print(
        f"ours / bare {medians['ours'] / medians['bare']:.2f}, ours / four {medians['ours'] / medians['four']:.2f}"
    )


def again(folder: Path) -> None:
    """This script once more, in a process that finds the stand-in as its driver."""
    import subprocess

    cards = [driver.StandInCard(bus=f"00000000:{n + 1:02X}:00.0") for n in range(CARDS)]
    standin = driver.StandIn(folder, driver.build(folder), cards)
    command = [sys.executable, "-m", "bench.nvml_sweep", *sys.argv[1:]]
    subprocess.run(command, check=True, env=os.environ | standin.environment)


def ours() -> Callable[[], object]:
    from gpus.backends.nvml import NvmlBackend

    backend = NvmlBackend()
    uuids = [card.uuid for card in backend.list_cards()]
    return lambda: [backend.read(uuid) for uuid in uuids]


def four() -> Callable[[], object]:
    import pynvml as nvml

    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(CARDS)]
    return lambda: [
        (
            nvml.nvmlDeviceGetUtilizationRates(h),
            nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2),
            nvml.nvmlDeviceGetTemperature(h, 0),
            nvml.nvmlDeviceGetPowerUsage(h),
        )
        for h in handles
    ]


def bare() -> Callable[[], object]:
    """The calls of `gpus.backends.nvml.reading`, one after another, without anything around them."""
    import pynvml as nvml

    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(CARDS)]

    def one(h: object) -> None:
        nvml.nvmlDeviceGetUtilizationRates(h)
        nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2)
        nvml.nvmlDeviceGetPerformanceState(h)
        nvml.nvmlDeviceGetTemperatureV(h, nvml.NVML_TEMPERATURE_GPU)
        nvml.nvmlDeviceGetTemperatureThreshold(h, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        nvml.nvmlDeviceGetPowerUsage(h)
        nvml.nvmlDeviceGetEnforcedPowerLimit(h)
        nvml.nvmlDeviceGetFanSpeed(h)
        nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)
        nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM)
        nvml.nvmlDeviceGetCurrentClocksEventReasons(h)
        nvml.nvmlDeviceGetTotalEccErrors(h, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(h)
        nvml.nvmlDeviceGetCurrPcieLinkWidth(h)

    return lambda: [one(h) for h in handles]


if __name__ == "__main__":
    main()

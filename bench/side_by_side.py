"""Two or more ways to do one thing, measured in turns: A-B-A-C-A, so that a machine that drifts drifts for all.

A value taken while others had more than 0.15 of a core is taken again, up to twice; what stays so is said beside it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: CPU cores that others may take before a figure is not ours alone.
QUIET_CORES = 0.15
#: The kernel counts in hundredths of a second, on two cores, at the beginning and the end.
TICKS = 4


@dataclass
class Sides:
    """What was measured: by side its values, and the cores that others took during each."""

    found: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)

    def median(self, side: str) -> float:
        return statistics.median(self.found[side])

    def ratio(self, side: str, other: str) -> float:
        return self.median(side) / self.median(other)

    def lines(self, unit: str) -> list[str]:
        width = max(map(len, self.found))
        return [
            f"{name:{width}} {self.median(name):9.0f}  [{min(values):.0f}, {max(values):.0f}] {unit}{self.load(name)}"
            for name, values in self.found.items()
        ]

    def load(self, side: str) -> str:
        """What is to be known of others, where it is."""
        loud = [cores for cores in self.others[side] if cores > QUIET_CORES]
        return (
            f"  ({len(loud)} of {len(self.others[side])} beside others, {max(loud):.2f} cores)"
            if loud
            else ""
        )


def in_turns(
    sides: dict[str, Callable[[], float]], rounds: int, *, first: str, once: Sequence[str] = ()
) -> Sides:
    """Values of `sides`, `first` before and after every other one; those named in `once` stand aside of that.

    A side measures itself: it returns its speed (or its time, which must be said in the unit).
    """
    seen = Sides({name: [] for name in sides}, {name: [] for name in sides})
    order = [*once, first]
    for name in sides:
        if name not in order:
            order += [name, first]
    for _ in range(rounds):
        for name in order:
            value, cores = quietest(sides[name])
            seen.found[name].append(value)
            seen.others[name].append(cores)
    return seen


def quietest(work: Callable[[], float], tries: int = 3) -> tuple[float, float]:
    """Once is enough where nobody else is at work; else the try that others disturbed least."""
    tried: list[tuple[float, float]] = []
    while len(tried) < tries:
        tried.append(beside_others(work))
        if tried[-1][1] <= QUIET_CORES:
            break
    return min(tried, key=lambda found: found[1])


def beside_others(work: Callable[[], float]) -> tuple[float, float]:
    """What `work` returns, and the cores that other processes (or the hypervisor) took while it ran."""
    machine, ours, began = busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    value = work()
    wall = time.perf_counter() - began
    taken = (busy_seconds() - machine) - (sum(os.times()[:4]) - ours)
    return value, max(0.0, taken - TICKS / os.sysconf("SC_CLK_TCK")) / wall


def busy_seconds() -> float:
    """CPU seconds of the whole machine that were not idle, stolen ones included; 0 where /proc/stat is not there."""
    try:
        with open("/proc/stat") as file:
            fields = [int(value) for value in file.readline().split()[1:9]]
    except OSError:
        return 0.0
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")

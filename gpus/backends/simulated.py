"""Cards for machines without a driver. Their size is a setting; their processes, memory and load are real.

A process holds a card while a file `run/cards/<uuid>/<pid>.<start ticks>` says so. The keeper of a job leaves it
(`hold`), for the work and for what the work executes. Memory is what those processes have for themselves
(`Private_Clean + Private_Dirty`, so that what a fork shares is not counted), utilization their share of the
machine's cores; temperature and power follow the load as those of a real card do, late.

Cost: one `smaps_rollup` per holding process and sample, 29 ms for a torch process of 1 GB (the kernel walks its
pages); `Memories` keeps that under 5 % of a core however large a process is and however often it is asked for.
"""

from __future__ import annotations

import math
import os
import time
import uuid as uuids
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpus.backends.base import CardLost
from gpus.procfs import Stat, name_of, private_bytes, resident_bytes, stat, user_of
from gpus.readings import CardInfo, CardReading, GpuProcess

NAMESPACE = uuids.UUID("6d697374-7564-696f-2067-707520636172")  # "mistudio gpu car"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: CPU time is counted in ticks of 10 ms: over less time than this, a share of it says nothing.
SHORTEST_SPAN_SECONDS = 0.15
AMBIENT_CELSIUS, FULL_LOAD_CELSIUS, HEAT_SECONDS = 32.0, 78.0, 20.0
IDLE_WATTS, FULL_LOAD_WATTS, POWER_LIMIT_WATTS, POWER_SECONDS = 18.0, 235.0, 250.0, 1.5
NOT_SIMULATED = "a simulated card has none"
UNSAID = (
    "utilization_memory_percent", "temperature_slowdown_celsius", "fan_percent", "clock_sm_mhz", "clock_memory_mhz",
    "performance_state", "ecc_errors_uncorrected", "pcie_generation", "pcie_width",
)  # fmt: skip
MISSING = dict.fromkeys(UNSAID, NOT_SIMULATED)


# Who holds a card -------------------------------------------------------------------------------------


def hold(uuid: str, pid: int, start: int) -> None:
    """From now on the process (pid, start ticks) is on this card."""
    path = _mark(uuid, pid, start)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)


def _mark(uuid: str, pid: int, start: int) -> Path:
    from django.conf import settings

    return cards_folder(settings.MISTUDIO_HOME) / uuid / f"{pid}.{start}"


def cards_folder(home: str | Path) -> Path:
    return Path(home) / "run" / "cards"


class Memories:
    """Private memory of processes, walked by the kernel only as often as 5 % of a core allows; in between the
    change of the resident size, which costs nothing, stands for the change of the private one."""

    WALK_SHARE = 0.05

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Walk] = {}

    def of(self, pid: int, start: int) -> int | None:
        last, now, resident = self.known.get((pid, start)), time.monotonic(), resident_bytes(pid)
        if last and resident is not None and now < last.valid_until:
            return max(0, last.private + resident - last.resident)
        private = private_bytes(pid)
        if private is not None and resident is not None:
            cost = time.monotonic() - now
            self.known[pid, start] = Walk(private, resident, now + cost / self.WALK_SHARE)
        return private

    def keep(self, processes: Iterable[tuple[int, int]]) -> None:
        """Forget all others."""
        self.known = {process: self.known[process] for process in processes if process in self.known}


@dataclass(frozen=True)
class Walk:
    private: int
    resident: int
    valid_until: float


# The backend ------------------------------------------------------------------------------------------


@dataclass
class Thermals:
    """A card's load, heat and power between two samples."""

    at: float = field(default_factory=time.monotonic)
    ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    load: float = 0.0  # 0 to 1
    celsius: float = AMBIENT_CELSIUS
    watts: float = IDLE_WATTS

    def update(self, ticks: dict[tuple[int, int], int]) -> None:
        """`ticks`: CPU time so far of each holding process. A new process counts from its first sample."""
        now = time.monotonic()
        span = now - self.at
        if span < SHORTEST_SPAN_SECONDS:
            return
        used = sum(count - self.ticks.get(process, count) for process, count in ticks.items())
        self.load = min(1.0, used / TICKS_PER_SECOND / span / (os.cpu_count() or 1))
        self.celsius = _approach(
            self.celsius, AMBIENT_CELSIUS, FULL_LOAD_CELSIUS, self.load, span / HEAT_SECONDS
        )
        self.watts = _approach(self.watts, IDLE_WATTS, FULL_LOAD_WATTS, self.load, span / POWER_SECONDS)
        self.at, self.ticks = now, ticks


def _approach(now: float, low: float, high: float, load: float, spans: float) -> float:
    """First-order lag towards the value of this load."""
    target = low + (high - low) * load
    return target + (now - target) * math.exp(-spans)


class SimulatedBackend:
    """The cards of `MISTUDIO_SIMULATED_GPUS`."""

    unreadable = 0

    def __init__(self, home: str | Path, host: str, sizes: list[int]) -> None:
        self.folder = cards_folder(home)
        self.cards = {
            card.uuid: card for card in (_card(host, index, size) for index, size in enumerate(sizes))
        }
        self.memories = {uuid: Memories() for uuid in self.cards}
        self.thermals = {uuid: Thermals() for uuid in self.cards}

    def list_cards(self) -> list[CardInfo]:
        return list(self.cards.values())

    def lookup(self, uuid: str) -> CardInfo | None:
        return self.cards.get(uuid)

    def read(self, uuid: str) -> CardReading:
        card = self._card(uuid)
        held = self._holders(uuid)
        total = card.memory_total_bytes or 0
        # A card cannot hold more than it has; what its processes really take stands in the process list.
        used = min(total, sum(self.memories[uuid].of(*process) or 0 for process in held))
        self.memories[uuid].keep(held)
        thermals = self.thermals[uuid]
        thermals.update({process: known.cpu_ticks for process, known in held.items()})
        return CardReading(
            utilization_gpu_percent=round(100 * thermals.load, 1),
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_free_bytes=total - used,
            memory_reserved_bytes=0,  # no driver takes a share: a lease is judged by its processes alone
            temperature_celsius=round(thermals.celsius, 1),
            power_draw_watts=round(thermals.watts, 1),
            power_limit_watts=POWER_LIMIT_WATTS,
            missing=dict(MISSING),
        )

    def processes(self, uuid: str) -> list[GpuProcess]:
        self._card(uuid)
        return [
            GpuProcess(
                pid, name_of(pid), user_of(pid), "compute", self.memories[uuid].of(pid, start), known.state
            )
            for (pid, start), known in self._holders(uuid).items()
        ]

    def _card(self, uuid: str) -> CardInfo:
        if uuid not in self.cards:
            raise CardLost(f"There is no simulated card {uuid}.")
        return self.cards[uuid]

    def _holders(self, uuid: str) -> dict[tuple[int, int], Stat]:
        """The living processes on this card; files of the others go."""
        held = {}
        for path in self._marks(uuid):
            pid, _, start = path.name.partition(".")
            if not (pid.isdigit() and start.isdigit()):
                continue
            known = stat(int(pid))
            if known is None or known.start != int(start) or known.state in "ZX":
                path.unlink(missing_ok=True)
            else:
                held[int(pid), int(start)] = known
        return held

    def _marks(self, uuid: str) -> list[Path]:
        try:
            return sorted((self.folder / uuid).iterdir())
        except FileNotFoundError:
            return []


def _card(host: str, index: int, size: int) -> CardInfo:
    return CardInfo(
        uuid=f"GPU-{uuids.uuid5(NAMESPACE, f'{host}/{index}')}",
        index=index,
        name=f"Simulated {size / 2**30:g} GiB",
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        memory_total_bytes=size,
        simulated=True,
    )

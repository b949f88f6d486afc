"""What a host says of itself, by psutil: CPU, memory, disks, disk and network rates.

Percent are 0 to 100 of the whole machine, rates are bytes per second between two samples (`None` at the first).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

Reading = dict[str, Any]


def boot_id() -> str:
    """Changes with every boot, so that a pid of yesterday is not taken for one of today."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def cpu() -> Reading:
    """Since the last call; `per_core` in the kernel's order."""
    per_core = psutil.cpu_percent(percpu=True)
    return {
        "percent": round(sum(per_core) / max(1, len(per_core)), 1),
        "per_core": per_core,
        "count": len(per_core),
        "load_average": list(os.getloadavg()),
    }


def memory() -> Reading:
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "total_bytes": ram.total,
        "used_bytes": ram.total - ram.available,
        "available_bytes": ram.available,
        "percent": ram.percent,
        "swap_total_bytes": swap.total,
        "swap_used_bytes": swap.used,
        "swap_percent": swap.percent if swap.total else None,
    }


def disks(folders: list[Path]) -> list[Reading]:
    """The file systems that hold these folders, each once. May hang on a dead network mount: call it aside."""
    found: dict[int, Reading] = {}
    for folder in folders:
        try:
            device, usage = os.stat(folder).st_dev, psutil.disk_usage(str(folder))
        except OSError:
            continue
        found.setdefault(device, _disk(mount_point(folder), usage))
    return list(found.values())


def _disk(mount: Path, usage: Any) -> Reading:
    return {
        "mount_point": str(mount),
        "total_bytes": usage.total,
        "used_bytes": usage.used,
        "free_bytes": usage.free,
        "percent": usage.percent,
    }


def mount_point(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if path.is_mount()), Path("/"))


class Rates:
    """Counters since boot as bytes per second between two calls."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[float, int]] = {}

    def of(self, name: str, counter: int | None) -> float | None:
        now = time.monotonic()
        before = self.last.get(name)
        if counter is None:
            return None
        self.last[name] = (now, counter)
        if before is None or counter < before[1] or now <= before[0]:
            return None
        return round((counter - before[1]) / (now - before[0]), 1)


class HostReader:
    """One host's readings; keeps what rates need between samples."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.rates = Rates()
        psutil.cpu_percent(percpu=True)  # the first call has no "since" and answers 0

    def read(self) -> Reading:
        """`cpu`, `memory`, `disk` (rates and `disks`) and `network`, as the channels of these names carry them."""
        return {"cpu": cpu(), "memory": memory(), "disk": self._disk(), "network": self._network()}

    def _disk(self) -> Reading:
        counters = _counters(psutil.disk_io_counters)
        return {
            "read_bytes_per_second": self.rates.of("read", getattr(counters, "read_bytes", None)),
            "write_bytes_per_second": self.rates.of("write", getattr(counters, "write_bytes", None)),
            "disks": disks(self.folders),
        }

    def _network(self) -> Reading:
        """All interfaces but the loopback."""
        cards = _counters(lambda: psutil.net_io_counters(pernic=True)) or {}
        real = [card for name, card in cards.items() if name != "lo"]
        return {
            "sent_bytes_per_second": self.rates.of("sent", sum(card.bytes_sent for card in real)),
            "received_bytes_per_second": self.rates.of("received", sum(card.bytes_recv for card in real)),
        }


def _counters(read: Any) -> Any:
    """`None` where the kernel does not tell (containers without /proc/diskstats)."""
    try:
        return read()
    except (OSError, RuntimeError, NotImplementedError):
        return None

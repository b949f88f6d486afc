"""A driver to test against: the stand-in library, compiled once per run, and the file that says what it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 3, 4, 9, 13
IS_LOST, VERSION_MISMATCH, UNKNOWN = 15, 18, 999
ATS = 2  # an addressing mode: the card uses the host's page tables


def compiler() -> str | None:
    return shutil.which("gcc")


def build(folder: Path) -> Path:
    """`libnvidia-ml.so.1` in this folder, which goes into LD_LIBRARY_PATH of the processes that shall find it."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler() or "gcc", *flags, "-o", library, SOURCE], check=True)
    return library


@dataclass
class StandInCard:
    """What one card says; sizes in MiB, power in milliwatts. With `instances`, MIG is on."""

    uuid: str = field(default_factory=lambda: f"GPU-{uuid.uuid4()}")
    bus: str = "00000000:01:00.0"
    total: int = 24576
    name: str = "NVIDIA GeForce RTX 3090"
    reserved: int = 256
    used: int = 2
    utilization: tuple[int, int] = (0, 0)
    temperature: tuple[int, int] = (40, 93)
    power: tuple[int, int] = (25000, 350000)
    processes: list[tuple[str, int, int]] = field(default_factory=list)  # list, pid, MiB (-1: not told)
    faults: dict[str, int] = field(default_factory=dict)
    hangs: dict[str, int] = field(default_factory=dict)
    addressing: int | None = None
    instances: dict[int, StandInInstance] | None = None  # by slot

    def lines(self) -> list[str]:
        lines = [
            f"card {self.uuid} {self.bus} {self.total} {self.name}",
            f"memory {self.reserved} {self.used}",
            "utilization {} {}".format(*self.utilization),
            "temperature {} {}".format(*self.temperature),
            "power {} {}".format(*self.power),
            *(f"{kind} {pid} {mib}" for kind, pid, mib in self.processes),
            *(f"fault {value} {code}" for value, code in self.faults.items()),
            *(f"hang {value} {seconds}" for value, seconds in self.hangs.items()),
        ]
        if self.addressing is not None:
            lines.append(f"addressing {self.addressing}")
        if self.instances is not None:
            lines.append("split 1")
            lines += [line for slot, part in self.instances.items() for line in part.lines(slot)]
        return lines


@dataclass
class StandInInstance:
    """What one MIG instance says; sizes in MiB."""

    uuid: str = field(default_factory=lambda: f"MIG-{uuid.uuid4()}")
    total: int = 20096
    name: str = "NVIDIA A100-PCIE-40GB MIG 3g.20gb"
    used: int = 12
    processes: list[tuple[str, int, int]] = field(default_factory=list)

    def lines(self, slot: int) -> list[str]:
        return [
            f"mig {slot} {slot + 1} 0 {self.uuid} {self.total} {self.name}",
            f"memory 0 {self.used}",
            *(f"{kind} {pid} {mib}" for kind, pid, mib in self.processes),
        ]


class StandIn:
    """The driver of one test. Change `cards`, `init` or `load`, then `write()`: the next call sees it."""

    def __init__(self, folder: Path, library: Path, cards: list[StandInCard]) -> None:
        self.file = folder / "driver"
        self.library = library
        self.cards = cards
        self.init, self.load = 0, 1
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STANDIN": str(self.file)}

    def write(self) -> None:
        lines = [f"init {self.init}", f"load {self.load}", "driver 580.65.06", "cuda 13000"]
        lines += [line for card in self.cards for line in card.lines()]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, self.file)

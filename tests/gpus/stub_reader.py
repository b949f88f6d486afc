"""A reader over a backend that misbehaves as the files in its home say: `hang-<uuid>`, `lost-<uuid>`, `die`, …"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpus import backends, reader
from gpus.backends.base import Backend, BackendUnavailable, CardLost
from gpus.backends.simulated import SimulatedBackend
from gpus.readings import CardInfo, CardReading, GpuProcess


class Stub(SimulatedBackend):
    def __init__(self, spec: backends.Spec) -> None:
        super().__init__(spec["home"], spec["host"], spec["sizes"])
        self.home = Path(spec["home"])

    def says(self, name: str) -> bool:
        return (self.home / name).exists()

    def list_cards(self) -> list[CardInfo]:
        if self.says("unavailable"):
            raise BackendUnavailable("The driver changed.", "Reboot.")
        if self.says("hang"):
            time.sleep(60)
        return [card for card in super().list_cards() if not self.says(f"gone-{card.uuid}")]

    def processes(self, uuid: str) -> list[GpuProcess]:
        if self.says("no-list"):
            raise PermissionError("insufficient permissions")
        return super().processes(uuid)

    def read(self, uuid: str) -> CardReading:
        if self.says(f"hang-{uuid}"):
            time.sleep(60)
        if self.says(f"lost-{uuid}"):
            raise CardLost("fallen off the bus")
        if self.says("die"):
            os._exit(3)
        if self.says("odd"):
            return CardReading(power_draw_watts=float("nan"))
        return super().read(uuid)


def make(spec: backends.Spec) -> Backend:
    return Stub(spec)


backends.make = make
reader.main()

"""The driver, its library and device files, each card, and whether PyTorch can use them.

Cards are asked through the agent's own readers, so that a driver that hangs costs the doctor seconds.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from django.conf import settings

from gpus import backends
from gpus.backends.base import BackendUnavailable, CardLost
from gpus.readers import CardHung, Readers, ReadFailed
from jobs.memory import gib
from mistudio.doctor import Finding, note, ok, wrong

#: A driver that nobody uses takes a second per card to start.
LIST_SECONDS = 30.0
TORCH_SECONDS = 120.0
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
FAILURES = (BackendUnavailable, CardLost, CardHung, ReadFailed)
#: Prints what CUDA says, as JSON; a process of its own, for it may hang, and holds memory on the card.
CUDA = """
import json, torch
print(json.dumps({"built": torch.version.cuda, "cards": torch.cuda.device_count() if torch.version.cuda else 0}))
"""


def cards() -> Iterator[Finding]:
    if settings.MISTUDIO_GPU_BACKEND == "simulated":
        yield note(
            "this data folder uses simulated cards: jobs run on the CPU",
            "MISTUDIO_GPU_BACKEND=nvml for real ones",
        )
    else:
        yield from driver()
    yield from asyncio.run(asked())


def driver() -> Iterator[Finding]:
    if KERNEL_MODULE.exists():
        yield ok(KERNEL_MODULE.read_text().splitlines()[0].removeprefix("NVRM version: ").strip())
    for path in sorted(glob("/dev/nvidia[0-9]*") + glob("/dev/nvidiactl")):
        if not os.access(path, os.R_OK | os.W_OK):
            yield wrong(
                f"this user may not open {path}",
                "Add the user to the file's group (often `video`), or repair its mode.",
            )


async def asked() -> list[Finding]:
    """What the backend lists, and what each card says."""
    readers = Readers(backends.spec())
    try:
        listed = await readers.call("list", seconds=LIST_SECONDS)
        found = [await card(readers, entry) for entry in listed["cards"]]
    except BackendUnavailable as error:
        return [without_driver(error)]
    except FAILURES as error:
        return [wrong(str(error), "`nvidia-smi` should hang or fail alike: reset the card, or reboot.")]
    finally:
        await readers.close()
    if listed["unreadable"]:
        found.append(
            wrong(
                f"{listed['unreadable']} more cards cannot be opened",
                "See dmesg for Xid errors, and `nvidia-smi`.",
            )
        )
    return found or [
        wrong("the driver lists no card", "`lspci | grep -i nvidia` shows whether one is in the machine.")
    ]


def without_driver(error: BackendUnavailable) -> Finding:
    """No card can be read: on a machine without any driver that is no fault."""
    if not backends.driver_present():
        return note(
            error.reason,
            f"Jobs run on the CPU, or on simulated cards (make demo). For real ones: {error.repair}",
        )
    return wrong(error.reason, error.repair)


async def card(readers: Readers, entry: dict[str, Any]) -> Finding:
    name = f"card {entry['index']}: {entry['name']}, {entry['uuid']}"
    try:
        reading = await readers.call("read", entry["uuid"])
        processes = await readers.call("processes", entry["uuid"])
    except FAILURES as error:
        return wrong(
            f"{name}: {error}",
            "`nvidia-smi -q` shows its state; it is shown as lost or stale until it answers.",
        )
    used = f"{gib(reading['memory_used_bytes'])} of {gib(reading['memory_total_bytes'])} used"
    says = f"{name}: {used}, {len(processes)} processes"
    if missing := sorted(reading["missing"]):
        return note(f"{says}; does not say {', '.join(missing)}")
    return ok(says)


def torch() -> Iterator[Finding]:
    version = importlib.metadata.version("torch")
    if settings.MISTUDIO_GPU_BACKEND == "simulated" or not backends.driver_present():
        yield ok(f"torch {version}; no real card is used here")
        return
    if settings.MISTUDIO_TORCH_DEVICE == "cpu":
        yield note(f"torch {version} computes on the CPU: MISTUDIO_TORCH_DEVICE=cpu")
        return
    yield cuda(version)


def cuda(version: str) -> Finding:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", CUDA], check=False, capture_output=True, text=True, timeout=TORCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return wrong(
            f"torch {version} did not answer within {TORCH_SECONDS:.0f} s", "`nvidia-smi` should hang alike."
        )
    if ran.returncode:
        return wrong(f"torch {version} cannot be loaded: {ran.stderr.strip().splitlines()[-1]}", "make setup")
    return judged(version, json.loads(ran.stdout))


def judged(version: str, said: dict[str, Any]) -> Finding:
    if said["built"] is None:
        return wrong(
            f"torch {version} is built without CUDA: no job can use a card",
            "Remove .venv and run `make setup` with PyPI's own index (its Linux wheel has CUDA).",
        )
    if not said["cards"]:
        return wrong(
            f"torch {version} (CUDA {said['built']}) sees no card",
            f"The driver must support CUDA {said['built']}: `nvidia-smi` shows the version at its top right.",
        )
    return ok(f"torch {version} (CUDA {said['built']}) sees {said['cards']} cards")

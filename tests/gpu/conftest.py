"""A whole miStudio on a real card; skipped, with the reason, where there is none or torch cannot use it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system import System

MIB = 2**20
#: What a card may keep after a job beside what it had before: pages that the driver gives back late.
SLACK_MIB = 64


def smi(fields: str) -> list[list[str]]:
    """What `nvidia-smi` says of each card, in its order."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [[value.strip() for value in line.split(",")] for line in printed.splitlines()]


@pytest.fixture(scope="session", autouse=True)
def a_card_that_torch_can_use() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver on this machine")
    from torch.version import cuda

    if cuda is None:
        pytest.skip("torch is the CPU build: install the CUDA build to run these")


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Real periods: memory comes back when the driver gives it back, whatever the tests' clock."""
    home = tmp_path_factory.mktemp("real")
    with System(
        home, time_scale=1.0, MISTUDIO_GPU_BACKEND="nvml", MISTUDIO_WATCHDOG_GRACE_SECONDS="10"
    ) as system:
        yield system


@pytest.fixture
def card(real: System) -> dict[str, Any]:
    """The first card, once nothing of ours is on it."""
    real.wait_for_free_cards()
    return real.cards()[0]


def used_mib(uuid: str) -> int:
    return next(int(used) for found, used in smi("uuid,memory.used") if found == uuid)


def back_to(uuid: str, baseline: int, seconds: float = 60) -> int:
    """MiB on the card once they are back at the baseline; fails when they do not come."""
    deadline = time.monotonic() + seconds
    while (used := used_mib(uuid)) > baseline + SLACK_MIB:
        assert time.monotonic() < deadline, f"{used} MiB are still used; before the job there were {baseline}"
        time.sleep(0.5)
    return used

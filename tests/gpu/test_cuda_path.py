"""On a real card: the UUID that the driver names is the one the work sees as `cuda:0`. One short script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.system import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine"),
]

SEEN = """
import django; django.setup()
from jobs import work
print(",".join(work._cuda_uuids()))
"""


def driver_uuids() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("position", [0, -1])
def test_it_sees_the_card_it_was_given_as_cuda_0(position: int) -> None:
    uuid = driver_uuids()[position]
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "DJANGO_SETTINGS_MODULE": "mistudio.settings",
    }
    ran = subprocess.run(
        [sys.executable, "-c", SEEN], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip().splitlines()[-1] == uuid

"""Estimates against peaks of real runs: a part of `bench.estimates`, one case of each kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
CASES = ("full to float16", "16 x 128", "2304 latents, 2048")


def test_no_job_takes_more_than_its_formula_says_nor_far_less(tmp_path: Path) -> None:
    environment = os.environ | {"MISTUDIO_HOME": str(tmp_path), "MISTUDIO_KIND_PATHS": ""}
    command = [sys.executable, "-m", "bench.estimates", *CASES]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^(\S.*?) +estimate .* ratio ([\d.]+),", ran.stdout, re.M))
    print(ran.stdout)
    assert len(found) == 4  # with and without the loss through the SAE
    assert all(1 <= float(ratio) <= 1.3 for ratio in found.values()), found

"""SAEs on a real card, beside the other trainers: `sae_race.py` in the environment of the benchmarks' peers."""

from __future__ import annotations

import subprocess

import pytest

from tests.system import ROOT

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv-peers: run `python3 scripts/setup.py --peers` to race the others"
)
def test_ours_is_first_to_the_same_sae_and_never_slower_than_the_dense_form() -> None:
    ran = subprocess.run(
        [PYTHON, "-m", "tests.gpu.sae_race"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-2000:]

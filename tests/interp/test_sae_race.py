"""The race of SAE trainers on a card, `tests/gpu/sae_race.py`, at a size that shows here that the script works."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.system import ROOT

PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def lines_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_without_a_card_the_race_says_so_and_ends_well() -> None:
    command, nobody = [sys.executable, "-m", "tests.gpu.sae_race"], {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=nobody)
    assert ran.returncode == 0, ran.stderr
    assert "No card" in ran.stdout


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-peers: run `python3 scripts/setup.py --peers`")
def test_the_race_runs_to_its_end_and_its_kernels_agree() -> None:
    """Who is first at this size means nothing; that all arrive, and that both gradients are the same, does."""
    command = [PYTHON, "-W", "ignore", "-m", "tests.gpu.sae_race", "--device", "cpu", "--tiny"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = lines_of(ran.stdout)
    [same] = [line["kept"] for line in found if "the sparse gradients" in line.get("claim", "")]
    assert same, ran.stdout
    goals = {line["goal"]: line["seconds_with_forward"] for line in found if "goal" in line}
    assert goals.keys() == {"FVU", "loss recovered"}, ran.stderr
    for times in goals.values():
        assert times.keys() == {"ours", "SAELens", "dictionary_learning"}

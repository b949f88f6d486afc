"""SAELens' own training classes from the same weights on the same batches: one step, and two hundred."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jobs.interp.sae.architectures import Aux, Weights
from jobs.interp.sae.options import NAMES
from tests.interp.dense_saes import D_SAE, pair, random_sae

ORACLE = Path(__file__).parents[2] / ".venv-oracle" / "bin" / "python"
STEPS, LR, SPARSITY = 200, 1e-3, 0.02
LAST_FOUR = torch.arange(D_SAE) >= 20
WEIGHTS = Weights(SPARSITY, LAST_FOUR, Aux(4, 1 / 32))

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(300)]


def as_theirs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named and oriented as SAELens has them."""
    named = {
        name.replace("encoder", "W_enc").replace("smallest_kept", "topk_threshold"): tensor.detach().float()
        for name, tensor in tensors.items()
    }
    named.pop("kept_steps", None)
    return {
        name: (tensor.T if name == "W_enc" else tensor).clone().contiguous() for name, tensor in named.items()
    }


def turning(gradient: Tensor, directions: Tensor) -> Tensor:
    """What remains without the part along each direction, of length 1. Shapes: `[d_sae, d]` thrice."""
    return gradient - (gradient * directions.detach()).sum(1, keepdim=True) * directions.detach()


def batches(sae: Any) -> tuple[Tensor, Tensor]:
    """Shapes: `[STEPS, 64, d_in]`, `[STEPS, 64, d_out]`."""
    pairs = [pair(sae, rows=64, seed=step) for step in range(STEPS)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """What they found, by architecture; one process for all."""
    if not ORACLE.exists():
        pytest.skip("no .venv-oracle with sae-lens")
    folder = tmp_path_factory.mktemp("saelens")
    for name in NAMES:
        sae = random_sae(name, torch.float32)
        x, y = batches(sae)
        facts = {"x": x, "y": y.clone(), "dead": LAST_FOUR, "unit": torch.tensor(sae.unit_norm)}
        save_file(as_theirs(sae.state_dict()) | facts, folder / f"{name}.in")
    program = Path(__file__).with_name("saelens_steps.py")
    done = subprocess.run([ORACLE, program, folder, *NAMES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: load_file(folder / f"{name}.out") for name in NAMES}


@pytest.mark.parametrize("architecture", NAMES)
def test_one_step_finds_the_same_loss_and_gradients(
    architecture: str, theirs: dict[str, dict[str, Tensor]]
) -> None:
    sae = random_sae(architecture, torch.float32)
    x, y = batches(sae)
    found = sae.backward(x[0], y[0] if not sae.centres else x[0], WEIGHTS)
    torch.testing.assert_close(found.loss, theirs[architecture]["loss"], atol=1e-5, rtol=1e-5)
    ours = as_theirs({name: weight.grad for name, weight in sae.named_parameters()})
    expected = {name: theirs[architecture][f"grad.{name}"] for name in ours}
    if sae.unit_norm:  # what would change lengths is taken away before the step
        for found_by in (ours, expected):
            found_by["W_dec"] = turning(found_by["W_dec"], sae.W_dec)
    for name, gradient in ours.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("architecture", NAMES)
def test_two_hundred_steps_end_at_the_same_weights(
    architecture: str, theirs: dict[str, dict[str, Tensor]]
) -> None:
    sae = random_sae(architecture, torch.float32)
    before = as_theirs(sae.state_dict())
    adam = torch.optim.Adam(sae.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8)
    for x, y in zip(*batches(sae), strict=True):
        sae.backward(x, x if sae.centres else y, WEIGHTS)
        sae.project()
        adam.step()
        sae.after_step()
    for name, weight in as_theirs(sae.state_dict()).items():
        expected = (
            theirs[architecture][name].clamp(min=0) if name == "threshold" else theirs[architecture][name]
        )
        assert (weight - before[name]).abs().max() > 0.01, name  # it went somewhere
        torch.testing.assert_close(weight, expected, atol=1e-3, rtol=0, msg=lambda m, n=name: f"{n}: {m}")

"""A step of every architecture on a real card: the CPU's gradients, and the same bits every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jobs.interp.sae import support
from jobs.interp.sae.architectures import Aux, Options, Weights, begin
from jobs.interp.sae.options import NAMES, TRANSCODERS

pytestmark = pytest.mark.gpu
DEVICE, D_IN, D_SAE, ROWS = "cuda", 64, 1024, 512


def vectors(d: int, purpose: int) -> Tensor:
    return torch.randn(ROWS, d, generator=torch.Generator().manual_seed(purpose)) + 0.5


def step(architecture: str, device: str) -> dict[str, Tensor]:
    """Loss, firings and gradients of one step from the beginning, on the CPU afterwards."""
    x = vectors(D_IN, 0)
    y = vectors(48, 1) if architecture in TRANSCODERS else x
    options = Options(architecture, k=8, target_l0=8)
    sae: Any = begin(options, D_IN, y.shape[1], D_SAE, seed=0, sample=x, target=y).to(device)
    dead = torch.arange(D_SAE, device=device) >= 900
    there = x.to(device)
    target = there if y is x else y.to(device)
    found = sae.backward(there, target, Weights(0.1, dead, Aux(32, 1 / 32)))
    grads = {name: weight.grad for name, weight in sae.named_parameters()}
    everything = {"loss": found.loss, "firings": found.firings, "error": found.error} | grads
    return {name: tensor.cpu() for name, tensor in everything.items()}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["all places", "live places"])
@pytest.mark.parametrize("architecture", NAMES)
def test_a_card_finds_what_the_cpu_finds(
    architecture: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "SPARSE_BELOW", share)
    ours, theirs, again = step(architecture, DEVICE), step(architecture, "cpu"), step(architecture, DEVICE)
    assert (ours["firings"] - theirs["firings"]).abs().sum() <= 4  # two values nearly equal may change places
    for name, tensor in ours.items():
        assert torch.equal(tensor, again[name]), name
        if name != "firings":
            assert (tensor - theirs[name]).norm() <= 1e-3 * theirs[name].norm(), name

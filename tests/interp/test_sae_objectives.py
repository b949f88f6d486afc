"""Every architecture's written-out gradients against autograd on its definition, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from jobs.interp.sae import support
from jobs.interp.sae.architectures import Aux, Weights
from jobs.interp.sae.options import NAMES
from tests.interp.dense_saes import D_SAE, dense_terms, pair, random_sae

LAST_FOUR = torch.arange(D_SAE) >= 20


def grads(sae: Any) -> dict[str, Any]:
    return {name: weight.grad for name, weight in sae.named_parameters()}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["all places", "live places"])
@pytest.mark.parametrize("architecture", NAMES)
def test_gradients_equal_autograd_on_the_definition(
    architecture: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "SPARSE_BELOW", share)
    ours = random_sae(architecture)
    theirs = copy.deepcopy(ours)
    x, y = pair(ours)
    weights = Weights(0.7, LAST_FOUR, Aux(k=3, coefficient=0.5))
    found, terms = ours.backward(x, y, weights), dense_terms(theirs, x, y, weights)
    loss = sum(terms.values())
    loss.backward()
    assert found.parts.keys() == terms.keys()
    for name, term in terms.items():
        torch.testing.assert_close(found.parts[name], term.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found.loss, loss.detach(), atol=1e-9, rtol=1e-9)
    for name, gradient in grads(ours).items():
        assert gradient.abs().max() > 1e-3, name  # or the comparison would say nothing
        torch.testing.assert_close(gradient, grads(theirs)[name], atol=1e-9, rtol=1e-9)

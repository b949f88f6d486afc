"""Every architecture's written-out gradients against autograd on its definition, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from jobs.interp.sae import support
from jobs.interp.sae.architectures import Aux, Weights, begin
from jobs.interp.sae.options import NAMES, TRANSCODERS, WITH_K
from tests.interp.dense_saes import D_IN, D_OUT, D_SAE, dense_terms, options, pair, random_sae

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


@pytest.mark.parametrize("architecture", WITH_K)
def test_the_auxiliary_loss_reaches_dead_latents_and_no_others_f15_f16(architecture: str) -> None:
    """Its own gradient, as the difference of on and off; k is min(8 / 2, 4 dead) = 4 and its weight min(1, 4 / 4)."""
    on, off = quiet(architecture), quiet(architecture)
    x, y = pair(on)
    found = on.backward(x, y, Weights(0.0, LAST_FOUR, Aux(k=4, coefficient=1.0)))
    off.backward(x, y, Weights(0.0, LAST_FOUR))
    for name in ("W_dec", "encoder", "b_enc"):
        assert torch.equal(grads(on)[name][:20], grads(off)[name][:20])
    assert (grads(on)["W_dec"][20:].norm(dim=1) > 0).all()
    assert grads(off)["W_dec"][20:].abs().max() == 0
    revived = on.b_enc[20:] @ on.W_dec[20:]  # without b_dec; the quiet latents say the same for every token
    expected = (revived + found.error).square().sum(1).mean()
    torch.testing.assert_close(found.parts["auxiliary"], expected.detach())


def quiet(architecture: str) -> Any:
    """Latents 20 to 23 given small positive pre-activations that are never selected."""
    sae = random_sae(architecture)
    with torch.no_grad():
        sae.encoder[20:] = 0
        sae.b_enc[20:] = torch.tensor([0.01, 0.02, 0.03, 0.04])
        sae.b_enc[:20] += 10
    return sae


@pytest.mark.parametrize("architecture", WITH_K)
def test_the_auxiliary_weight_counts_once_f17(architecture: str) -> None:
    """Total loss minus reconstruction doubles exactly from 1/32 to 1/16."""
    found = []
    for coefficient in (1 / 32, 1 / 16):
        sae = random_sae(architecture)
        step = sae.backward(*pair(sae), Weights(0.0, LAST_FOUR, Aux(4, coefficient)))
        rest = sum(value for name, value in step.parts.items() if name != "auxiliary")
        torch.testing.assert_close(step.loss - rest, step.parts["auxiliary"], atol=1e-12, rtol=1e-12)
        found.append(step.parts["auxiliary"])
    assert found[1] == 2 * found[0] > 0


def test_jumprelu_thresholds_move_in_half_precision_f13() -> None:
    """200 Adam steps of 7e-5 from 1.1, gradient -1: 0.014 in float32, 0.0016 in bfloat16."""
    sae = random_sae("jumprelu", torch.float32).bfloat16()
    assert (sae.encoder.dtype, sae.threshold.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        sae.threshold.fill_(1.1)
    adam = torch.optim.Adam([sae.threshold], lr=7e-5)
    for _ in range(200):
        sae.threshold.grad = torch.full_like(sae.threshold, -1.0)
        adam.step()
        sae.after_step()
    torch.testing.assert_close(sae.threshold - 1.1, torch.full((D_SAE,), 0.014), atol=0.0007, rtol=0)


def test_jumprelu_thresholds_stay_at_or_above_zero_f13() -> None:
    sae = random_sae("jumprelu")
    with torch.no_grad():
        sae.threshold.sub_(1)
    sae.after_step()
    assert sae.threshold.min() == 0


def test_precise_weights_keep_what_they_were_when_the_rest_is_rounded_f13() -> None:
    sae = random_sae("jumprelu", torch.float32)
    before = sae.threshold.detach().clone()
    assert torch.equal(sae.bfloat16().threshold, before)


@pytest.mark.parametrize("architecture", NAMES)
def test_a_bf16_autocast_changes_no_step_f14(architecture: str) -> None:
    """20 steps within autocast, no scaler: all of them taken, finite, and the same as without."""
    within = trained(architecture, 20, autocast=True)
    without = trained(architecture, 20)
    for name, weight in within.named_parameters():
        assert weight.isfinite().all()
        assert torch.equal(weight, dict(without.named_parameters())[name])


@pytest.mark.parametrize("architecture", NAMES)
def test_two_runs_end_with_the_same_bits(architecture: str) -> None:
    one, other = trained(architecture, 10).state_dict(), trained(architecture, 10).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("architecture", NAMES)
def test_steps_lower_the_loss_and_keep_what_has_to_hold_f27(architecture: str) -> None:
    """Unit directions, not unit input axes; thresholds not negative; biases moved as well."""
    losses: list[float] = []
    sae = trained(architecture, 60, losses)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    if sae.unit_norm:
        torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(D_SAE), atol=1e-5, rtol=0)
        assert (sae.W_dec.norm(dim=0) - 1).abs().min() > 0.1
    if architecture == "skip_transcoder":
        assert sae.W_skip.abs().max() > 0.01


def trained(
    architecture: str, steps: int, losses: list[float] | None = None, *, autocast: bool = False
) -> Any:
    """From its beginning on, with Adam, on data that few directions explain; a transcoder's target is another site."""
    d_out = D_OUT if architecture in TRANSCODERS else D_IN
    draw = torch.Generator().manual_seed(0)
    directions, elsewhere = torch.randn(12, D_IN, generator=draw), torch.randn(12, d_out, generator=draw)
    strengths = torch.rand(64 * (steps + 4), 12, generator=draw) * (
        torch.rand(64 * (steps + 4), 12, generator=draw) < 0.2
    )
    x = strengths @ directions + 0.3
    y = x if architecture not in TRANSCODERS else strengths @ elsewhere - 0.5
    sae: Any = begin(options(architecture), D_IN, d_out, D_SAE, seed=0, sample=x[:256], target=y[:256])
    adam = torch.optim.Adam(sae.parameters(), lr=1e-2)
    for first in range(256, len(x), 64):
        part = slice(first, first + 64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = sae.backward(
                x[part], x[part] if y is x else y[part], Weights(0.02, LAST_FOUR, Aux(4, 1 / 32))
            )
        sae.project()
        adam.step()
        sae.after_step()
        if losses is not None:
            losses.append(found.loss.item())
    return sae


def test_step_counts_live_latents_and_firings() -> None:
    for architecture in NAMES:
        sae = random_sae(architecture)
        x, y = pair(sae)
        acts = sae.encode(x)
        found = sae.backward(x, y, Weights(0.1, LAST_FOUR))
        assert found.firings.tolist() == (acts > 0).sum(0).tolist(), architecture
        assert found.live == (acts > 0).sum()
        torch.testing.assert_close(found.error, sae(x) - y)


@pytest.mark.parametrize("architecture", NAMES)
def test_a_batch_on_which_nothing_is_live_moves_the_decoder_bias_only(architecture: str) -> None:
    sae = random_sae(architecture)
    with torch.no_grad():
        sae.bias.fill_(-1e3)
    x, y = pair(sae)
    found = sae.backward(x, y, Weights(0.1, torch.zeros(D_SAE, dtype=torch.bool)))
    assert found.live == 0
    if architecture == "skip_transcoder":
        y = y - x @ sae.W_skip.T
    torch.testing.assert_close(found.parts["reconstruction"], (sae.b_dec - y).square().sum(1).mean())
    prefixes = len(getattr(sae, "prefixes", "1"))  # each of them reconstructs
    torch.testing.assert_close(sae.b_dec.grad, 2 * prefixes * (sae.b_dec - y).mean(0))
    assert sae.W_dec.grad.abs().max() == sae.encoder.grad.abs().max() == 0

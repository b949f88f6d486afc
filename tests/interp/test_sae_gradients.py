"""The written-out gradients against autograd on the dense form, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jobs.interp.sae.architectures import Aux, Options, Step, TopK, Weights
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.sparse import ByLatent, Code, products, weighted_rows
from tests.interp.conftest import s8

OFF = Aux(k=4, coefficient=0.0)
NOBODY = torch.zeros(24, dtype=torch.bool)
LAST_FOUR = torch.arange(24) >= 20


def dense_loss(sae: TopK, x: Tensor, dead: Tensor, aux: Aux) -> Tensor:
    """The loss from its definition, with every latent of every token, for autograd."""
    pre = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    top = pre.topk(sae.k, dim=1)
    acts = torch.zeros_like(pre).scatter(1, top.indices, top.values.relu())
    x_hat = acts @ sae.W_dec + sae.b_dec
    loss = (x_hat - x).square().sum(1).mean()
    if dead.any() and aux.coefficient:
        among = pre.masked_fill(~dead, -torch.inf).topk(min(aux.k, int(dead.sum())), dim=1)
        revived = torch.zeros_like(pre).scatter(1, among.indices, among.values)
        left = (x - x_hat).detach()
        scale = min(1.0, dead.sum().item() / aux.k)
        loss = loss + aux.coefficient * scale * (revived @ sae.W_dec - left).square().sum(1).mean()
    return loss


def backward(sae: TopK, x: Tensor, dead: Tensor, aux: Aux) -> Step:
    return sae.backward(x, x, Weights(0.0, dead, aux))


def gradients(sae: TopK) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in sae.named_parameters() if weight.grad is not None}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dead", "aux"),
    [
        (NOBODY, OFF),
        (LAST_FOUR, Aux(k=4, coefficient=1 / 32)),
        (torch.arange(24) >= 22, Aux(k=4, coefficient=1.0)),  # fewer dead than aux_k: scaled down
        (torch.arange(24) >= 6, Aux(k=4, coefficient=0.5)),  # more dead than aux_k: the strongest of them
        (torch.arange(24) % 2 == 0, Aux(k=3, coefficient=2.0)),  # dead ones among the live of this batch
    ],
)
def test_gradients_equal_autograd_on_the_dense_form(x: Tensor, dead: Tensor, aux: Aux) -> None:
    ours, theirs = s8(torch.float64), s8(torch.float64)
    found = backward(ours, x, dead, aux)
    loss = dense_loss(theirs, x, dead, aux)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach(), atol=1e-12, rtol=1e-12)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, gradients(theirs)[name], atol=1e-12, rtol=1e-10)


def test_selected_latents_below_zero_take_no_gradient(x: Tensor) -> None:
    """With most of what is encoded negative, the four largest of a token include some that ReLU ends."""
    ours, theirs = s8(torch.float64), s8(torch.float64)
    with torch.no_grad():
        ours.b_enc.sub_(5)
        theirs.b_enc.sub_(5)
    found = backward(ours, x, NOBODY, OFF)
    assert 0 < found.live < 4 * len(x)
    dense_loss(theirs, x, NOBODY, OFF).backward()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, gradients(theirs)[name], atol=1e-12, rtol=1e-10)


def test_gradients_equal_autograd_in_float32(X32: Tensor) -> None:
    ours, theirs, aux = s8(), s8(), Aux(k=4, coefficient=1 / 32)
    backward(ours, X32, LAST_FOUR, aux)
    dense_loss(theirs, X32, LAST_FOUR, aux).backward()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, gradients(theirs)[name], atol=1e-4, rtol=1e-5)


def with_quiet_latents() -> TopK:
    """S8 with latents 20 to 23 given small positive pre-activations that never reach the top 4."""
    sae = s8(torch.float64)
    with torch.no_grad():
        sae.encoder[20:] = 0
        sae.b_enc[20:] = torch.tensor([0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
        sae.b_enc[:20] += 10
    return sae


def test_the_auxiliary_loss_reaches_the_dead_latents_f15(x: Tensor) -> None:
    on, off = with_quiet_latents(), with_quiet_latents()
    backward(on, x, LAST_FOUR, Aux(k=4, coefficient=1 / 32))
    backward(off, x, LAST_FOUR, OFF)
    assert (gradients(on)["W_dec"][20:].norm(dim=1) > 0).all()
    assert gradients(off)["W_dec"][20:].abs().max() == 0


def test_the_auxiliary_loss_moves_dead_latents_only_f16(x: Tensor) -> None:
    """Its own gradient, as the difference of on and off: nothing on live latents."""
    on, off = with_quiet_latents(), with_quiet_latents()
    backward(on, x, LAST_FOUR, Aux(k=4, coefficient=1.0))
    backward(off, x, LAST_FOUR, OFF)
    for name in ("W_dec", "encoder", "b_enc"):
        assert torch.equal(gradients(on)[name][:20], gradients(off)[name][:20])


def test_the_auxiliary_reconstruction_has_no_decoder_bias_f16(x: Tensor) -> None:
    sae = with_quiet_latents()
    found = backward(sae, x, LAST_FOUR, Aux(k=4, coefficient=1.0))
    with torch.no_grad():
        left = x - sae(x)
        revived = sae.b_enc[20:] @ sae.W_dec[20:]  # the quiet latents say the same for every token
        expected = (revived - left).square().sum(1).mean()
    torch.testing.assert_close(found.parts["auxiliary"], expected)


def test_the_auxiliary_loss_takes_half_the_width_of_the_input_f16() -> None:
    """k is min(8 / 2, 4 dead) = 4, whatever the number of latents; all four of them at their full weight."""
    options = Options("topk", k=4)
    aux = Settings(d_sae=24, options=options, tokens=32).aux(8)
    assert (aux.k, aux.coefficient) == (4, 1 / 32)
    assert Settings(d_sae=4608, options=options, tokens=32).aux(576).k == 288
    assert Settings(d_sae=24, options=options, tokens=32, aux_k=0).aux(8).k == 0
    assert Settings(d_sae=24, options=Options("gated"), tokens=32).aux(8).k == 0


def test_projection_leaves_what_turns_the_directions(x: Tensor) -> None:
    sae = s8(torch.float64)
    sae.normalise_decoder()
    backward(sae, x, NOBODY, OFF)
    sae.project()
    assert (gradients(sae)["W_dec"] * sae.W_dec).sum(1).abs().max() < 1e-10
    assert gradients(sae)["W_dec"].abs().max() > 0.01


def test_sparse_products_equal_dense_ones() -> None:
    torch.manual_seed(0)
    values, indexes = torch.rand(6, 3), torch.stack([torch.randperm(10)[:3] for _ in range(6)])
    code, weight, vectors = Code.of(values, indexes, 10), torch.randn(10, 4), torch.randn(6, 4)
    torch.testing.assert_close(weighted_rows(code, weight), code.dense() @ weight)
    dots = (vectors @ weight.T)[code.tokens, code.indexes]
    torch.testing.assert_close(products(code, vectors, weight), dots)
    torch.testing.assert_close(ByLatent(code).sums(code.values, vectors), code.dense().T @ vectors)


def test_firings_count_positive_values_only() -> None:
    code = Code.of(torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[4, 1], [4, 0]]), 5)
    assert code.firings().tolist() == [1, 0, 0, 0, 2]

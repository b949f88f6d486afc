"""Each architecture's loss from its definition, with every latent of every token, for autograd to differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jobs.interp.sae.architectures import SAE, Options, Weights, shaped
from jobs.interp.sae.options import NAMES, TRANSCODERS

D_IN, D_OUT, D_SAE, K = 8, 6, 24, 4
PREFIXES = (6, 12, 24)


def options(architecture: str) -> Options:
    return Options(architecture, k=K, bandwidth=0.5, target_l0=4, widths=PREFIXES)


def random_sae(architecture: str, dtype: torch.dtype = torch.float64) -> Any:
    """Width 8 (a transcoder's target 6), latents 24, k 4; all weights and biases random and non-zero."""
    d_out = D_OUT if architecture in TRANSCODERS else D_IN
    sae = shaped(options(architecture), D_IN, d_out, D_SAE).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sae.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64))
            if name in ("threshold", "r_mag"):
                weight.abs_().mul_(0.3)
        if sae.unit_norm:
            sae.normalise_decoder()
    return sae


def pair(sae: SAE, rows: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """An input and what it is to become, for an autoencoder itself."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, sae.d_in, generator=draw, dtype=torch.float64).to(sae.encoder.dtype)
    if sae.centres:
        return x, x
    return x, torch.randn(rows, sae.d_out, generator=draw, dtype=torch.float64).to(sae.encoder.dtype)


class Jump(torch.autograd.Function):
    """1 where u > threshold; to the threshold the gradient of a rectangle, to u none."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, threshold: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(u, threshold)
        ctx.width = width
        return (u > threshold).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        u, threshold = ctx.saved_tensors
        inside = ((u - threshold) / ctx.width).abs() < 0.5
        return None, -(inside * grad).sum(0) / ctx.width, None


def _mse(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().sum(1).mean()


def _topk(sae: Any, x: Tensor, y: Tensor, weights: Weights) -> dict[str, Tensor]:
    pre = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    if sae.architecture == "topk":
        chosen = pre.topk(sae.k, dim=1)
        acts = torch.zeros_like(pre).scatter(1, chosen.indices, chosen.values.relu())
    else:
        flat = pre.relu().flatten()
        chosen = flat.topk(int(sae.k * len(x)))
        acts = torch.zeros_like(flat).scatter(0, chosen.indices, chosen.values).reshape(pre.shape)
    terms = {}
    for width in sae.prefixes[:-1]:
        terms[f"inner_{width}"] = _mse(acts[:, :width] @ sae.W_dec[:width] + sae.b_dec, y)
    y_hat = acts @ sae.W_dec + sae.b_dec
    terms["reconstruction"] = _mse(y_hat, y)
    dead, aux = weights.dead, weights.aux
    terms["auxiliary"] = y.new_zeros(())
    if dead.any() and aux.coefficient:
        among = pre.masked_fill(~dead, -torch.inf).topk(min(aux.k, int(dead.sum())), dim=1)
        revived = torch.zeros_like(pre).scatter(1, among.indices, among.values)
        scale = aux.coefficient * min(1.0, dead.sum().item() / aux.k)
        terms["auxiliary"] = scale * _mse(revived @ sae.W_dec, (y - y_hat).detach())
    return terms


def _relu(sae: Any, x: Tensor, y: Tensor, weights: Weights) -> dict[str, Tensor]:
    centred = x - sae.b_dec if sae.architecture == "standard" else x
    acts = (centred @ sae.W_enc + sae.b_enc).relu()
    y_hat = acts @ sae.W_dec + sae.b_dec
    if sae.architecture == "skip_transcoder":
        y_hat = y_hat + x @ sae.W_skip.T
    sparsity = weights.sparsity * (acts * sae.W_dec.norm(dim=1)).sum(1).mean()
    return {"reconstruction": _mse(y_hat, y), "sparsity": sparsity}


def _jumprelu(sae: Any, x: Tensor, y: Tensor, weights: Weights) -> dict[str, Tensor]:
    u = (x - sae.b_dec) @ sae.W_enc + sae.b_enc
    open_ = Jump.apply(u, sae.threshold, sae.bandwidth)  # type: ignore[no-untyped-call]
    # d (u * open) / d threshold is -u / width; the paper takes the threshold itself for u, which is near it
    through = u * open_.detach() + sae.threshold * (open_ - open_.detach())
    terms = {"reconstruction": _mse(through @ sae.W_dec + sae.b_dec, y)}
    return terms | {"sparsity": weights.sparsity * open_.sum(1).mean()}


def _gated(sae: Any, x: Tensor, y: Tensor, weights: Weights) -> dict[str, Tensor]:
    p = (x - sae.b_dec) @ sae.W_enc
    gate, magnitude = p + sae.b_gate, p * sae.r_mag.exp() + sae.b_mag
    y_hat = (magnitude.relu() * (gate > 0)) @ sae.W_dec + sae.b_dec
    by_gate = gate.relu() @ sae.W_dec.detach() + sae.b_dec.detach()
    return {
        "reconstruction": _mse(y_hat, y),
        "sparsity": weights.sparsity * gate.relu().sum(1).mean(),
        "auxiliary": _mse(by_gate, y),
    }


TERMS = {name: _topk for name in NAMES if "topk" in name} | {
    "standard": _relu,
    "transcoder": _relu,
    "skip_transcoder": _relu,
    "jumprelu": _jumprelu,
    "gated": _gated,
}


def dense_terms(sae: Any, x: Tensor, y: Tensor, weights: Weights) -> dict[str, Tensor]:
    return TERMS[sae.architecture](sae, x, y, weights)

"""Which latents are live and how strongly, by two paths with one encoder. Rajamanoharan et al. 2024 (arXiv 2404.16014).

    p            = (x - b_dec) @ W_enc
    gate         = p + b_gate;   magnitude = p * exp(r_mag) + b_mag
    feature_acts = ReLU(magnitude) where gate > 0, else 0
    loss = mean over tokens of |x_hat - x|^2
         + l1 * mean over tokens of sum of ReLU(gate)
         + mean over tokens of |ReLU(gate) @ W_dec + b_dec - x|^2        with W_dec and b_dec held constant there

The last term makes gates mean something, and gives the decoder nothing, so that it serves the magnitudes alone.
(SAELens lets it reach the decoder.) `b_dec` in the encoder's input is part of the gate and does get its share.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from jobs.interp.sae.architectures.base import SAE, Step, Weights, sum_of
from jobs.interp.sae.support import Support, masked_, supported


class Gated(SAE):
    """`b_gate`, `b_mag`, `r_mag`: [d_sae]; there is no `b_enc`."""

    architecture = "gated"

    def __init__(self, d_in: int, d_sae: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(d_in, d_sae, dtype=dtype)
        for name in ("b_gate", "b_mag", "r_mag"):
            self.register_parameter(name, nn.Parameter(torch.zeros(d_sae, dtype=dtype)))

    b_gate: nn.Parameter
    b_mag: nn.Parameter
    r_mag: nn.Parameter

    @property
    def bias(self) -> Tensor:
        return self.b_gate

    def _paths(self, x: Tensor) -> tuple[Support, Tensor, Tensor]:
        """Where gates are open; p and feature_acts there."""
        support = supported(self.pre_acts(x), 0)
        p = support.values - support.per_latent(self.b_gate)
        magnitude = p * support.per_latent(self.r_mag.exp()) + support.per_latent(self.b_mag)
        return support, p, magnitude.relu() * (support.values > 0)

    def active(self, x: Tensor) -> tuple[Support, Tensor]:
        support, _, acts = self._paths(x)
        return support, acts

    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        share, centred, stretch = weights.sparsity / len(x), self.centred(x), self.r_mag.exp()
        support, p, acts = self._paths(x)
        gates = support.values.relu_()
        error = support.rows(acts, self.W_dec).add_(self.b_dec).sub_(target)
        gate_error = support.rows(gates, self.W_dec).add_(self.b_dec).sub_(target)
        slope = error * (2 / len(x))  # d loss / d x_hat
        self.W_dec.grad = support.sums(acts, slope)
        rising = masked_(support.products(slope, self.W_dec), acts)  # d loss / d magnitude
        firings = support.counts(acts > 0)
        del acts
        self.b_mag.grad = support.totals(rising)
        self.r_mag.grad = support.totals(p.mul_(rising)) * stretch
        del p
        gate_totals = support.totals(gates)
        opening = support.products(gate_error * (2 / len(x)), self.W_dec, torch.full_like(stretch, share))
        masked_(opening, gates)  # d loss / d gate
        self.b_gate.grad = support.totals(opening)
        opening.add_(rising.mul_(support.per_latent(stretch)))  # d loss / d p
        self.encoder.grad = support.sums(opening, centred)
        self.b_dec.grad = slope.sum(0) - (self.b_gate.grad + self.b_mag.grad * stretch) @ self.encoder
        parts = {
            "reconstruction": error.square().sum(1).mean(),
            "sparsity": gate_totals.sum() * share,
            "auxiliary": gate_error.square().sum(1).mean(),
        }
        return Step(sum_of(parts), parts, error, firings)

    def blank(self) -> Self:
        like = self.encoder
        return type(self)(self.d_in, self.d_sae, dtype=like.dtype).to(like.device)

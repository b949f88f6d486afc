"""A threshold for each latent, learned through its jump. Rajamanoharan et al. 2024 (arXiv 2407.14435).

    feature_acts = u where u > threshold, else 0;   u = (x - b_dec) @ W_enc + b_enc
    loss = mean over tokens of |x_hat - x|^2 + l0 * mean over tokens of the number of live latents

The jump has no gradient, so the threshold is given that of a rectangle of width `bandwidth` and area 1 around it:
d feature_act / d threshold = -threshold / bandwidth and d live / d threshold = -1 / bandwidth within it. As in SAELens
the encoder gets none of this, and the threshold itself is learned, not its logarithm, which Adam would hardly move.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from jobs.interp.sae.architectures.base import SAE, Step, Weights, sum_of
from jobs.interp.sae.options import Options
from jobs.interp.sae.support import Support, supported

#: Rows of the sample that thresholds are fitted to, and latents at once.
CALIBRATION_ROWS, CALIBRATION_LATENTS = 4096, 1024


class JumpReLU(SAE):
    """`threshold [d_sae]`: float32 whatever the weights are, never below 0."""

    architecture = "jumprelu"
    precise = ("threshold",)

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        bandwidth: float = Options.bandwidth,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(d_in, d_sae, dtype=dtype)
        self.bandwidth = bandwidth
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))
        self.threshold = nn.Parameter(torch.zeros(d_sae, dtype=torch.promote_types(dtype, torch.float32)))

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, bandwidth=options.bandwidth)

    @torch.no_grad()
    def initialise(self, seed: int, sample: Tensor, target: Tensor, options: Options) -> None:
        """Each threshold such that its latent fires on `target_l0 / d_sae` of the sample's tokens."""
        super().initialise(seed, sample, target, options)
        centred = self.centred(sample[:CALIBRATION_ROWS])
        share = options.target_l0 / self.d_sae
        live = min(max(round(share * len(centred)), 1), len(centred) - 1) if len(centred) > 1 else 0
        for first in range(0, self.d_sae, CALIBRATION_LATENTS):
            part = slice(first, first + CALIBRATION_LATENTS)
            pre = self.encoder[part] @ centred.T + self.b_enc[part, None]  # [latents, rows]
            self.threshold[part] = pre.kthvalue(len(centred) - live, dim=1).values.clamp(min=0)

    def after_step(self) -> None:
        super().after_step()
        with torch.no_grad():
            self.threshold.clamp_(min=0)  # below it the gate would let negative values through

    def active(self, x: Tensor) -> tuple[Support, Tensor]:
        support = supported(self.pre_acts(x), self.threshold)
        pre = support.values
        return support, pre.relu() * (pre > support.per_latent(self.threshold))

    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        share, centred, width = weights.sparsity / len(x), self.centred(x), self.bandwidth
        threshold = self.threshold.to(self.encoder.dtype)
        # a little more than half the rectangle's width, so that rounding leaves none of it out
        support = supported(self.pre_acts(x), threshold - 0.51 * width)
        above = support.values - support.per_latent(threshold)
        live, near = above > 0, above.abs_() < width / 2
        del above
        acts = support.values.mul_(live)
        error = support.rows(acts, self.W_dec).add_(self.b_dec).sub_(target)
        slope = error * (2 / len(x))  # d loss / d x_hat
        self.W_dec.grad = support.sums(acts, slope)
        rising = support.products(slope, self.W_dec)  # d loss / d feature_acts
        jumps = threshold * support.totals(rising * near) + share * support.counts(near).to(slope.dtype)
        self.threshold.grad = (-jumps / width).to(self.threshold.dtype)
        rising.mul_(live)
        self.encoder.grad, self.b_enc.grad = support.sums(rising, centred), support.totals(rising)
        self.b_dec.grad = slope.sum(0).sub_(self.b_enc.grad @ self.encoder)
        firings = support.counts(live)
        parts = {
            "reconstruction": error.square().sum(1).mean(),
            "sparsity": firings.sum().to(error.dtype) * share,
        }
        return Step(sum_of(parts), parts, error, firings)

    def blank(self) -> Self:
        like = self.encoder
        other = type(self)(self.d_in, self.d_sae, bandwidth=self.bandwidth, dtype=like.dtype)
        return other.to(like.device)

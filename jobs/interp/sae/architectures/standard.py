"""ReLU latents under an L1 penalty: the standard autoencoder, and the transcoders, which map to another site.

    feature_acts = ReLU((x - b_dec) @ W_enc + b_enc)           a transcoder leaves x as it is
    y_hat        = feature_acts @ W_dec + b_dec                a skip transcoder adds x @ W_skip.T
    loss = mean over tokens of |y_hat - y|^2 + l1 * mean over tokens of sum of feature_acts * |W_dec|

Weighting by the length of each direction leaves nothing to win by longer directions and smaller values, so the
decoder is free (Anthropic's update of April 2024, SAELens 6). Transcoders: Dunefsky et al. 2024 (arXiv 2406.11944);
skip transcoders: Paulo et al. 2025 (arXiv 2501.18823).
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.interp.sae.architectures.base import SAE, Step, Weights, drawn, sum_of
from jobs.interp.sae.options import Options
from jobs.interp.sae.support import Support, masked_, supported


class Standard(SAE):
    architecture = "standard"
    unit_norm = False
    initial_norm = 0.1

    def __init__(
        self, d_in: int, d_sae: int, *, d_out: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(d_in, d_sae, d_out=d_out, dtype=dtype)
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))

    def active(self, x: Tensor) -> tuple[Support, Tensor]:
        support = supported(self.pre_acts(x), 0)
        return support, support.values.relu()

    def beside(self, x: Tensor) -> Tensor | float:
        """What reaches the output beside the latents. Shapes: `[batch, d_in]` → `[batch, d_out]`."""
        return 0.0

    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        share, centred, lengths = weights.sparsity / len(x), self.centred(x), self.W_dec.norm(dim=1)
        support = supported(self.pre_acts(x), 0)
        acts = support.values.relu_()
        error = support.rows(acts, self.W_dec).add_(self.b_dec).add_(self.beside(x)).sub_(target)
        slope = error * (2 / len(x))  # d loss / d y_hat
        totals = support.totals(acts)  # [d_sae]
        self.W_dec.grad = support.sums(acts, slope)
        self.W_dec.grad.addcmul_(self.W_dec, (totals * share / lengths.clamp(min=1e-12))[:, None])
        rising = masked_(support.products(slope, self.W_dec, lengths * share), acts)  # d loss / d pre_acts
        self.encoder.grad, self.b_enc.grad = support.sums(rising, centred), support.totals(rising)
        self.b_dec.grad = slope.sum(0)
        if self.centres:
            self.b_dec.grad.sub_(self.b_enc.grad @ self.encoder)
        self._beside_gradient(x, slope)
        parts = {"reconstruction": error.square().sum(1).mean(), "sparsity": (totals @ lengths) * share}
        return Step(sum_of(parts), parts, error, support.counts(acts > 0))

    def _beside_gradient(self, x: Tensor, slope: Tensor) -> None:
        """Gradients of what `beside` is made of."""

    def blank(self) -> Self:
        like = self.encoder
        return type(self)(self.d_in, self.d_sae, d_out=self.d_out, dtype=like.dtype).to(like.device)


class Transcoder(Standard):
    """From the input of a part of the model to its output; `b_dec` has no meaning in the input (F29)."""

    architecture = "transcoder"
    centres = False

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, d_out=d_out)

    @torch.no_grad()
    def initialise(self, seed: int, sample: Tensor, target: Tensor, options: Options) -> None:
        """Directions of the two sides drawn apart; `b_enc` makes the encoder see the input centred."""
        self.W_dec.copy_(drawn(self.W_dec, seed, "decoder"))
        self.normalise_decoder(self.initial_norm)
        self.encoder.copy_(drawn(self.encoder, seed, "encoder"))
        self.encoder.mul_(self.initial_norm / self.encoder.norm(dim=1, keepdim=True))
        self.b_enc.copy_(-self.encoder @ sample.double().mean(0).to(self.encoder.dtype))
        self.b_dec.copy_(target.double().mean(0))

    def facts(self) -> dict[str, Any]:
        return {"d_out": self.d_out}


class SkipTranscoder(Transcoder):
    """`W_skip [d_out, d_in]`, from zero on, takes over what is linear."""

    architecture = "skip_transcoder"

    def __init__(
        self, d_in: int, d_sae: int, *, d_out: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(d_in, d_sae, d_out=d_out, dtype=dtype)
        self.W_skip = nn.Parameter(torch.zeros(self.d_out, d_in, dtype=dtype))

    def beside(self, x: Tensor) -> Tensor | float:
        return F.linear(x.to(self.W_skip.dtype), self.W_skip)

    def _beside_gradient(self, x: Tensor, slope: Tensor) -> None:
        self.W_skip.grad = slope.T @ x

    def reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y_hat, firings = super().reconstruct(x)
        return y_hat + self.beside(x), firings

    def scales(self, scale_in: float, scale_out: float) -> dict[str, float]:
        return super().scales(scale_in, scale_out) | {"W_skip": scale_in / scale_out}

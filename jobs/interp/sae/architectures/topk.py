"""The k largest latents of each token. TopK: Gao et al. 2024 (arXiv 2406.04093).

feature_acts = ReLU of the k largest of (x - b_dec) @ W_enc + b_enc
loss = mean over tokens of |x_hat - x|^2                                (summed over d_in)
     + aux_coefficient * min(1, n_dead / aux_k) * mean |e_hat - e|^2    (AuxK)
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from jobs.interp.errors import Unusable
from jobs.interp.sae.architectures.base import SAE, Step, Weights, encoded
from jobs.interp.sae.architectures.selection import select
from jobs.interp.sae.architectures.sparse_step import sparse_step
from jobs.interp.sae.options import Options
from jobs.interp.sae.sparse import Code, weighted_rows


class TopK(SAE):
    """A TopK sparse autoencoder; weights float32 (selecting in half precision cuts ties in 45 % of rows)."""

    architecture = "topk"

    def __init__(self, d_in: int, d_sae: int, k: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(d_in, d_sae, dtype=dtype)
        if not 1 <= k <= d_sae:
            raise Unusable(f"k is {k}, but {d_sae} latents allow 1 to {d_sae}.")
        self.k = k
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, int(options.k))

    def pre_acts(self, x: Tensor) -> Tensor:
        """What the encoder says before selection. Shapes: `[batch, d_in]` → `[batch, d_sae]`."""
        return encoded(self, self.centred(x), self.b_enc)

    def selected(self, pre_acts: Tensor) -> Code:
        """The live latents of a batch. Shapes: `[batch, d_sae]`."""
        values, indexes = select(pre_acts, self.k)
        return Code.of(values.relu(), indexes, self.d_sae)

    def code(self, x: Tensor) -> Code:
        """The live latents. Shapes: `x [batch, d_in]`."""
        return self.selected(self.pre_acts(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.code(x).dense()

    def reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.code(x)
        return weighted_rows(code, self.W_dec) + self.b_dec, code.firings()

    @torch.no_grad()
    def backward(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        pre = self.pre_acts(x)
        return sparse_step(self, x, target, pre, self.selected(pre), weights)

    def blank(self) -> Self:
        like = self.encoder
        return type(self)(self.d_in, self.d_sae, self.k, dtype=like.dtype).to(like.device)

    def facts(self) -> dict[str, Any]:
        return {"k": self.k, "rescale_acts_by_decoder_norm": False}

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
from jobs.interp.sae.architectures.base import SAE, Step, Weights
from jobs.interp.sae.architectures.selection import select
from jobs.interp.sae.architectures.sparse_step import sparse_step
from jobs.interp.sae.options import Options
from jobs.interp.sae.sparse import Code
from jobs.interp.sae.support import Few, Support


class TopK(SAE):
    """A TopK sparse autoencoder; weights float32 (selecting in half precision cuts ties in 45 % of rows)."""

    architecture = "topk"

    def __init__(self, d_in: int, d_sae: int, k: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(d_in, d_sae, dtype=dtype)
        if not 1 <= k <= d_sae:
            raise Unusable(f"k is {k}, but {d_sae} latents allow 1 to {d_sae}.")
        self.k = k
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, int(options.k))

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Widths of the dictionaries that shall reconstruct by themselves: the whole."""
        return (self.d_sae,)

    def selected(self, pre_acts: Tensor) -> Code:
        """The live latents of a batch. Shapes: `[batch, d_sae]`."""
        values, indexes = select(pre_acts, int(self.k))
        return Code.of(values.relu(), indexes, self.d_sae)

    def active(self, x: Tensor) -> tuple[Support, Tensor]:
        code = self.selected(self.pre_acts(x))
        return Few(code), code.values

    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        pre = self.pre_acts(x)
        return sparse_step(self, x, target, pre, self.selected(pre), weights)

    def blank(self) -> Self:
        like = self.encoder
        return type(self)(self.d_in, self.d_sae, self.k, dtype=like.dtype).to(like.device)

    def facts(self) -> dict[str, Any]:
        return {"k": int(self.k), "rescale_acts_by_decoder_norm": False}

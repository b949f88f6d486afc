"""Sparse autoencoders as functions of their weights. TopK: Gao et al. 2024 (arXiv 2406.04093).

    feature_acts = TopK_k(ReLU-after-selection((x - b_dec) @ W_enc + b_enc))
    x_hat        = feature_acts @ W_dec + b_dec

Names and orientation are SAELens': `W_enc [d_in, d_sae]`, `W_dec [d_sae, d_in]`; a feature's direction is a
*row* of
`W_dec`. The encoder is kept as `encoder [d_sae, d_in]`, feature by feature like the decoder, because sparse
gradients touch whole features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.interp.errors import Unusable
from jobs.interp.sae.sparse import Code, weighted_rows
from jobs.interp.seeds import generator


def select(pre_acts: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their indexes; of equal values the lowest index is taken.

    Shapes: `pre_acts [batch, d_sae]` float32 or float64 → both `[batch, k]`, largest first. `torch.topk`
    alone does not say which of equal values it takes; asking for one more value shows the rows where that
    matters.
    """
    width = pre_acts.shape[1]
    values, indexes = pre_acts.topk(min(k + 1, width), dim=1)
    if k < width:
        tied = values[:, k - 1] == values[:, k]
        values, indexes = values[:, :k], indexes[:, :k]
        if tied.any():  # the one point at which a step on a card waits for the host
            order = pre_acts[tied].sort(dim=1, descending=True, stable=True)
            values[tied], indexes[tied] = order.values[:, :k], order.indices[:, :k]
    return values.contiguous(), indexes.contiguous()


class TopK(nn.Module):
    """A TopK sparse autoencoder; weights float32 (selecting in half precision cuts ties in 45 % of rows).

    Shapes: `encoder [d_sae, d_in]`, `b_enc [d_sae]`, `W_dec [d_sae, d_in]`, `b_dec [d_in]`.
    """

    architecture = "topk"

    def __init__(self, d_in: int, d_sae: int, k: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not 1 <= k <= d_sae:
            raise Unusable(f"k is {k}, but {d_sae} latents allow 1 to {d_sae}.")
        self.k = k
        self.encoder = nn.Parameter(torch.zeros(d_sae, d_in, dtype=dtype))
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))
        self.W_dec = nn.Parameter(torch.zeros(d_sae, d_in, dtype=dtype))
        self.b_dec = nn.Parameter(torch.zeros(d_in, dtype=dtype))

    @classmethod
    def initial(cls, d_in: int, d_sae: int, k: int, *, seed: int, mean: Tensor) -> TopK:
        """Random unit decoder rows, encoder equal to them, `b_dec` the mean of the (normalised) data."""
        sae = cls(d_in, d_sae, k)
        with torch.no_grad():
            sae.W_dec.normal_(generator=generator(seed, "decoder"))
            sae.normalise_decoder()
            sae.encoder.copy_(sae.W_dec)
            sae.b_dec.copy_(mean)
        return sae

    @property
    def W_enc(self) -> Tensor:
        return self.encoder.T

    @property
    def d_in(self) -> int:
        return self.encoder.shape[1]

    @property
    def d_sae(self) -> int:
        return self.encoder.shape[0]

    def pre_acts(self, x: Tensor) -> Tensor:
        """What the encoder says before selection. Shapes: `[batch, d_in]` → `[batch, d_sae]`."""
        return F.linear(x.to(self.encoder.dtype) - self.b_dec, self.encoder, self.b_enc)

    def code(self, x: Tensor) -> Code:
        """The live latents. Shapes: `x [batch, d_in]`."""
        values, indexes = select(self.pre_acts(x), self.k)
        return Code(values.relu(), indexes, self.d_sae)

    def encode(self, x: Tensor) -> Tensor:
        """`feature_acts`, mostly zeros. Shapes: `[batch, d_in]` → `[batch, d_sae]`."""
        return self.code(x).dense()

    def decode(self, feature_acts: Tensor) -> Tensor:
        """Shapes: `[batch, d_sae]` → `[batch, d_in]`."""
        return feature_acts @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction. Shapes: `[batch, d_in]` → `[batch, d_in]`."""
        return self.rebuild(self.code(x))

    def rebuild(self, code: Code) -> Tensor:
        """What a code stands for. Shapes: → `[batch, d_in]`."""
        return weighted_rows(code, self.W_dec) + self.b_dec

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Give each feature's direction, a row of `W_dec`, length 1 (F27: not each input axis)."""
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp(min=1e-12))

    @torch.no_grad()
    def folded(self, scale: float) -> TopK:
        """The SAE for raw `x` that does what this one does for `scale * x`, divided by `scale` again.

        W_enc · s, W_dec / s, b_dec / s, b_enc unchanged (F19: without b_dec it is silently wrong).
        """
        other = TopK(self.d_in, self.d_sae, self.k, dtype=self.encoder.dtype).to(self.encoder.device)
        other.encoder.copy_(self.encoder * scale)
        other.b_enc.copy_(self.b_enc)
        other.W_dec.copy_(self.W_dec / scale)
        other.b_dec.copy_(self.b_dec / scale)
        return other


#: By the name in `cfg.json`.
ARCHITECTURES: dict[str, type[TopK]] = {TopK.architecture: TopK}

"""The k * batch largest latents of a whole batch, so that tokens share out what they need.

BatchTopK: Bussmann et al. 2024 (arXiv 2412.06410). A token alone has no batch, so what is exported is a JumpReLU
with one threshold for all latents: the running mean of the smallest value that training kept, as in SAELens.
Matryoshka: Bussmann et al. 2025 (arXiv 2503.17547); the loss is the sum over all prefixes of the dictionary.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from jobs.interp.sae.architectures.base import Step, Weights
from jobs.interp.sae.architectures.jumprelu import JumpReLU
from jobs.interp.sae.architectures.selection import select_batch
from jobs.interp.sae.architectures.sparse_step import sparse_step
from jobs.interp.sae.architectures.topk import TopK
from jobs.interp.sae.options import Options
from jobs.interp.sae.sparse import Code

#: Share of the newest batch in the running mean of the smallest kept value; SAELens' `topk_threshold_lr`.
THRESHOLD_RATE = 0.01


class BatchTopK(TopK):
    """`smallest_kept`: a running mean that began at 0; `kept_steps`: of so many steps."""

    architecture = "batchtopk"
    in_files = False
    precise = ("smallest_kept",)
    smallest_kept: Tensor
    kept_steps: Tensor

    def __init__(self, d_in: int, d_sae: int, k: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(d_in, d_sae, k, dtype=dtype)
        self.register_buffer("smallest_kept", torch.zeros((), dtype=torch.float64))
        self.register_buffer("kept_steps", torch.zeros((), dtype=torch.long))

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, options.k)

    def selected(self, pre_acts: Tensor) -> Code:
        return select_batch(pre_acts, int(self.k * len(pre_acts)))

    @property
    def threshold(self) -> Tensor:
        """What separates live from silent without a batch: the mean, without the zero it began with."""
        weight = 1 - (1 - THRESHOLD_RATE) ** self.kept_steps.double()
        return self.smallest_kept / weight.clamp(min=THRESHOLD_RATE)

    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        pre = self.pre_acts(x)
        code = self.selected(pre)
        if len(code.values):
            self.smallest_kept.lerp_(code.values.min().to(self.smallest_kept.dtype), THRESHOLD_RATE)
            self.kept_steps += 1
        return sparse_step(self, x, target, pre, code, weights)

    def exported(self) -> JumpReLU:
        other = JumpReLU(self.d_in, self.d_sae, dtype=self.encoder.dtype).to(self.encoder.device)
        with torch.no_grad():
            for name in ("encoder", "b_enc", "W_dec", "b_dec"):
                getattr(other, name).copy_(getattr(self, name))
            other.threshold.fill_(self.threshold)
        return other


class Matryoshka(BatchTopK):
    """`prefixes`: ascending widths, the last one d_sae."""

    architecture = "matryoshka_batchtopk"

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: float,
        widths: tuple[int, ...] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(d_in, d_sae, k, dtype=dtype)
        self.widths = widths or (d_sae,)

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        return cls(d_in, d_sae, options.k, options.prefixes(d_sae))

    @property
    def prefixes(self) -> tuple[int, ...]:
        return self.widths

    def blank(self) -> Self:
        like = self.encoder
        return type(self)(self.d_in, self.d_sae, self.k, self.widths, dtype=like.dtype).to(like.device)

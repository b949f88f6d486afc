"""Where the code of a batch may be other than zero, and the products over it: few places, or all of them.

A formula is written once over a `Support` and costs what the code's sparsity allows. Values over a support are `[n]`,
one for each place, where they are few, and `[batch, d_sae]` where they are many.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.interp.sae.sparse import ByLatent, Code, products, weighted_rows

#: Of all places: where fewer are live, products over live ones alone are faster than dense ones. On two cores a step
#: (576 → 4608, 4096 tokens) then takes half the time, and as long at 0.15; on cards dense products win sooner.
SPARSE_BELOW = 0.06


class Support(Protocol):
    """`values`: what the encoder says at these places, shaped as all values over this support are."""

    values: Tensor

    def per_latent(self, vector: Tensor) -> Tensor:
        """What belongs to each place. Shapes: `[d_sae]`."""

    def rows(self, values: Tensor, weight: Tensor) -> Tensor:
        """For each token the sum of `weight`'s rows, weighted. Shapes: `weight [d_sae, d]` → `[batch, d]`."""

    def products(self, vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`vectors[token] · weight[latent] + bias[latent]` at every place.

        Shapes: `[batch, d]`, `[d_sae, d]`, `[d_sae]`.
        """

    def sums(self, values: Tensor, vectors: Tensor) -> Tensor:
        """For each latent the sum of the tokens' vectors, weighted. Shapes: `vectors [batch, d]` → `[d_sae, d]`."""

    def totals(self, values: Tensor) -> Tensor:
        """For each latent the sum of its values. Shapes: → `[d_sae]`."""

    def counts(self, flags: Tensor) -> Tensor:
        """For each latent the places that are flagged. Shapes: → `[d_sae]` int64."""

    def dense(self, values: Tensor) -> Tensor:
        """Zero where there is no place. Shapes: → `[batch, d_sae]`."""


class Few:
    """The places of a `Code`."""

    def __init__(self, code: Code) -> None:
        self.code, self.values = code, code.values

    @cached_property
    def by_latent(self) -> ByLatent:
        return ByLatent(self.code)

    def _with(self, values: Tensor) -> Code:
        return Code(values, self.code.indexes, self.code.starts, self.code.d_sae)

    def per_latent(self, vector: Tensor) -> Tensor:
        return vector[self.code.indexes]

    def rows(self, values: Tensor, weight: Tensor) -> Tensor:
        return weighted_rows(self._with(values), weight)

    def products(self, vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = products(self.code, vectors, weight)
        return found if bias is None else found + self.per_latent(bias)

    def sums(self, values: Tensor, vectors: Tensor) -> Tensor:
        return self.by_latent.sums(values, vectors)

    def totals(self, values: Tensor) -> Tensor:
        return self.sums(values, values.new_ones(len(self.code), 1)).squeeze(1)

    def counts(self, flags: Tensor) -> Tensor:
        """Exact in any order of summing."""
        blank = torch.zeros(self.code.d_sae, dtype=torch.long, device=flags.device)
        return blank.scatter_add_(0, self.code.indexes, flags.long())

    def dense(self, values: Tensor) -> Tensor:
        return self._with(values).dense()


class All:
    """Every place."""

    def __init__(self, pre_acts: Tensor) -> None:
        self.values = pre_acts

    def per_latent(self, vector: Tensor) -> Tensor:
        return vector

    def rows(self, values: Tensor, weight: Tensor) -> Tensor:
        return values @ weight

    def products(self, vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(vectors, weight, bias)

    def sums(self, values: Tensor, vectors: Tensor) -> Tensor:
        return values.T @ vectors

    def totals(self, values: Tensor) -> Tensor:
        return values.sum(0)

    def counts(self, flags: Tensor) -> Tensor:
        return flags.sum(0)

    def dense(self, values: Tensor) -> Tensor:
        return values


def supported(pre_acts: Tensor, floor: Tensor | float) -> Support:
    """The places where the encoder says more than `floor`, or all places where these are many.

    Shapes: `pre_acts [batch, d_sae]`, `floor [d_sae]` or one for all. On a card this waits for the host.
    """
    above = (pre_acts > floor).flatten()
    if int(torch.count_nonzero(above)) > SPARSE_BELOW * above.numel():
        return All(pre_acts)
    places = above.nonzero().flatten()
    return Few(Code.at(places, pre_acts.flatten()[places], *pre_acts.shape))


def masked_(gradient: Tensor, acts: Tensor) -> Tensor:
    """`gradient`, in place, zero where `acts` is not above zero: one pass instead of two. Shapes: all the same."""
    torch.ops.aten.threshold_backward.grad_input(gradient, acts, 0, grad_input=gradient)
    return gradient

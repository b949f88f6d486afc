"""Which latents of a token, or of a batch, are live: exact, and the same of equal values every time."""

from __future__ import annotations

from torch import Tensor

from jobs.interp.sae.sparse import Code

#: Values looked at to guess where the cut will be, and how many more than wanted the guess lets through.
GUESS_FROM, GENEROUS = 65_536, 1.3


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


def select_batch(pre_acts: Tensor, count: int) -> Code:
    """The `count` largest positive values of a whole batch; of equal ones the lowest token, then the lowest latent.

    Shapes: `pre_acts [batch, d_sae]`. Fewer where fewer are positive.
    """
    flat = pre_acts.flatten()
    places = _candidates(flat, count)
    values = flat[places]
    if len(values) > count:
        kept = _largest(values, count)
        places, values = places[kept], values[kept]
    return Code.at(places, values, *pre_acts.shape)


def _candidates(flat: Tensor, count: int) -> Tensor:
    """Ascending places of at least the `count` largest positive values, or of all positive ones.

    Shapes: `[n]` → `[m]`.

    A sample says where the cut will be about, which spares sorting what is far below it; whether it let enough
    through is counted, so the answer is exact.
    """
    sample = flat[:: len(flat) // GUESS_FROM | 1]  # odd, or it would see the same few latents of every token
    generous = int(GENEROUS * count * len(sample) / len(flat)) + 16
    if generous < len(sample):
        guess = sample.kthvalue(len(sample) - generous).values.clamp(min=0)
        places = (flat > guess).nonzero().flatten()
        if len(places) >= count:
            return places
    return (flat > 0).nonzero().flatten()


def _largest(values: Tensor, count: int) -> Tensor:
    """Ascending places of the `count` largest; of those equal to the smallest kept, the first.

    Shapes: `[m]` → `[count]`.
    """
    cut = values.kthvalue(len(values) - count + 1).values
    above = values > cut
    equal = values == cut
    kept = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    return kept.nonzero().flatten()

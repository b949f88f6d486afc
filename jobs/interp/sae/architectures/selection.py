"""Which latents of a token, or of a batch, are live: exact, and the same of equal values every time."""

from __future__ import annotations

from torch import Tensor


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

"""Documents to rows of tokens, and rows to padded batches.

Rules, each from somebody's lost week: documents are never joined in a row; a token is left out because of its
*id* or the *mask*, never because of its column (F05: with left padding the first column is padding, not BOS);
positions come
from the mask, so that models with learned positions see what they would see without padding (F04).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jobs.interp.errors import Unusable

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Row:
    """Consecutive tokens of one document, at most a context long."""

    document: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """A padded batch. `input_ids`, `mask` (1 = real token) and `position_ids`: [batch, seq], int64."""

    input_ids: Tensor
    mask: Tensor
    position_ids: Tensor

    def model_inputs(self, device: str | torch.device) -> dict[str, Tensor]:
        """Arguments for a causal LM's forward on `device`."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.mask, "position_ids": self.position_ids}
        return {name: tensor.to(device) for name, tensor in inputs.items()}


def rows_of(
    documents: Iterable[str], tokenizer: Any, context_size: int, *, max_tokens: int, bos_id: int | None = None
) -> list[Row]:
    """Cut documents into rows of at most `context_size` tokens until there are `max_tokens` in all.

    With `bos_id` each row starts with it (many models park huge values on the first position; with BOS there
    they can be left out by its id). The tokenizer adds nothing itself, so BOS is never doubled.
    Raises `Unusable` when the context has no room for text or the documents hold no token.
    """
    start = () if bos_id is None else (bos_id,)
    room = context_size - len(start)
    if room < 1:
        raise Unusable(f"A context of {context_size} has no room for text beside BOS.")
    rows: list[Row] = []
    total = 0
    for number, document in enumerate(documents):
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        for first in range(0, len(ids), room):
            row = Row(number, (*start, *ids[first : first + room])[: max_tokens - total])
            if len(row.ids) <= len(start):
                return rows
            rows.append(row)
            total += len(row.ids)
    if not rows:
        raise Unusable("The corpus holds no token.")
    return rows


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, side: Side = "right") -> Batch:
    """Rows of token ids as one batch.

    Shapes: all three tensors `[len(rows), longest row]`. Positions count real tokens only; padding gets
    position 0.
    """
    width = max(len(row) for row in rows)
    filled = [_filled(list(row), width, pad_id, side) for row in rows]
    input_ids = torch.tensor([ids for ids, _ in filled])
    mask = torch.tensor([real for _, real in filled])
    return Batch(input_ids, mask, positions(mask))


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its own row, from the mask alone. Shapes: `mask` and result `[batch,
    seq]`.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def kept(input_ids: Tensor, mask: Tensor, excluded_ids: Iterable[int]) -> Tensor:
    """Which positions count: real ones whose id is not excluded. Shapes: all `[batch, seq]`, result bool."""
    excluded = torch.tensor(sorted(set(excluded_ids)), dtype=torch.long, device=input_ids.device)
    return mask.bool() & ~torch.isin(input_ids, excluded)


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indexes of rows in batches of similar length, longest first (memory runs out at once or never)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def _filled(ids: list[int], width: int, pad_id: int, side: Side) -> tuple[list[int], list[int]]:
    padding, real = [pad_id] * (width - len(ids)), [1] * len(ids)
    blank = [0] * len(padding)
    return (padding + ids, blank + real) if side == "left" else (ids + padding, real + blank)

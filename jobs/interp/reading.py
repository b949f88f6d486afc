"""Stored activations read back: which rows train, which are held out, in what order; and their texts.

Nothing here holds more than one buffer of vectors in memory, however many there are on disk. A batch is a
function of (seed, step), so that a training can go on anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from jobs.interp.errors import Unusable
from jobs.interp.seeds import generator
from jobs.interp.tokens import Batch, batches_by_length, pad

#: Rows mixed at a time while reading. A constant, because the order of training depends on it.
BUFFER_BYTES = 512 * 2**20


class Store:
    """The shards of one site on disk. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = sorted(folder.glob("shard_*.safetensors"))
        if not self.shards:
            raise Unusable(f"{folder.name} holds no activations.")
        shapes = [self._shape(path) for path in self.shards]
        self.sizes = [rows for rows, _ in shapes]
        self.d_model = shapes[0][1]

    def read(self, number: int, name: str) -> Tensor:
        """One tensor of one shard: `acts` [n, d_model], `norms`, `ids`, `document`, `row` or `position`
        [n].
        """
        with safe_open(self.shards[number], framework="pt") as file:
            return file.get_tensor(name)

    @staticmethod
    def _shape(path: Path) -> tuple[int, int]:
        with safe_open(path, framework="pt") as file:
            rows, width = file.get_slice("acts").get_shape()
        return rows, width


@dataclass(frozen=True)
class Selection:
    """Some of a store's rows: for each shard the indexes of those that count."""

    store: Store
    indexes: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(len(index) for index in self.indexes)

    def load(self, number: int) -> Tensor:
        """The selected rows of one shard. Shapes: `[n, d_model]` in the stored dtype."""
        return self.store.read(number, "acts")[self.indexes[number]]

    def mean_norm(self) -> float:
        """Mean length of the selected vectors."""
        total = sum(
            self.store.read(number, "norms")[index].double().sum().item()
            for number, index in enumerate(self.indexes)
        )
        return total / len(self)

    def batches(self, size: int) -> Iterator[Tensor]:
        """All selected rows once, in order. Shapes: `[at most size, d_model]` float32."""
        for number in range(len(self.indexes)):
            for part in self.load(number).split(size):
                if len(part):
                    yield part.float()


@dataclass(frozen=True)
class Split:
    """Which rows train and which are held out, and what counts as an outlier."""

    train: Selection
    heldout: Selection
    documents: Tensor  # numbers of those held out
    norm_limit: float | None
    dropped_outliers: int


def split(store: Store, *, heldout_fraction: float = 0.05, outlier_ratio: float | None = 10.0) -> Split:
    """Divide a store by *document*, so that no held-out text has a neighbour in training.

    Vectors longer than `outlier_ratio` times the median (attention sinks, F12) are in neither part.
    Raises `Unusable` when a part would be empty.
    """
    norms = torch.cat([store.read(number, "norms") for number in range(len(store.shards))])
    limit = None if outlier_ratio is None else outlier_ratio * norms.median().item()
    held = heldout_documents(store, heldout_fraction)
    train, heldout, dropped = [], [], 0
    for number in range(len(store.shards)):
        usual = torch.ones(store.sizes[number], dtype=torch.bool)
        if limit is not None:
            usual = store.read(number, "norms") <= limit
        out = torch.isin(store.read(number, "document"), held)
        train.append((usual & ~out).nonzero().flatten())
        heldout.append((usual & out).nonzero().flatten())
        dropped += int((~usual).sum())
    parts = Split(Selection(store, tuple(train)), Selection(store, tuple(heldout)), held, limit, dropped)
    if not len(parts.train) or not len(parts.heldout):
        raise Unusable(
            "There is too little text to train on one part and hold out another; extract more documents."
        )
    return parts


def heldout_documents(store: Store, fraction: float) -> Tensor:
    """Numbers of the documents held out: the smallest by a fixed hash, at least one, never all."""
    documents = torch.cat([store.read(number, "document") for number in range(len(store.shards))]).unique()
    count = min(max(1, round(fraction * len(documents))), len(documents) - 1)
    order = torch.argsort((documents.long() * 2654435761) % 2**32)  # Knuth's multiplicative hash
    return documents[order[:count]]


class Shuffled:
    """Endless shuffled batches, each a function of (seed, step) alone; memory is one buffer of rows.

    Each pass draws a new order of shards, fills buffers of up to `buffer_bytes` with them, and a new order of
    rows in each buffer. Batches run over the ends of buffers and passes, so all are full.
    """

    def __init__(
        self, selection: Selection, batch_size: int, seed: int, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.selection, self.batch_size, self.seed = selection, batch_size, seed
        itemsize = selection.store.read(0, "acts").element_size()
        self.room = max(1, buffer_bytes // (itemsize * selection.store.d_model))
        self._held: tuple[tuple[int, int], Tensor] | None = None
        self._plans: dict[int, list[list[int]]] = {}

    def __len__(self) -> int:
        """Rows in one pass."""
        return len(self.selection)

    def batch(self, step: int) -> Tensor:
        """The batch of `step` (from 0). Shapes: `[batch_size, d_model]` float32."""
        position, parts, missing = step * self.batch_size, [], self.batch_size
        while missing:
            rows = self._from(position)[:missing]
            parts.append(rows)
            position, missing = position + len(rows), missing - len(rows)
        return torch.cat(parts).float()

    def _from(self, position: int) -> Tensor:
        """What is left, from `position` in the endless stream on, of the buffer that holds it."""
        epoch, offset = divmod(position, len(self))
        for number, group in enumerate(self._groups(epoch)):
            size = sum(len(self.selection.indexes[shard]) for shard in group)
            if offset < size:
                return self._buffer(epoch, number, group)[offset:]
            offset -= size
        raise AssertionError("a pass is as long as its buffers")

    def _groups(self, epoch: int) -> list[list[int]]:
        if epoch not in self._plans:
            self._plans = {epoch: self._plan(epoch)}
        return self._plans[epoch]

    def _plan(self, epoch: int) -> list[list[int]]:
        shards = torch.randperm(
            len(self.selection.indexes), generator=generator(self.seed, "shards", epoch)
        ).tolist()
        groups: list[list[int]] = [[]]
        size = 0
        for shard in shards:
            rows = len(self.selection.indexes[shard])
            if groups[-1] and size + rows > self.room:
                groups.append([])
                size = 0
            groups[-1].append(shard)
            size += rows
        return groups

    def _buffer(self, epoch: int, number: int, group: list[int]) -> Tensor:
        if self._held is None or self._held[0] != (epoch, number):
            self._held = None  # let go of the old buffer before the new one is filled
            rows = torch.cat([self.selection.load(shard) for shard in group])
            order = torch.randperm(len(rows), generator=generator(self.seed, "rows", epoch, number))
            self._held = ((epoch, number), rows[order])
        return self._held[1]


@dataclass(frozen=True)
class HeldOutText:
    """Token rows of held-out documents, with the positions that were kept at extraction."""

    rows: list[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    def batches(self, size: int, pad_id: int) -> Iterator[Batch]:
        """Padded batches, rows of similar length together."""
        for indexes in batches_by_length([len(row) for row in self.rows], size):
            yield pad([self.rows[index] for index in indexes], pad_id)


def heldout_text(folder: Path, documents: Tensor, max_tokens: int) -> HeldOutText:
    """Token rows of `documents` from an extraction's texts, up to `max_tokens`."""
    rows: list[tuple[int, ...]] = []
    room = max_tokens
    for path in sorted((folder / "tokens").glob("shard_*.safetensors")):
        with safe_open(path, framework="pt") as file:
            lengths, owners = file.get_tensor("lengths").tolist(), file.get_tensor("documents")
            texts = file.get_tensor("ids").split(lengths)
        for text, held in zip(texts, torch.isin(owners, documents).tolist(), strict=True):
            if held and room > 0:
                rows.append(tuple(text.tolist())[:room])
                room -= len(rows[-1])
    return HeldOutText(rows)

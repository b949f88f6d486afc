"""Stored activations read back: which rows train, which are held out; and their texts.

Nothing here holds more than one shard of vectors in memory, however many there are on disk: what a row is (trained on,
held out, outlier) is worked out anew whenever its shard is read. `shuffling` puts rows into the order of a training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from jobs.interp.errors import Unusable
from jobs.interp.shards import by_number
from jobs.interp.tokens import Batch, batches_by_length, pad


class Store:
    """The shards of one site on disk, or of two that hold the same tokens: a transcoder's input and its target.

    Of two sites a row holds the vectors side by side, `[d_in + d_out]`. Opening reads headers only.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.sites = [_shards(folder) for folder in folders]
        self.shards = self.sites[0]
        shapes = [[self._shape(path) for path in shards] for shards in self.sites]
        self.sizes = [rows for rows, _ in shapes[0]]
        self.widths = tuple(site[0][1] for site in shapes)
        if any([rows for rows, _ in site] != self.sizes for site in shapes):
            raise Unusable(f"{' and '.join(folder.name for folder in folders)} do not hold the same tokens.")

    @property
    def d_model(self) -> int:
        """The width of the first site."""
        return self.widths[0]

    def read(self, number: int, name: str) -> Tensor:
        """One tensor of one shard: `acts` [n, width], of two sites side by side; of the first site `norms`, `ids`,
        `document`, `row` or `position` [n].
        """
        if name == "acts" and len(self.sites) > 1:
            return torch.cat([_tensor(shards[number], name) for shards in self.sites], dim=1)
        return _tensor(self.shards[number], name)

    def norms(self, number: int) -> Tensor:
        """Lengths of the vectors of one shard. Shapes: `[n, sites]`."""
        return torch.stack([_tensor(shards[number], "norms") for shards in self.sites], dim=1)

    @staticmethod
    def _shape(path: Path) -> tuple[int, int]:
        with safe_open(path, framework="pt") as file:
            rows, width = file.get_slice("acts").get_shape()
        return rows, width


def _shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("shard_*.safetensors"), key=by_number)
    if not found:
        raise Unusable(f"{folder.name} holds no activations.")
    return found


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


@dataclass(frozen=True)
class Selection:
    """Some of a store's rows: `indexes(number)` gives those of a shard that count, `counts` how many they are."""

    store: Store
    counts: tuple[int, ...]
    indexes: Callable[[int], Tensor]

    def __len__(self) -> int:
        return sum(self.counts)

    def load(self, number: int) -> Tensor:
        """The selected rows of one shard. Shapes: `[n, width]` in the stored dtype."""
        return self.store.read(number, "acts")[self.indexes(number)]

    def mean_norms(self) -> tuple[float, ...]:
        """Mean length of the selected vectors, all of them (F20), by site."""
        total = torch.zeros(len(self.store.widths), dtype=torch.float64)
        for number in range(len(self.store.shards)):
            total += self.store.norms(number)[self.indexes(number)].double().sum(0)
        return tuple((total / len(self)).tolist())

    def batches(self, size: int) -> Iterator[Tensor]:
        """All selected rows once, in order. Shapes: `[at most size, width]` float32."""
        for number in range(len(self.store.shards)):
            for part in self.load(number).split(size):
                if len(part):
                    yield part.float()


@dataclass(frozen=True)
class Rule:
    """Which rows of a store are usual, and which documents are held out."""

    store: Store
    limits: tuple[float, ...] | None  # longest vectors that count, by site
    heldout: Tensor  # numbers of documents

    def usual(self, number: int) -> Tensor:
        """Rows without an outlier. Shapes: `[n]` bool."""
        if self.limits is None:
            return torch.ones(self.store.sizes[number], dtype=torch.bool)
        return (self.store.norms(number) <= torch.tensor(self.limits)).all(1)

    def out(self, number: int) -> Tensor:
        """Rows of held-out documents. Shapes: `[n]` bool."""
        return torch.isin(self.store.read(number, "document"), self.heldout)

    def trained(self, number: int) -> Tensor:
        return (self.usual(number) & ~self.out(number)).nonzero().flatten()

    def held(self, number: int) -> Tensor:
        return (self.usual(number) & self.out(number)).nonzero().flatten()

    def selection(self, indexes: Callable[[int], Tensor]) -> Selection:
        return Selection(self.store, tuple(len(indexes(n)) for n in range(len(self.store.shards))), indexes)


@dataclass(frozen=True)
class Split:
    """Which rows train and which are held out, and what counts as an outlier."""

    train: Selection
    heldout: Selection
    documents: Tensor  # numbers of those held out
    norm_limits: tuple[float, ...] | None  # by site
    dropped_outliers: int


def split(store: Store, *, heldout_fraction: float = 0.05, outlier_ratio: float | None = 10.0) -> Split:
    """Divide a store by *document*, so that no held-out text has a neighbour in training.

    Vectors longer than `outlier_ratio` times the median (attention sinks, F12) are in neither part.
    Raises `Unusable` when a part would be empty.
    """
    limits = None
    if outlier_ratio is not None:
        limits = tuple(outlier_ratio * found for found in median_norms(store))
    rule = Rule(store, limits, heldout_documents(documents_of(store), heldout_fraction))
    train, heldout = rule.selection(rule.trained), rule.selection(rule.held)
    if not len(train) or not len(heldout):
        raise Unusable(
            "There is too little text to train on one part and hold out another; extract more documents."
        )
    dropped = sum(store.sizes) - len(train) - len(heldout)
    return Split(train, heldout, rule.heldout, limits, dropped)


def median_norms(store: Store) -> tuple[float, ...]:
    """The (lower) median length by site, exact, in two passes over the norms and 256 KiB.

    Lengths are not negative, so their bits order as they do: the upper half of the bits first, then the lower half of
    those that share the median's upper half.
    """
    return tuple(_median(store, site) for site in range(len(store.widths)))


def _median(store: Store, site: int) -> float:
    def bits() -> Iterator[Tensor]:
        for number in range(len(store.shards)):
            yield store.norms(number)[:, site].contiguous().view(torch.int32)

    rank = (sum(store.sizes) - 1) // 2
    upper, rank = _bin_of(rank, (part >> 16 for part in bits()))
    lower, _ = _bin_of(rank, (part[part >> 16 == upper] & 0xFFFF for part in bits()))
    return torch.tensor((upper << 16) | lower, dtype=torch.int32).view(torch.float32).item()


def _bin_of(rank: int, parts: Iterator[Tensor]) -> tuple[int, int]:
    """The value that stands at `rank` of all in order, and its rank among its equals. Values below 65 536."""
    counts = torch.zeros(1 << 16, dtype=torch.long)
    for part in parts:
        counts += torch.bincount(part.long(), minlength=1 << 16)
    below = counts.cumsum(0)
    value = int(torch.searchsorted(below, rank, right=True))
    return value, rank - int(below[value] - counts[value])


def documents_of(store: Store) -> Tensor:
    """Numbers of the documents that a store holds vectors of, in order."""
    return torch.cat(
        [store.read(number, "document").unique() for number in range(len(store.shards))]
    ).unique()


def heldout_documents(documents: Tensor, fraction: float) -> Tensor:
    """Numbers of the documents held out: the smallest by a fixed hash, at least one, never all."""
    count = min(max(1, round(fraction * len(documents))), len(documents) - 1)
    order = torch.argsort((documents.long() * 2654435761) % 2**32)  # Knuth's multiplicative hash
    return documents[order[:count]]


@dataclass(frozen=True)
class HeldOutText:
    """Token rows of held-out documents, with the positions that were kept at extraction."""

    rows: Sequence[tuple[int, ...]]

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
    for path in sorted((folder / "tokens").glob("shard_*.safetensors"), key=by_number):
        with safe_open(path, framework="pt") as file:
            lengths, owners = file.get_tensor("lengths").tolist(), file.get_tensor("documents")
            texts = file.get_tensor("ids").split(lengths)
        for text, held in zip(texts, torch.isin(owners, documents).tolist(), strict=True):
            if held and room > 0:
                rows.append(tuple(text.tolist())[:room])
                room -= len(rows[-1])
    return HeldOutText(rows)

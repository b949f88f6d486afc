"""Lengths of stored vectors: the exact median without holding them all, and the sinks far above it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from jobs.interp.reading import Store

#: A vector longer than so many medians is a sink: a position where the model parks what means nothing (F12).
SINK_RATIO = 10.0


def statistics(store: Store, ratio: float = SINK_RATIO) -> dict[str, float | int]:
    """Median, mean and maximum of the lengths, how many are sinks, and the mean without them.

    Reads the lengths of all shards three times; memory is one shard's.
    """
    median = exact_median(store)
    limit = ratio * median
    count = sinks = 0
    total = usual = largest = 0.0
    for norms in _shards(store):
        kept = norms[norms <= limit]
        count, sinks = count + len(norms), sinks + len(norms) - len(kept)
        total, usual = total + norms.double().sum().item(), usual + kept.double().sum().item()
        largest = max(largest, norms.max().item()) if len(norms) else largest
    return {
        "norm_median": median,
        "norm_mean": total / count,
        "norm_max": largest,
        "sink_limit": limit,
        "sinks": sinks,
        "norm_mean_without_sinks": usual / max(1, count - sinks),
    }


def exact_median(store: Store) -> float:
    """The lower median of the lengths, as `Tensor.median` gives it: found by halves of their bits.

    Floats that are not negative stand in the order of their bits, so two counts of 16 bits each find any of them.
    """
    high = _counted(bits >> 16 for bits in _bits(store))
    rank = (int(high.sum()) - 1) // 2
    upper, before = _reached(high, rank)
    low = _counted((bits & 0xFFFF)[bits >> 16 == upper] for bits in _bits(store))
    lower, _ = _reached(low, rank - before)
    return torch.tensor(upper << 16 | lower, dtype=torch.int32).view(torch.float32).item()


def _shards(store: Store) -> Iterator[Tensor]:
    for number in range(len(store.shards)):
        yield store.read(number, "norms")


def _bits(store: Store) -> Iterator[Tensor]:
    for norms in _shards(store):
        yield norms.view(torch.int32).long()


def _counted(parts: Iterable[Tensor]) -> Tensor:
    total = torch.zeros(2**16, dtype=torch.long)
    for part in parts:
        total += torch.bincount(part, minlength=2**16)
    return total


def _reached(counts: Tensor, rank: int) -> tuple[int, int]:
    """The value at which the running count passes `rank` (from 0), and how many stand before it."""
    running = counts.cumsum(0)
    value = int(torch.searchsorted(running, rank, right=True))
    return value, int(running[value] - counts[value])

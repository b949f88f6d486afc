"""Vectors straight from a model, in the order that a training would read them in from disk.

Text is cut into units as an extraction cuts it into shards, and shuffled as shards are: with the same seed and type the
training sees the vectors that it would see from stored activations, in the same order. A buffer is filled by running
the model, up to the last site, over the units that the order names; so a training that goes on fills the buffer of its
step again and loses nothing. One pass of the model serves every site.

What cannot be known before the model runs is which vectors are outliers: they are left out of a batch, which is then
shorter by them. Scales and limits come from the first vectors of the order, `SAMPLE_TOKENS` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jobs.interp.errors import Stopped, Unusable
from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel
from jobs.interp.reading import HeldOutText, heldout_documents
from jobs.interp.shuffling import BUFFER_BYTES, Buffer, Order
from jobs.interp.site import Site
from jobs.interp.sizes import MEASURED_ROWS
from jobs.interp.tokens import Row, batches_by_length, kept, pad

#: Tokens of a unit at least: those of a shard of stored activations.
UNIT_TOKENS = 16_384
#: Tokens that scales and limits are measured on; a mean over so many is known to a part in a thousand.
SAMPLE_TOKENS = 131_072
#: The site of an autoencoder, or a transcoder's input and target.
View = tuple[Site, ...]


@dataclass(frozen=True)
class Text:
    """Rows of tokens by what they are for. `units`: those to train on, in pieces; `documents`: numbers held out."""

    units: tuple[tuple[Row, ...], ...]
    heldout: tuple[Row, ...]
    documents: Tensor
    excluded: frozenset[int]

    @classmethod
    def divided(
        cls,
        rows: Sequence[Row],
        excluded: Iterable[int],
        heldout_fraction: float,
        unit_tokens: int = UNIT_TOKENS,
    ) -> Text:
        """Divide `rows` by document, as `reading.split` divides stored vectors. Raises `Unusable` for too few."""
        left_out = frozenset(excluded)
        numbers = sorted({row.document for row in rows if _count(row, left_out)})
        if len(numbers) < 2:
            raise Unusable(
                "There is too little text to train on one part and hold out another; take more of it."
            )
        held = heldout_documents(torch.tensor(numbers, dtype=torch.int32), heldout_fraction)
        out = set(held.tolist())
        units = [
            tuple(row for row in unit if row.document not in out)
            for unit in _units(rows, left_out, unit_tokens)
        ]
        return cls(tuple(units), tuple(row for row in rows if row.document in out), held, left_out)

    def count(self, rows: Iterable[Row]) -> int:
        """Vectors that these rows give."""
        return sum(_count(row, self.excluded) for row in rows)

    def heldout_text(self, max_tokens: int) -> HeldOutText:
        """Rows of held-out documents, up to so many tokens."""
        rows: list[tuple[int, ...]] = []
        for row in self.heldout:
            if max_tokens > 0:
                rows.append(tuple(row.ids[:max_tokens]))
                max_tokens -= len(rows[-1])
        return HeldOutText(rows)


def _count(row: Row, excluded: frozenset[int]) -> int:
    return sum(token not in excluded for token in row.ids)


def _units(rows: Sequence[Row], excluded: frozenset[int], unit_tokens: int) -> list[list[Row]]:
    units: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        if size >= unit_tokens:
            units.append([])
            size = 0
        units[-1].append(row)
        size += _count(row, excluded)
    return units


class Measured(NamedTuple):
    """What a sample says. `limits`: longest vector that counts, by site; by view `norms`, mean lengths of its sites,
    and `dropped`, outliers among the vectors of the sample."""

    limits: dict[Site, float] | None
    norms: dict[View, tuple[float, ...]]
    dropped: dict[View, int]


class _Filled(NamedTuple):
    buffer: Buffer
    order: Tensor
    vectors: dict[Site, Tensor]


class Live:
    """Batches of a model's own vectors, for several views at once. `batch` is a function of (seed, step)."""

    def __init__(
        self,
        model: LanguageModel,
        text: Text,
        views: Iterable[View],
        *,
        batch_size: int,
        seed: int,
        rows_per_pass: int = 16,
        buffer_bytes: int = BUFFER_BYTES,
        on_tokens: Callable[[int], None] = lambda tokens: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.text, self.batch_size, self.rows_per_pass = model, text, batch_size, rows_per_pass
        self.views = tuple(dict.fromkeys(views))
        self.sites = tuple(dict.fromkeys(site for view in self.views for site in view))
        self.on_tokens, self.should_stop = on_tokens, should_stop
        itemsize = next(model.model.parameters()).dtype.itemsize
        sizes = [text.count(unit) for unit in text.units]
        self.order = Order(sizes, max(1, buffer_bytes // (itemsize * model.d_model)), seed)
        self.limits: dict[Site, float] | None = None
        self._filled: _Filled | None = None
        self._batch: tuple[int, dict[View, Tensor]] | None = None

    def measure(self, outlier_ratio: float | None) -> Measured:
        """Read the sample; from now on longer vectors than its limits are left out."""
        found = self._sample()
        norms = {site: vectors.float().norm(dim=1).cpu() for site, vectors in found.items()}
        if outlier_ratio is not None:
            self.limits = {site: outlier_ratio * lengths.median().item() for site, lengths in norms.items()}
        means, dropped = {}, {}
        for view in self.views:
            lengths = torch.stack([norms[site] for site in view], dim=1)  # [n, sites]
            usual = self._usual(lengths, view)
            means[view] = tuple(lengths[usual].double().mean(0).tolist())
            dropped[view] = int((~usual).sum())
        return Measured(self.limits, means, dropped)

    def at(self, view: View) -> _At:
        """The stream of one view."""
        return _At(self, view)

    def batch(self, step: int) -> dict[View, Tensor]:
        """The batch of `step` (from 0) of every view. Shapes: `[at most batch_size, widths side by side]`."""
        if self._batch is None or self._batch[0] != step:
            self._batch = (step, self._drawn(step))
        return self._batch[1]

    def release(self) -> None:
        """Let go of the buffer."""
        self._filled = self._batch = None

    def training(self, view: View) -> Iterator[Tensor]:
        """The vectors to train on, in the order of the text. Shapes: as `batch`'s, float32."""
        yield from self._read(view, (row for unit in self.text.units for row in unit))

    def heldout(self, view: View) -> Iterator[Tensor]:
        """Those of held-out documents."""
        yield from self._read(view, self.text.heldout)

    def _drawn(self, step: int) -> dict[View, Tensor]:
        found: dict[View, list[Tensor]] = {view: [] for view in self.views}
        for part in self.order.parts(step * self.batch_size, self.batch_size):
            filled = self._fill(part.buffer)
            which = filled.order[part.start : part.stop]
            for view, pieces in found.items():
                pieces.append(self._kept([filled.vectors[site][which] for site in view], view))
            del filled, which  # or this buffer would stay while the next one is filled
        batches = {view: torch.cat(pieces) for view, pieces in found.items()}
        if empty := [view for view, batch in batches.items() if not len(batch)]:
            names = " and ".join(site.hook_name for site in empty[0])
            raise Unusable(
                f"All {self.batch_size} vectors of step {step + 1} at {names} are outliers; raise outlier_ratio."
            )
        return batches

    def _fill(self, buffer: Buffer) -> _Filled:
        if self._filled is None or self._filled.buffer != buffer:
            self._filled = None  # let go of the old buffer before the new one is filled
            order = self.order.permutation(buffer).to(self.model.device)
            self._filled = _Filled(buffer, order, self._vectors([self.text.units[n] for n in buffer.units]))
        return self._filled

    def _sample(self) -> dict[Site, Tensor]:
        """Vectors of the first units of the first pass."""
        units, size = [], 0
        for number in (unit for buffer in self.order.plan(0) for unit in buffer.units):
            if size < SAMPLE_TOKENS:
                units.append(self.text.units[number])
                size += self.order.sizes[number]
        return self._vectors(units)

    def _vectors(self, units: Sequence[Sequence[Row]]) -> dict[Site, Tensor]:
        """What the model gives at the sites. Shapes: each `[vectors of the units in order, d]`, the model's type."""
        found: dict[Site, Tensor] = {}
        total, first = sum(self.text.count(unit) for unit in units), 0
        for unit in units:
            counts = [self.text.count([row]) for row in unit]
            starts = list(accumulate(counts, initial=first))
            first = starts[-1]
            for indexes in batches_by_length([len(row.ids) for row in unit], self.rows_per_pass):
                if self.should_stop():
                    raise Stopped("Stopped while the model read text.")
                places = torch.cat([torch.arange(starts[n], starts[n] + counts[n]) for n in indexes])
                for site, vectors in self._passed([unit[n] for n in indexes]).items():
                    if site not in found:
                        found[site] = vectors.new_empty(total, vectors.shape[1])
                    found[site][places.to(vectors.device)] = vectors
        return found

    def _passed(self, rows: Sequence[Row]) -> dict[Site, Tensor]:
        """One forward pass. Shapes: each `[kept tokens, d]`, row after row."""
        batch = pad([row.ids for row in rows], self.model.pad.id)
        wanted = kept(batch.input_ids, batch.mask, self.text.excluded).to(self.model.device)
        values = capture(self.model.model, self.sites, **batch.model_inputs(self.model.device))
        self.on_tokens(int(batch.mask.sum()))
        return {site: value[wanted] for site, value in values.items()}

    def _read(self, view: View, rows: Iterable[Row]) -> Iterator[Tensor]:
        held: list[Row] = []
        for row in rows:
            held.append(row)
            if len(held) == self.rows_per_pass:
                yield from self._one(view, held)
                held = []
        if held:
            yield from self._one(view, held)

    def _one(self, view: View, rows: Sequence[Row]) -> Iterator[Tensor]:
        passed = self._passed(rows)
        for part in self._kept([passed[site] for site in view], view).split(MEASURED_ROWS):
            if len(part):
                yield part.float()

    def _kept(self, sides: list[Tensor], view: View) -> Tensor:
        """Vectors side by side, without outliers. Shapes: each `[n, d]` → `[at most n, widths]`."""
        rows = torch.cat(sides, dim=1)
        if self.limits is None:
            return rows
        return rows[self._usual(torch.stack([side.float().norm(dim=1) for side in sides], dim=1), view)]

    def _usual(self, lengths: Tensor, view: View) -> Tensor:
        """Shapes: `[n, sites]` → `[n]` bool."""
        if self.limits is None:
            return torch.ones(len(lengths), dtype=torch.bool)
        return (lengths <= torch.tensor([self.limits[site] for site in view]).to(lengths.device)).all(1)


@dataclass(frozen=True)
class _At:
    """One view of a live source, as a stream."""

    source: Live
    view: View

    def batch(self, step: int) -> Tensor:
        return self.source.batch(step)[self.view]

    def epoch(self, step: int) -> int:
        """The pass over the text, from 0, in which the batch of `step` begins."""
        return step * self.source.batch_size // self.source.order.length


def state_of(measured: Measured) -> dict[str, Any]:
    """The same as JSON: what was measured once holds for the whole training, also on another card."""
    limits = None
    if measured.limits is not None:
        limits = {site.hook_name: value.hex() for site, value in measured.limits.items()}
    norms = {_name(view): [value.hex() for value in values] for view, values in measured.norms.items()}
    dropped = {_name(view): count for view, count in measured.dropped.items()}
    return {"limits": limits, "norms": norms, "dropped": dropped}


def measured_of(state: dict[str, Any], views: Iterable[View]) -> Measured:
    """`state_of` read back."""
    views = tuple(views)
    sites = {site.hook_name: site for view in views for site in view}
    limits: dict[Site, float] | None = None
    if state["limits"] is not None:
        limits = {sites[name]: float.fromhex(value) for name, value in state["limits"].items()}
    norms = {view: tuple(float.fromhex(v) for v in state["norms"][_name(view)]) for view in views}
    return Measured(limits, norms, {view: state["dropped"][_name(view)] for view in views})


def _name(view: View) -> str:
    return " ".join(site.hook_name for site in view)

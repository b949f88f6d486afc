"""Where the vectors of a training come from: activations on disk, or a model that is run. One face for both."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from jobs.interp.errors import Stopped, Unusable
from jobs.interp.files import read_json, write_json
from jobs.interp.live import Live, Text, View, measured_of, state_of
from jobs.interp.models import LanguageModel
from jobs.interp.reading import HeldOutText, Split, Store, heldout_text, split
from jobs.interp.sae.train import Stream
from jobs.interp.shuffling import Shuffled
from jobs.interp.site import Site
from jobs.interp.tokens import Row

#: Vectors of held-out documents that an SAE straight from a model is measured on, at most.
HELDOUT_VECTORS = 131_072
#: What is held out are numbers of documents: of another text they would name others, which were trained on.
CHANGED_TEXT = (
    "The text is not the one that this training began with, so held-out documents would be others; "
    "pin its revision (hf:owner/name@commit) or restore it, or retry from the start."
)
#: Done, total, unit and stage, as a job reports them.
Standing = tuple[int, int, str, str]


class Source(Protocol):
    """The data of a training. A view is the site of an autoencoder, or a transcoder's two."""

    def stream(self, view: View) -> Stream: ...

    def mean_norms(self, view: View) -> tuple[float, ...]: ...

    def limits(self) -> Mapping[Site, float] | None:
        """The longest vector that counts, by site."""

    def training(self, view: View) -> Iterator[Tensor]:
        """Vectors that are trained on, in the order of the text, float32."""

    def heldout(self, view: View) -> Iterator[Tensor]: ...

    def heldout_text(self, max_tokens: int) -> HeldOutText: ...

    def epoch(self, step: int) -> int:
        """The pass over the data, from 0, in which the batch of `step` begins."""

    def stands(self, done: int, total: int, unit: str, stage: str) -> None:
        """How far the job is, for what is told while the data are read."""

    def release(self) -> None:
        """The training is over: let go of what only it needs."""

    def facts(self, view: View) -> dict[str, int]:
        """`train_tokens`: vectors of one pass; `dropped_outliers`."""


class Stored:
    """Activations on disk. `folders`: by site."""

    def __init__(
        self,
        folder: Path,
        folders: Mapping[Site, str],
        views: Iterable[View],
        *,
        batch_size: int,
        seed: int,
        rows: int,
        heldout_fraction: float,
        outlier_ratio: float | None,
    ) -> None:
        self.folder, self.rows = folder, rows
        self.splits: dict[View, Split] = {
            view: split(
                Store(*(folder / folders[site] for site in view)),
                heldout_fraction=heldout_fraction,
                outlier_ratio=outlier_ratio,
            )
            for view in views
        }
        self.streams = {
            view: _Once(Shuffled(found.train, batch_size, seed)) for view, found in self.splits.items()
        }

    def stream(self, view: View) -> Stream:
        return self.streams[view]

    def mean_norms(self, view: View) -> tuple[float, ...]:
        return self.splits[view].train.mean_norms()

    def limits(self) -> dict[Site, float] | None:
        found: dict[Site, float] = {}
        for view, parts in self.splits.items():
            if parts.norm_limits is None:
                return None
            found |= dict(zip(view, parts.norm_limits, strict=True))
        return found

    def training(self, view: View) -> Iterator[Tensor]:
        return self.splits[view].train.batches(self.rows)

    def heldout(self, view: View) -> Iterator[Tensor]:
        return self.splits[view].heldout.batches(self.rows)

    def heldout_text(self, max_tokens: int) -> HeldOutText:
        documents = next(iter(self.splits.values())).documents
        return heldout_text(self.folder, documents, max_tokens)

    def epoch(self, step: int) -> int:
        return max(stream.shuffled.epoch(step) for stream in self.streams.values())

    def stands(self, done: int, total: int, unit: str, stage: str) -> None:
        pass

    def release(self) -> None:
        for stream in self.streams.values():
            stream.held = None
            stream.shuffled.release()

    def facts(self, view: View) -> dict[str, int]:
        parts = self.splits[view]
        return {"train_tokens": len(parts.train), "dropped_outliers": parts.dropped_outliers}


@dataclass
class _Once:
    """A stream that several SAEs read in step: each batch is made once."""

    shuffled: Shuffled
    held: tuple[int, Tensor] | None = None

    def batch(self, step: int) -> Tensor:
        if self.held is None or self.held[0] != step:
            self.held = (step, self.shuffled.batch(step))
        return self.held[1]


class Running:
    """Vectors straight from a model. What its first vectors say of scales and limits is kept in `memory`, so that a
    training that goes on, even on another card, keeps to it.

    Raises `Unusable` when the text is not the one that `memory` was written with.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: Sequence[Row],
        excluded: Iterable[int],
        views: Sequence[View],
        memory: Path,
        *,
        batch_size: int,
        seed: int,
        rows_per_pass: int,
        heldout_fraction: float,
        outlier_ratio: float | None,
        on_tokens: Callable[[int, Standing], None] = lambda tokens, standing: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.standing: Standing = (0, 0, "", "reading")
        text = Text.divided(rows, excluded, heldout_fraction)
        self.live = Live(
            model,
            text,
            views,
            batch_size=batch_size,
            seed=seed,
            rows_per_pass=rows_per_pass,
            on_tokens=lambda tokens: on_tokens(tokens, self.standing),
            should_stop=should_stop,
        )
        text_sha256 = text_digest(rows)
        if memory.exists():
            state = read_json(memory)
            if state["text_sha256"] != text_sha256:
                raise Unusable(CHANGED_TEXT)
            self.measured = measured_of(state, self.live.views)
            self.live.limits = self.measured.limits
        else:
            self.measured = self.live.measure(outlier_ratio)
            write_json(memory, state_of(self.measured) | {"text_sha256": text_sha256})
        self.streams = {view: self.live.at(view) for view in self.live.views}

    def stream(self, view: View) -> Stream:
        return self.streams[view]

    def mean_norms(self, view: View) -> tuple[float, ...]:
        return self.measured.norms[view]

    def limits(self) -> dict[Site, float] | None:
        return self.measured.limits

    def training(self, view: View) -> Iterator[Tensor]:
        return self.live.training(view)

    def heldout(self, view: View) -> Iterator[Tensor]:
        return self.live.heldout(view)

    def heldout_text(self, max_tokens: int) -> HeldOutText:
        return self.live.text.heldout_text(max_tokens)

    def epoch(self, step: int) -> int:
        return self.live.at(self.live.views[0]).epoch(step)

    def stands(self, done: int, total: int, unit: str, stage: str) -> None:
        self.standing = (done, total, unit, stage)

    def release(self) -> None:
        self.live.release()

    def facts(self, view: View) -> dict[str, int]:
        return {"train_tokens": self.live.order.length, "dropped_outliers": self.measured.dropped[view]}


def held(rows: Iterable[Row], should_stop: Callable[[], bool] = lambda: False) -> list[Row]:
    """All rows at once, four bytes a token. Raises `Stopped` between rows when `should_stop()`."""
    found = []
    for row in rows:
        if should_stop():
            raise Stopped("Stopped while the text was read.")
        found.append(Row(row.document, array("i", row.ids)))
    return found


def text_digest(rows: Iterable[Row]) -> str:
    """SHA-256 over number of document, length and tokens of each row."""
    total = hashlib.sha256()
    for row in rows:
        total.update(array("i", [row.document, len(row.ids), *row.ids]).tobytes())
    return total.hexdigest()

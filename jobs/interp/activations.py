"""Activations of a model, written to disk in shards; `reading` reads them back.

Layout of the folder (all files are complete or absent; a killed extraction goes on with the first missing
shard):

    recipe.json                                    what the shards were made with; another recipe starts over
    tokens/… blocks.4.hook_resid_post/…            the shards (`shards`)
    activations.json                               the summary, written last

Rows are made while the model reads (`beside`), so memory does not grow with the corpus. Rows of a shard are run in
batches of similar length and put back in the order of the corpus, so neither batch size, padding nor shard size changes
which vector stands where. Cost: one forward pass up to the last site, and `tokens * d_model * bytes of dtype` on disk
per site.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.interp.beside import Ahead, Behind
from jobs.interp.errors import Stopped, Unusable
from jobs.interp.files import read_json, write_json
from jobs.interp.hooks import capture
from jobs.interp.microbatches import MicroBatches
from jobs.interp.models import DTYPES, LanguageModel
from jobs.interp.norms import statistics
from jobs.interp.reading import Store
from jobs.interp.shards import Shard, forget_from
from jobs.interp.site import Site, place_of
from jobs.interp.sizes import SHARD_TOKENS
from jobs.interp.tokens import Row, Side, batches_by_length, kept, pad

SUMMARY = "activations.json"

Progress = Callable[[int, int, dict[str, float]], None]
Question = Callable[[], bool]


@dataclass(frozen=True)
class Recipe:
    """How to extract: everything beside the rows that decides what is in the files."""

    sites: tuple[Site, ...]
    dtype: str = "bfloat16"
    exclude_special: bool = True
    shard_tokens: int = SHARD_TOKENS

    def digest(self, model: LanguageModel) -> str:
        """SHA-256 over the recipe and the model's name: with equal rows, equal digests make equal files."""
        return hashlib.sha256(f"{self}|{model.name}|{model.special_ids}".encode()).hexdigest()

    def require_places(self, model: LanguageModel) -> None:
        """Raises `Unusable` for a site that the model does not have."""
        for site in self.sites:
            place_of(model.model, site)

    def excluded(self, model: LanguageModel) -> tuple[int, ...]:
        return model.special_ids if self.exclude_special else ()


def extract(
    model: LanguageModel,
    rows: Iterable[Row],
    recipe: Recipe,
    folder: Path,
    *,
    batch_size: int = 16,
    side: Side = "right",
    on_progress: Progress = lambda *_: None,
    should_stop: Question = lambda: False,
) -> dict[str, Any]:
    """Run `model` over `rows` and write what passes the recipe's sites to `folder`; returns the summary.

    `on_progress(done, total, {"tokens_per_s": ...})` counts tokens that the model reads. Continues a folder
    that an earlier call with the same recipe left unfinished, as far as its shards are made of the same rows.
    A batch that memory is too small for is run in halves (`microbatches`).
    Raises `Unusable` (context over the limit, unknown site, value that dtype cannot hold), `NonFinite`,
    `Stopped`, `torch.OutOfMemoryError`.
    """
    places = {site: place_of(model.model, site).path for site in recipe.sites}
    start(folder, recipe.digest(model))
    tally, pace = Tally(), Pace(rows, on_progress)
    run = Run(model, recipe, MicroBatches(batch_size), side, pace, should_stop)
    with Behind() as behind, Ahead(parted(rows, recipe.excluded(model), recipe.shard_tokens)) as parts:
        for number, members in enumerate(parts):
            shard = Shard(folder, number, members, recipe.sites)
            tally.add(shard.rows)
            if shard.is_made():
                pace.skip(shard.tokens)
                continue
            run.fill(shard)
            behind(lambda shard=shard: shard.write(recipe.dtype))  # type: ignore[misc]  # bound now, not when called
    forget_from(folder, tally.shards)
    summary = tally.facts() | site_facts(folder, recipe, places) | {"micro_batch": run.parts.size}
    summary["tokens_dropped"] = summary["tokens_read"] - summary["tokens"]
    write_json(folder / SUMMARY, summary)
    return summary


@dataclass(frozen=True)
class Run:
    """The model at work on one shard after the other."""

    model: LanguageModel
    recipe: Recipe
    parts: MicroBatches
    side: Side
    pace: Pace
    should_stop: Question

    def fill(self, shard: Shard) -> None:
        """Run the rows of a shard and hand each its vectors."""
        lengths = [len(row.ids) for row in shard.rows]
        self.model.require_context(max(lengths))
        for indexes in batches_by_length(lengths, self.parts.size):
            if self.should_stop():
                raise Stopped("The extraction was stopped; finished shards are kept.")
            for part, _ in self.parts.over(indexes, lambda part: self.read(shard, part)):
                self.pace.step(sum(lengths[index] for index in part))

    def read(self, shard: Shard, indexes: Sequence[int]) -> bool:
        """One forward pass over some rows of a shard. Shapes: values `[batch, seq, d_model]`, wanted `[batch, seq]`."""
        batch = pad([shard.rows[index].ids for index in indexes], self.model.pad.id, side=self.side)
        wanted = kept(batch.input_ids, batch.mask, self.recipe.excluded(self.model))
        values = capture(self.model.model, self.recipe.sites, **batch.model_inputs(self.model.device))
        place, counts = wanted.flatten().nonzero().flatten(), wanted.sum(1).tolist()
        for site in self.recipe.sites:
            value = values.pop(site)
            chosen = value.flatten(0, 1).index_select(0, place.to(value.device))  # [kept, d_model]
            shard.sites[site].put(indexes, counts, chosen, DTYPES[self.recipe.dtype])
        for index, mine, real in zip(indexes, wanted, batch.mask.bool(), strict=True):
            shard.keep[index] = mine[real]
        return True


class Pace:
    """Counts tokens and tells how fast they go; skipped ones do not count as fast."""

    def __init__(self, rows: Iterable[Row], on_progress: Progress) -> None:
        self.rows, self.done, self.run = rows, 0, 0
        self.known = sum(len(row.ids) for row in rows) if isinstance(rows, Sequence) else 0
        self.on_progress, self.began = on_progress, time.monotonic()

    @property
    def total(self) -> int:
        """Tokens in all, as far as can be told (`RowStream.expected`)."""
        return max(self.done, self.known or getattr(self.rows, "expected", 0))

    def skip(self, tokens: int) -> None:
        self.done += tokens

    def step(self, tokens: int) -> None:
        self.done += tokens
        self.run += tokens
        speed = self.run / max(time.monotonic() - self.began, 1e-9)
        self.on_progress(self.done, self.total, {"tokens_per_s": speed})


@dataclass
class Tally:
    """What has been read so far."""

    shards: int = 0
    rows: int = 0
    tokens: int = 0
    longest: int = 0
    documents: set[int] = field(default_factory=set)  # of the newest row; earlier ones are counted
    counted: int = 0

    def add(self, rows: Sequence[Row]) -> None:
        self.shards += 1
        self.rows += len(rows)
        self.tokens += sum(len(row.ids) for row in rows)
        self.longest = max(self.longest, *(len(row.ids) for row in rows), 0)
        found = {row.document for row in rows}
        self.counted += len(found - self.documents)
        self.documents = {rows[-1].document}

    def facts(self) -> dict[str, Any]:
        return {
            "tokens_read": self.tokens,
            "rows": self.rows,
            "documents": self.counted,
            "context_size": self.longest,
        }


def start(folder: Path, digest: str) -> None:
    """Make the folder ready: shards of another recipe go."""
    recipe = folder / "recipe.json"
    if recipe.exists() and read_json(recipe).get("digest") != digest:
        shutil.rmtree(folder)
    write_json(recipe, {"digest": digest})


def parted(rows: Iterable[Row], excluded: Iterable[int], shard_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows with at least `shard_tokens` kept tokens per shard; the last may be smaller.

    Raises `Unusable` when no token is left at all.
    """
    members: list[Row] = []
    left_out, size, total = frozenset(excluded), 0, 0
    for row in rows:
        if size >= shard_tokens:
            yield members
            members, size = [], 0
        members.append(row)
        here = sum(token not in left_out for token in row.ids)
        size, total = size + here, total + here
    if not total:
        raise Unusable("No token is left once special tokens are excluded.")
    yield members


def site_facts(folder: Path, recipe: Recipe, places: dict[Site, str]) -> dict[str, Any]:
    """What is on the disk, site by site."""
    sites = [site_summary(folder / site.hook_name, site, places[site]) for site in recipe.sites]
    return {
        "sites": sites,
        "dtype": recipe.dtype,
        "d_model": sites[0]["d_model"],
        "tokens": sites[0]["tokens"],
        "exclude_special": recipe.exclude_special,
    }


def site_summary(folder: Path, site: Site, path: str) -> dict[str, Any]:
    store = Store(folder)
    return {
        **site.as_dict(),
        "hook_name": site.hook_name,
        "module": path,
        "folder": folder.name,
        "d_model": store.d_model,
        "tokens": sum(store.sizes),
        "shard_tokens": store.sizes,
        **statistics(store),
    }

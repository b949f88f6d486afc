"""Activations of a model, written to disk in shards; `reading` reads them back.

Layout of the folder (all files are complete or absent; a killed extraction goes on with the first missing
shard):

    recipe.json                                    what the shards were made with; another recipe starts over
    tokens/shard_00000.safetensors                 ids, lengths, documents of the rows, kept per token: the
    texts blocks.4.hook_resid_post/shard_00000.safetensors   acts [n, d_model]; norms, ids, document, row,
    position [n] activations.json                               the summary, written last

Rows of a shard are run in batches of similar length and put back in the order of the corpus, so neither batch
size nor shard size changes which vector stands where. Cost: one forward pass up to the last site, and
`tokens * d_model * bytes of dtype` on disk per site.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.files import read_json, write_json, write_tensors
from jobs.interp.hooks import capture
from jobs.interp.models import DTYPES, LanguageModel
from jobs.interp.reading import Store
from jobs.interp.site import Site, place_of
from jobs.interp.tokens import Row, batches_by_length, kept, pad

SUMMARY = "activations.json"
SHARD_TOKENS = 16_384

Progress = Callable[[int, int, dict[str, float]], None]
Question = Callable[[], bool]


@dataclass(frozen=True)
class Recipe:
    """How to extract: everything that decides what is in the files."""

    sites: tuple[Site, ...]
    dtype: str = "bfloat16"
    exclude_special: bool = True
    shard_tokens: int = SHARD_TOKENS

    def digest(self, rows: Sequence[Row], model: LanguageModel) -> str:
        """SHA-256 over the recipe, the token rows and the model's name: equal digests make equal files."""
        total = hashlib.sha256(f"{self}|{model.name}|{model.special_ids}".encode())
        for row in rows:
            total.update(f"{row.document}:{row.ids}\n".encode())
        return total.hexdigest()


def extract(
    model: LanguageModel,
    rows: Sequence[Row],
    recipe: Recipe,
    folder: Path,
    *,
    batch_size: int = 16,
    on_progress: Progress = lambda *_: None,
    should_stop: Question = lambda: False,
) -> dict[str, Any]:
    """Run `model` over `rows` and write what passes the recipe's sites to `folder`; returns the summary.

    `on_progress(done, total, {"tokens_per_s": ...})` counts tokens that the model reads. Continues a folder
    that an earlier call with the same recipe left unfinished.
    Raises `Unusable` (context over the limit, unknown site, value that dtype cannot hold), `NonFinite`,
    `Stopped`.
    """
    model.require_context(max(len(row.ids) for row in rows))
    places = {site: place_of(model.model, site).path for site in recipe.sites}
    _start(folder, recipe.digest(rows, model))
    shards = _plan(rows, _kept_counts(model, rows, recipe), recipe.shard_tokens)
    pace = _Pace(sum(len(row.ids) for row in rows), on_progress)
    for number, members in enumerate(shards):
        size = sum(len(row.ids) for row in members)
        if _shard(folder / "tokens", number).exists():
            pace.skip(size)
        else:
            _extract_shard(model, members, recipe, folder, number, batch_size, pace, should_stop)
    summary = _summary(folder, recipe, places, rows, len(shards))
    write_json(folder / SUMMARY, summary)
    return summary


class _Pace:
    """Counts tokens and tells how fast they go; skipped ones do not count as fast."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self.total, self.done, self.run = total, 0, 0
        self.on_progress, self.began = on_progress, time.monotonic()

    def skip(self, tokens: int) -> None:
        self.done += tokens

    def step(self, tokens: int) -> None:
        self.done += tokens
        self.run += tokens
        speed = self.run / max(time.monotonic() - self.began, 1e-9)
        self.on_progress(self.done, self.total, {"tokens_per_s": speed})


def _start(folder: Path, digest: str) -> None:
    recipe = folder / "recipe.json"
    if recipe.exists() and read_json(recipe).get("digest") != digest:
        shutil.rmtree(folder)
    write_json(recipe, {"digest": digest})


def _kept_counts(model: LanguageModel, rows: Sequence[Row], recipe: Recipe) -> list[int]:
    excluded = set(_excluded(model, recipe))
    return [sum(token not in excluded for token in row.ids) for row in rows]


def _excluded(model: LanguageModel, recipe: Recipe) -> tuple[int, ...]:
    return model.special_ids if recipe.exclude_special else ()


def _plan(rows: Sequence[Row], counts: Sequence[int], shard_tokens: int) -> list[list[Row]]:
    """Consecutive rows with at least `shard_tokens` kept tokens per shard; the last may be smaller."""
    if not sum(counts):
        raise Unusable("No token is left once special tokens are excluded.")
    shards: list[list[Row]] = [[]]
    size = 0
    for row, count in zip(rows, counts, strict=True):
        if size >= shard_tokens:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += count
    return shards


def _extract_shard(
    model: LanguageModel,
    rows: list[Row],
    recipe: Recipe,
    folder: Path,
    number: int,
    batch_size: int,
    pace: _Pace,
    should_stop: Question,
) -> None:
    """Run the rows of one shard and write its files, the texts last: their presence says that all are
    there.
    """
    found: dict[Site, list[Tensor]] = {site: [torch.empty(0)] * len(rows) for site in recipe.sites}
    keep: list[Tensor] = [torch.empty(0)] * len(rows)
    for indexes in batches_by_length([len(row.ids) for row in rows], batch_size):
        if should_stop():
            raise Stopped("The extraction was stopped; finished shards are kept.")
        batch = pad([rows[index].ids for index in indexes], model.pad.id)
        wanted = kept(batch.input_ids, batch.mask, _excluded(model, recipe))
        values = capture(model.model, recipe.sites, **batch.model_inputs(model.device))
        _hand_out(values, wanted, indexes, found)
        for index, chosen, real in zip(indexes, wanted, batch.mask.bool(), strict=True):
            keep[index] = chosen[real]
        pace.step(int(batch.mask.sum()))
    for site in recipe.sites:
        _write_site(folder / site.hook_name, number, torch.cat(found[site]), rows, keep, recipe.dtype)
    _write_tokens(folder / "tokens", number, rows, keep)


def _hand_out(
    values: dict[Site, Tensor], wanted: Tensor, indexes: list[int], found: dict[Site, list[Tensor]]
) -> None:
    """Give each row of the shard its kept vectors. Shapes: values `[batch, seq, d_model]`, wanted `[batch,
    seq]`.
    """
    for site, value in values.items():
        vectors = value[wanted.to(value.device)].float().cpu()  # [kept in batch, d_model]
        for index, rows in zip(indexes, vectors.split(wanted.sum(1).tolist()), strict=True):
            found[site][index] = rows


def _write_site(
    folder: Path, number: int, values: Tensor, rows: list[Row], keep: list[Tensor], dtype: str
) -> None:
    stored = values.to(DTYPES[dtype])
    if not torch.isfinite(stored).all():
        _explain_non_finite(values, dtype, folder.name)
    counts = torch.tensor([int(chosen.sum()) for chosen in keep])
    tensors = {
        "acts": stored,
        "norms": values.norm(dim=1),
        "ids": torch.cat([_ids(row)[chosen] for row, chosen in zip(rows, keep, strict=True)]),
        "document": torch.repeat_interleave(_documents(rows), counts),
        "row": torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts),
        "position": torch.cat([chosen.nonzero().flatten().int() for chosen in keep]),
    }
    write_tensors(_shard(folder, number), tensors)


def _explain_non_finite(values: Tensor, dtype: str, site: str) -> None:
    if torch.isfinite(values).all():
        raise Unusable(
            f"{site} reaches {values.abs().max():.3g}, more than {dtype} can hold; use bfloat16 or float32."
        )
    raise NonFinite(f"The model gave values that are not finite at {site}.")


def _write_tokens(folder: Path, number: int, rows: list[Row], keep: list[Tensor]) -> None:
    tensors = {
        "ids": torch.cat([_ids(row) for row in rows]),
        "lengths": torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        "documents": _documents(rows),
        "kept": torch.cat(keep).to(torch.uint8),
    }
    write_tensors(_shard(folder, number), tensors)


def _ids(row: Row) -> Tensor:
    return torch.tensor(row.ids, dtype=torch.int32)


def _documents(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.document for row in rows], dtype=torch.int32)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def _summary(
    folder: Path, recipe: Recipe, places: dict[Site, str], rows: Sequence[Row], n_shards: int
) -> dict[str, Any]:
    read = sum(len(row.ids) for row in rows)
    sites = [_site_summary(folder / site.hook_name, site, places[site], n_shards) for site in recipe.sites]
    return {
        "sites": sites,
        "dtype": recipe.dtype,
        "d_model": sites[0]["d_model"],
        "tokens": sites[0]["tokens"],
        "tokens_read": read,
        "tokens_dropped": read - sites[0]["tokens"],
        "exclude_special": recipe.exclude_special,
        "rows": len(rows),
        "documents": len({row.document for row in rows}),
        "context_size": max(len(row.ids) for row in rows),
    }


def _site_summary(folder: Path, site: Site, path: str, n_shards: int) -> dict[str, Any]:
    store = Store(folder)
    norms = torch.cat([store.read(number, "norms") for number in range(n_shards)])
    return {
        **site.as_dict(),
        "hook_name": site.hook_name,
        "module": path,
        "folder": folder.name,
        "d_model": store.d_model,
        "tokens": len(norms),
        "shard_tokens": store.sizes,
        "norm_median": norms.median().item(),
        "norm_mean": norms.double().mean().item(),
        "norm_max": norms.max().item(),
    }

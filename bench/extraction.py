"""Claim: extraction is at least twice as fast as a whole forward pass with a hook, and within 10 % of the least; more
sites cost less than 5 % each beside what they write.

    MISTUDIO_HOME=... .venv/bin/python -m bench.extraction [block] [rounds]

The least is a pass through the model cut off after the block: no later block, no head. The demo's model, padded
batches of the built-in corpus, float32 on a CPU. Ours is `extract` whole, tokenizing beside, with its files on disk;
*six* is the same for all six sites of the block. Order A-B-A: floor, ours, six, hook, six, ours, floor; the median of
all rounds counts. Takes the model that the demo left in `$MISTUDIO_HOME/cache/demo-model`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.interp import corpora, models, tokens
from jobs.interp.activations import Recipe, extract
from jobs.interp.site import HOOKS, Site, blocks_of
from jobs.interp.tokens import Row, batches_by_length, pad

TOKENS, CONTEXT, BATCH = 2048, 128, 8


def by_hook(model: models.LanguageModel, rows: list[Row], block: int) -> None:
    """A whole pass, the block's output noted by a hook: what most scripts do."""
    seen: list[torch.Tensor] = []
    handle = blocks_of(model.model)[1][block].register_forward_hook(lambda _m, _a, out: seen.append(out))
    passes(model.model, model.pad.id, rows)
    handle.remove()


def cut_off(model: models.LanguageModel, rows: list[Row], block: int) -> None:
    """The model without later blocks and head."""
    base = model.model.get_decoder()
    whole = base.layers
    base.layers = nn.ModuleList(list(whole)[: block + 1])
    passes(base, model.pad.id, rows)
    base.layers = whole


def passes(model: nn.Module, pad_id: int, rows: list[Row]) -> None:
    with torch.no_grad():
        for indexes in batches_by_length([len(row.ids) for row in rows], BATCH):
            batch = pad([rows[index].ids for index in indexes], pad_id)
            model(**batch.model_inputs("cpu"), use_cache=False)


@cache
def text() -> Iterable[Any]:
    return corpora.english().documents


def to_disk(model: models.LanguageModel, _rows: list[Row], block: int, *names: str) -> None:
    sites = tuple(Site(block, name) for name in names or ("resid_post",))
    rows = tokens.RowStream(text(), model.tokenizer, CONTEXT, max_tokens=TOKENS, bos_id=model.bos_id)
    with tempfile.TemporaryDirectory() as folder:
        extract(model, rows, Recipe(sites), Path(folder) / "a", batch_size=BATCH)


def all_sites(model: models.LanguageModel, rows: list[Row], block: int) -> None:
    to_disk(model, rows, block, *HOOKS)


def main() -> None:
    block = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    home = Path(os.environ.get("MISTUDIO_HOME", "var"))
    model = models.load(home / "cache" / "demo-model")
    rows = tokens.rows_of(text(), model.tokenizer, CONTEXT, max_tokens=TOKENS, bos_id=model.bos_id)
    sides: dict[str, Callable] = {"floor": cut_off, "ours": to_disk, "six": all_sites, "hook": by_hook}
    for side in sides.values():
        side(model, rows[:BATCH], block)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in ("floor", "ours", "six", "hook", "six", "ours", "floor"):
            began = time.perf_counter()
            sides[name](model, rows, block)
            found[name].append(TOKENS / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"block {block} of {model.n_layers}, {torch.get_num_threads()} threads, {rounds} rounds, tokens/s")
    for name, values in found.items():
        print(f"{name:6} {medians[name]:6.0f}  [{min(values):.0f}, {max(values):.0f}]")
    print(f"ours / hook {medians['ours'] / medians['hook']:.2f}", end=", ")
    print(f"ours / floor {medians['ours'] / medians['floor']:.2f}", end=", ")
    print(f"each further site {(medians['ours'] / medians['six'] - 1) / 5:.1%}")


if __name__ == "__main__":
    main()

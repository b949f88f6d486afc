"""Claim: extraction is ≥ 2 × a whole forward pass with a hook, and takes ≤ 1.1 × the time of the blocks needed.

    MISTUDIO_HOME=... .venv-peers/bin/python -m bench.extraction [block=8] [rounds=3] [tokens=2048]

The blocks needed are a pass through the model cut off after the block: no later block, no head. Beside them what
other libraries do when they are told to stop: transformer-lens' `stop_at_layer`, nnsight's `tracer.stop()`; each has
a model of its own, and gives the same values. The demo's model, padded batches of the built-in corpus, float32 on
a CPU. Ours is `extract` whole, with tokenizing and its files on the disk; the others keep nothing. A second side of
ours takes all sites of the block: what a further one costs. In turns (`bench.side_by_side`). Takes the model that the
demo left in `$MISTUDIO_HOME/cache/demo-model`; where a peer is not installed it is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.side_by_side import in_turns
from jobs.interp import corpora, models, tokens
from jobs.interp.activations import Recipe, extract
from jobs.interp.hooks import capture
from jobs.interp.site import HOOKS, Site, blocks_of
from jobs.interp.tokens import Row, batches_by_length, pad

CONTEXT, BATCH = 128, 8
#: What a library makes of one padded batch: the block's output.
Pass = Callable[[dict[str, Tensor]], Tensor]
Documents = tuple[str, ...]


def by_hook(folder: Path, block: int) -> Pass:
    """A whole pass, the block's output noted by a hook: what most scripts do."""
    model = models.load(folder).model

    def one(inputs: dict[str, Tensor]) -> Tensor:
        seen: list[Tensor] = []
        hook = blocks_of(model)[1][block].register_forward_hook(lambda _m, _a, out: seen.append(out))
        model(**inputs, use_cache=False)
        hook.remove()
        return seen[0]

    return one


def cut_off(folder: Path, block: int) -> Pass:
    """The model without later blocks, final norm and head."""
    base = models.load(folder).model.get_decoder()
    base.layers = nn.ModuleList(list(base.layers)[: block + 1])
    base.norm = nn.Identity()
    return lambda inputs: base(**inputs, use_cache=False).last_hidden_state


def transformer_lens(folder: Path, block: int) -> Pass:
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]

    own = models.load(folder)
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=own.model, tokenizer=own.tokenizer)
    return lambda inputs: bridge(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], stop_at_layer=block + 1
    )


def nnsight(folder: Path, block: int) -> Pass:
    from nnsight import LanguageModel  # type: ignore[import-not-found]

    own = models.load(folder)
    model = LanguageModel(own.model, tokenizer=own.tokenizer)

    def one(inputs: dict[str, Tensor]) -> Tensor:
        with model.trace(**inputs) as tracer:
            found = model.model.layers[block].output.save()
            tracer.stop()
        return found

    return one


PEERS = {
    "blocks needed": cut_off,
    "hook": by_hook,
    "transformer-lens stop": transformer_lens,
    "nnsight stop": nnsight,
}


def speed_of(one: Pass, rows: list[Row], pad_id: int) -> Callable[[], float]:
    def speed() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for indexes in batches_by_length([len(row.ids) for row in rows], BATCH):
                one(pad([rows[index].ids for index in indexes], pad_id).model_inputs("cpu"))
        return sum(len(row.ids) for row in rows) / (time.perf_counter() - began)

    return speed


def to_disk(text: Documents, model: models.LanguageModel, max_tokens: int, sites: tuple[Site, ...]) -> float:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = extract(
            model, rows_for(text, model, max_tokens), Recipe(sites), Path(folder) / "a", batch_size=BATCH
        )
    return found["tokens_read"] / (time.perf_counter() - began)


def rows_for(text: Documents, model: models.LanguageModel, max_tokens: int) -> list[Row]:
    return list(tokens.RowStream(text, model.tokenizer, CONTEXT, max_tokens=max_tokens, bos_id=model.bos_id))


def same_values(model: models.LanguageModel, rows: list[Row], block: int, one: Pass) -> float:
    """Largest difference to ours over the real tokens of one batch, as a share of the largest value."""
    inputs = pad([row.ids for row in rows[:BATCH]], model.pad.id).model_inputs("cpu")
    real = inputs["attention_mask"].bool()
    wanted = capture(model.model, [Site(block)], **inputs)[Site(block)][real]
    with torch.no_grad():
        return ((one(inputs)[real] - wanted).abs().max() / wanted.abs().max()).item()


def main() -> None:
    given = {"block": 8, "rounds": 3, "tokens": 2048}
    given |= {name: int(value) for name, value in (argument.split("=") for argument in sys.argv[1:])}
    block, folder = given["block"], Path(os.environ.get("MISTUDIO_HOME", "var")) / "cache" / "demo-model"
    model = models.load(folder)
    text, every = corpora.english().documents, tuple(Site(block, name) for name in HOOKS)
    rows = rows_for(text, model, given["tokens"])
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: to_disk(text, model, given["tokens"], (Site(block),)),
        f"ours, {len(every)} sites": lambda: to_disk(text, model, given["tokens"], every),
    }
    for name, peer in PEERS.items():
        try:
            one = peer(folder, block)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        apart = same_values(model, rows, block, one)
        assert apart < 1e-5, f"{name} differs by {apart:.1e} of the largest value"
        sides[name] = speed_of(one, rows, model.pad.id)
    for side in sides.values():
        side()
    seen = in_turns(sides, given["rounds"], first="ours")
    print(f"block {block} of {model.n_layers}, {given['tokens']} tokens, {torch.get_num_threads()} threads")
    print("\n".join(seen.lines("tokens/s")))
    for name in [name for name in sides if name != "ours"]:
        print(f"ours / {name} {seen.ratio('ours', name):.2f}")
    kept = seen.ratio("ours", "hook") >= 2 and seen.ratio("blocks needed", "ours") <= 1.1
    print(f"claim (≥ 2 × hook, ≤ 1.1 × the time of the blocks needed): {'kept' if kept else 'NOT KEPT'}")


if __name__ == "__main__":
    main()

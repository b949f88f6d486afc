"""An extraction end to end: every site of every family, whatever the batching; memory that runs out; going on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jobs.interp import activations
from jobs.interp.activations import Recipe, extract
from jobs.interp.errors import NonFinite, Stopped
from jobs.interp.hooks import first_tensor
from jobs.interp.microbatches import MicroBatches
from jobs.interp.models import LanguageModel
from jobs.interp.norms import exact_median, statistics
from jobs.interp.reading import Store
from jobs.interp.site import HOOKS, Site
from jobs.interp.tokens import Row, RowStream
from tests.interp.conftest import assert_same_vectors, language_model
from tests.interp.test_activations import DOCUMENTS, made_up

SITE = Site(1)
#: Where each site is in block 1 of each family, placed by hand: module, and whether its input or its output counts.
BY_HAND = {
    "G2": {
        "resid_pre": ("transformer.h.1", "input"),
        "attn_out": ("transformer.h.1.attn", "output"),
        "resid_mid": ("transformer.h.1.ln_2", "input"),
        "mlp_in": ("transformer.h.1.mlp", "input"),
        "mlp_out": ("transformer.h.1.mlp", "output"),
        "resid_post": ("transformer.h.1", "output"),
    },
    "LL": {
        "resid_pre": ("model.layers.1", "input"),
        "attn_out": ("model.layers.1.self_attn", "output"),
        "resid_mid": ("model.layers.1.post_attention_layernorm", "input"),
        "mlp_in": ("model.layers.1.mlp", "input"),
        "mlp_out": ("model.layers.1.mlp", "output"),
        "resid_post": ("model.layers.1", "output"),
    },
    # What Gemma-2 adds to the stream is what its second norms make of attention and MLP.
    "GE": {
        "resid_pre": ("model.layers.1", "input"),
        "attn_out": ("model.layers.1.post_attention_layernorm", "output"),
        "resid_mid": ("model.layers.1.pre_feedforward_layernorm", "input"),
        "mlp_in": ("model.layers.1.mlp", "input"),
        "mlp_out": ("model.layers.1.post_feedforward_layernorm", "output"),
        "resid_post": ("model.layers.1", "output"),
    },
    # Parallel blocks have no stream between attention and MLP.
    "NX": {
        "resid_pre": ("gpt_neox.layers.1", "input"),
        "attn_out": ("gpt_neox.layers.1.attention", "output"),
        "mlp_in": ("gpt_neox.layers.1.mlp", "input"),
        "mlp_out": ("gpt_neox.layers.1.mlp", "output"),
        "resid_post": ("gpt_neox.layers.1", "output"),
    },
}


def stored(folder: Path, site: Site = SITE, name: str = "acts") -> Tensor:
    store = Store(folder / site.hook_name)
    return torch.cat([store.read(number, name) for number in range(len(store.shards))])


def by_hand(lm: LanguageModel, row: Row) -> dict[str, Tensor]:
    """What passes every place of block 1 while the row runs alone through the whole model; BOS left out."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, (path, moment) in BY_HAND[lm.name].items():
        module = lm.model.get_submodule(path)

        def after(_m: Any, _a: Any, output: Any, name: str = name) -> None:
            seen[name] = first_tensor(output)[0, 1:]

        def before(_m: Any, args: Any, kwargs: Any, name: str = name) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"])[0, 1:]

        handles.append(
            module.register_forward_hook(after)
            if moment == "output"
            else module.register_forward_pre_hook(before, with_kwargs=True)
        )
    lm.model(torch.tensor([row.ids]))
    for handle in handles:
        handle.remove()
    return seen


# Sites --------------------------------------------------------------------------------------------------
def test_every_site_of_every_family_in_one_pass(any_model: LanguageModel, tmp_path: Path) -> None:
    """Each equal to a hook placed by hand; named as TransformerLens names it; the parts of the block add up."""
    names = BY_HAND[any_model.name]
    rows = list(RowStream(DOCUMENTS[:6], any_model.tokenizer, 16, max_tokens=1000, bos_id=1))
    recipe = Recipe((*(Site(1, name) for name in names), Site(0)), "float32", shard_tokens=40)
    summary = extract(any_model, rows, recipe, tmp_path, batch_size=4)
    alone = [by_hand(any_model, row) for row in rows]
    for name in names:
        assert_same_vectors(stored(tmp_path, Site(1, name)), torch.cat([seen[name] for seen in alone]))
    assert torch.equal(stored(tmp_path, Site(0)), stored(tmp_path, Site(1, "resid_pre")))
    found = {name: stored(tmp_path, Site(1, name)).double() for name in names}
    total = found["resid_pre"] + found["attn_out"] + found["mlp_out"]
    assert_same_vectors(total, found["resid_post"])
    if "resid_mid" in found:
        assert_same_vectors(found["resid_mid"] + found["mlp_out"], found["resid_post"])
    assert [site["hook_name"] for site in summary["sites"]] == [
        *(f"blocks.1.{HOOKS[name]}" for name in names),
        "blocks.0.hook_resid_post",
    ]


def test_the_pass_ends_after_the_last_site(LL: LanguageModel, tmp_path: Path) -> None:
    """Sites of blocks 0 and 1 with block 1's attention last: neither its MLP nor block 2 runs."""
    calls: list[str] = []
    for name in ("model.layers.1.mlp", "model.layers.2", "lm_head"):
        LL.model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    rows = list(RowStream(DOCUMENTS, LL.tokenizer, 16, max_tokens=200, bos_id=1))
    extract(LL, rows, Recipe((Site(1, "attn_out"), Site(0, "mlp_out"), Site(1, "resid_pre"))), tmp_path)
    assert calls == []


# Batching -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["G2", "LL", "GE", "NX"])
@pytest.mark.parametrize("packing", [False, True])
def test_nothing_about_batches_changes_a_vector(name: str, packing: bool, tmp_path: Path) -> None:
    check_batches(name, packing, 12, tmp_path)


@pytest.mark.parametrize(("name", "packing"), [("G2", False), ("LL", True)])
def test_little_about_batches_changes_no_vector(name: str, packing: bool, tmp_path: Path) -> None:
    check_batches(name, packing, 1, tmp_path)


def check_batches(name: str, packing: bool, draws: int, tmp_path: Path) -> None:
    """Batch size, padding side, memory that runs out and shards, drawn at random: each vector within 1e-5 of itself."""
    lm, draw = language_model(name), random.Random(f"{name} {packing}")
    rows = list(RowStream(DOCUMENTS, lm.tokenizer, 16, max_tokens=1000, bos_id=1, packing=packing))
    sites = (SITE, Site(0, "attn_out"), Site(1, "mlp_in"))
    extract(lm, rows, Recipe(sites, "float32"), tmp_path / "0", batch_size=1)
    for number in range(1, draws + 1):
        folder, room = tmp_path / str(number), draw.choice((8, 40, 80, 10_000))
        side, size = draw.choice(("left", "right")), draw.choice((2, 3, 5, 8, 64))
        with short_of_memory(lm, above=draw.choice((1, 2, 64))):
            extract(lm, rows, Recipe(sites, "float32", shard_tokens=room), folder, batch_size=size, side=side)
        for site in sites:
            assert_same_vectors(stored(folder, site), stored(tmp_path / "0", site))
            for what in ("ids", "document", "position"):
                assert torch.equal(stored(folder, site, what), stored(tmp_path / "0", site, what))


def test_packed_rows_keep_no_bos_and_tell_how_many_were_dropped_f06(
    LL: LanguageModel, tmp_path: Path
) -> None:
    """TK, three 5-token documents packed into rows of 8: 15 vectors, none at BOS, 5 dropped."""
    documents = ["abcde", "fghij", "klmno"]
    rows = RowStream(documents, LL.tokenizer, 8, max_tokens=100, bos_id=1, packing=True)
    summary = extract(LL, rows, Recipe((SITE,), "float32"), tmp_path / "packed")
    ids = stored(tmp_path / "packed", SITE, "ids")
    assert (len(ids), summary["tokens_dropped"], summary["tokens_read"]) == (15, 5, 20)
    assert 1 not in ids
    assert ids.tolist() == [token for text in documents for token in LL.tokenizer(text)["input_ids"]]
    parted = RowStream(documents, LL.tokenizer, 8, max_tokens=100, bos_id=1)
    assert extract(LL, parted, Recipe((SITE,), "float32"), tmp_path / "parted")["tokens_dropped"] == 3
    assert stored(tmp_path / "parted", SITE, "document").bincount().tolist() == [5, 5, 5]


def test_nothing_excluded_keeps_all_and_an_exclusion_only_leaves_out_f23(
    LL: LanguageModel, tmp_path: Path
) -> None:
    """LL: without exclusions every token has a vector; with special ids left out the others stay the same."""
    rows = [Row(0, (1, 5, 0, 7)), Row(1, (1, 6, 2))]
    everything = extract(LL, rows, Recipe((SITE,), "float32", exclude_special=False), tmp_path / "all")
    assert (everything["tokens"], everything["tokens_dropped"]) == (7, 0)
    some = extract(LL, rows, Recipe((SITE,), "float32"), tmp_path / "some")
    assert (some["tokens"], some["tokens_dropped"]) == (3, 4)
    usual = torch.isin(stored(tmp_path / "all", SITE, "ids"), torch.tensor([5, 6, 7]))
    assert torch.equal(stored(tmp_path / "all")[usual], stored(tmp_path / "some"))


# Memory that runs out -----------------------------------------------------------------------------------
class short_of_memory:
    """While open, a block of the model runs out of memory with more than `above` rows."""

    def __init__(self, lm: LanguageModel, above: int) -> None:
        self.block, self.above, self.seen = (
            lm.model.get_submodule(BY_HAND[lm.name]["resid_pre"][0]),
            above,
            [],
        )

    def __enter__(self) -> list[int]:
        self.handle = self.block.register_forward_pre_hook(self.come, with_kwargs=True)
        return self.seen

    def come(self, _module: Any, args: Any, kwargs: Any) -> None:
        rows = len(args[0] if args else kwargs["hidden_states"])
        self.seen.append(rows)
        if rows > self.above:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} GiB.")

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def test_memory_that_runs_out_halves_the_batch_and_repeats_it(LL: LanguageModel, tmp_path: Path) -> None:
    rows = [Row(n, (1, 4 + n, 5, 6)) for n in range(20)]
    with short_of_memory(LL, above=3) as seen:
        summary = extract(LL, rows, Recipe((SITE,), "float32"), tmp_path / "a", batch_size=16)
    assert seen == [16, 8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]  # the same rows again, and never more than fits
    assert summary["micro_batch"] == 2
    extract(LL, rows, Recipe((SITE,), "float32"), tmp_path / "b", batch_size=16)
    assert_same_vectors(stored(tmp_path / "a"), stored(tmp_path / "b"))


def test_a_single_row_that_does_not_fit_ends_with_the_numbers(LL: LanguageModel, tmp_path: Path) -> None:
    rows = [Row(n, (1, 4, 5)) for n in range(5)]
    words = r"single row does not fit into memory: CUDA out of memory. Tried to allocate 1 GiB"
    with short_of_memory(LL, above=0) as seen, pytest.raises(torch.OutOfMemoryError, match=words):
        extract(LL, rows, Recipe((SITE,)), tmp_path, batch_size=4)
    assert seen == [4, 2, 1]


def test_the_tensors_of_a_failed_part_are_free_before_the_next(LL: LanguageModel) -> None:
    import weakref

    alive: list[Any] = []

    def work(part: Any) -> bool:
        if alive:
            assert alive[0]() is None
        tensor = torch.zeros(len(part))
        if len(part) > 1:
            alive[:] = [weakref.ref(tensor)]
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return True

    assert [list(part) for part, _ in MicroBatches(2).over([7, 8], work)] == [[7], [8]]


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def work(_part: Any) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        list(MicroBatches(4).over([1, 2, 3, 4], work))


# Going on -----------------------------------------------------------------------------------------------
def test_shards_of_other_rows_are_made_anew_and_those_beyond_the_end_go(
    LL: LanguageModel, tmp_path: Path
) -> None:
    rows = [Row(n, (1, 4 + n, 5, 6)) for n in range(24)]
    recipe = Recipe((SITE, Site(0, "mlp_out")), "float32", shard_tokens=12)
    extract(LL, rows, recipe, tmp_path / "a")
    first = tmp_path / "a" / SITE.hook_name / "shard_00000.safetensors"
    before = first.stat().st_mtime_ns
    changed = [*rows[:4], *(Row(row.document, (1, 30, 31, 32)) for row in rows[4:12])]
    extract(LL, changed, recipe, tmp_path / "a")
    extract(LL, changed, recipe, tmp_path / "b")
    assert first.stat().st_mtime_ns == before
    files = {path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*.safetensors")}
    assert len(files) == 9
    assert {path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.safetensors")} == files
    for file in files:
        one, other = load_file(tmp_path / "a" / file), load_file(tmp_path / "b" / file)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_shard_counts_only_when_all_its_sites_are_there(LL: LanguageModel, tmp_path: Path) -> None:
    """Killed between the sites of a shard: its texts, written last, are missing, so it is made again."""
    rows = [Row(n, (1, 4 + n, 5, 6)) for n in range(8)]
    recipe = Recipe((SITE,), "float32", shard_tokens=12)
    extract(LL, rows, recipe, tmp_path)
    whole = stored(tmp_path)
    (tmp_path / "tokens" / "shard_00001.safetensors").unlink()
    (tmp_path / SITE.hook_name / "shard_00001.safetensors").write_bytes(b"half")
    extract(LL, rows, recipe, tmp_path)
    assert torch.equal(stored(tmp_path), whole)


def test_a_stop_keeps_the_shard_that_is_being_written(LL: LanguageModel, tmp_path: Path) -> None:
    rows = [Row(n, (1, 4 + n, 5, 6)) for n in range(24)]
    done: list[int] = []
    with pytest.raises(Stopped):
        extract(
            LL, rows, Recipe((SITE,), shard_tokens=12), tmp_path, batch_size=4,
            on_progress=lambda step, *_: done.append(step), should_stop=lambda: len(done) == 3,
        )  # fmt: skip
    assert len(list((tmp_path / "tokens").iterdir())) == 3
    assert not list(tmp_path.rglob(".tmp-*"))


def test_what_cannot_be_written_ends_the_extraction(LL: LanguageModel, tmp_path: Path) -> None:
    with torch.no_grad():
        LL.model.model.embed_tokens.weight[9] = float("nan")
    rows = [*(Row(n, (1, 4, 5)) for n in range(8)), Row(8, (1, 9)), *(Row(n, (1, 4)) for n in range(9, 20))]
    with pytest.raises(NonFinite, match="not finite at blocks"):
        extract(LL, rows, Recipe((SITE,), shard_tokens=4), tmp_path)
    assert len(list((tmp_path / "tokens").iterdir())) == 4


def test_what_the_reading_raises_ends_the_extraction(LL: LanguageModel, tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield from (Row(n, (1, 4, 5)) for n in range(8))
        raise OSError("the disk of the corpus is gone")

    with pytest.raises(OSError, match="is gone"):
        extract(LL, rows(), Recipe((SITE,), shard_tokens=4), tmp_path)


def test_progress_tells_tokens_and_speed_from_the_first_part_on(LL: LanguageModel, tmp_path: Path) -> None:
    rows = RowStream(DOCUMENTS, LL.tokenizer, 16, max_tokens=200, bos_id=1)
    told: list[tuple[int, int, dict[str, float]]] = []
    extract(LL, rows, Recipe((SITE,)), tmp_path, batch_size=2, on_progress=lambda *step: told.append(step))
    assert told[0][0] <= 32
    assert told[-1][:2] == (200, 200)
    assert all(done <= total and speed["tokens_per_s"] > 0 for done, total, speed in told)


# Lengths ------------------------------------------------------------------------------------------------
def test_lengths_tell_median_maximum_and_sinks_f12(tmp_path: Path, X32: Tensor) -> None:
    """X32 with rows 3 and 17 times 500: both are sinks, no other row is, and the mean without them knows nothing."""
    X32[[3, 17]] *= 500
    norms = X32.norm(dim=1)
    store = made_up(tmp_path, X32)
    found = statistics(store)
    others = torch.cat([norms[:3], norms[4:17], norms[18:]])
    assert found["norm_median"] == norms.median().item()
    assert found["norm_max"] == norms.max().item()
    assert found["sinks"] == 2
    assert (norms > found["sink_limit"]).nonzero().flatten().tolist() == [3, 17]
    assert found["norm_mean_without_sinks"] == pytest.approx(others.mean().item(), rel=1e-6)
    assert found["norm_mean"] == pytest.approx(norms.mean().item(), rel=1e-6)


@pytest.mark.parametrize("count", [4, 5, 1000])
def test_the_median_is_exact(tmp_path: Path, count: int) -> None:
    lengths = torch.rand(count, 1, generator=torch.Generator().manual_seed(count)) * 10.0 ** torch.arange(
        count
    )[:, None].remainder(7)
    store = made_up(tmp_path, lengths, shards=min(4, count))
    assert exact_median(store) == lengths.flatten().median().item()


def test_a_summary_has_the_lengths_of_every_site(LL: LanguageModel, tmp_path: Path) -> None:
    rows = list(RowStream(DOCUMENTS, LL.tokenizer, 16, max_tokens=300, bos_id=1))
    summary = extract(LL, rows, Recipe((SITE, Site(0, "mlp_out")), "float32", shard_tokens=50), tmp_path)
    for site in summary["sites"]:
        norms = stored(tmp_path, Site(site["block"], site["site"])).norm(dim=1)
        assert site["norm_median"] == pytest.approx(norms.median().item(), rel=1e-6)
        assert site["sinks"] == (norms > 10 * norms.median()).sum()


def test_a_shard_is_as_large_as_its_sites_allow() -> None:
    from jobs.interp.sizes import SHARD_BYTES, shard_tokens

    assert shard_tokens(576, 1, "bfloat16") == 16_384
    assert shard_tokens(4096, 64, "float32") == 1024
    assert shard_tokens(4096, 8, "bfloat16") * 4096 * 8 * 2 <= SHARD_BYTES
    assert activations.SHARD_TOKENS == 16_384

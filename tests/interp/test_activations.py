"""Activations on disk: the right vectors whatever the batching, complete or absent, read back shuffled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.interp.activations import Recipe, extract
from jobs.interp.errors import Stopped, Unusable
from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel
from jobs.interp.reading import Selection, Store, heldout_text, median_norms, split
from jobs.interp.sae.options import Options
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.train import Training
from jobs.interp.shards import forget_from, path_of
from jobs.interp.shuffling import Shuffled
from jobs.interp.site import Site, blocks_of
from jobs.interp.tokens import Row, RowStream
from tests.interp.conftest import assert_same_vectors

DOCUMENTS = [
    "the quick brown fox",
    "a",
    "jumps over the lazy dog",
    "and runs",
    "away, far away",
    "from here.",
] * 3
SITE = Site(1)
RECIPE = Recipe((SITE, Site(0)), dtype="float32", shard_tokens=60)


@pytest.fixture
def rows(LL: LanguageModel) -> list[Row]:
    return list(RowStream(DOCUMENTS, LL.tokenizer, 16, max_tokens=10_000, bos_id=1))


def alone(lm: LanguageModel, row: Row, site: Site = SITE) -> torch.Tensor:
    """The row's vectors from a run of its own, BOS left out."""
    return capture(lm.model, [site], input_ids=torch.tensor([row.ids]))[site][0, 1:]


def stored(folder: Path, name: str = "acts", site: Site = SITE) -> torch.Tensor:
    store = Store(folder / site.hook_name)
    return torch.cat([store.read(number, name) for number in range(len(store.shards))])


def test_every_vector_is_that_of_its_token_run_alone(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    summary = extract(LL, rows, RECIPE, tmp_path, batch_size=4)
    for site in (SITE, Site(0)):
        expected = torch.cat([alone(LL, row, site) for row in rows])
        assert_same_vectors(stored(tmp_path, site=site), expected)
    assert summary["tokens"] == sum(len(row.ids) - 1 for row in rows)
    assert summary["tokens_dropped"] == len(rows)
    ids = torch.cat([torch.tensor(row.ids[1:]) for row in rows])
    assert torch.equal(stored(tmp_path, "ids").long(), ids)
    assert not torch.isin(ids, torch.tensor([0, 1])).any()


@pytest.mark.parametrize(("batch_size", "shard_tokens"), [(1, 60), (7, 60), (64, 10_000), (3, 1)])
def test_batch_and_shard_size_change_no_vector(
    LL: LanguageModel, rows: list[Row], tmp_path: Path, batch_size: int, shard_tokens: int
) -> None:
    extract(LL, rows, RECIPE, tmp_path / "a", batch_size=4)
    extract(
        LL, rows, Recipe((SITE,), "float32", shard_tokens=shard_tokens), tmp_path / "b", batch_size=batch_size
    )
    assert_same_vectors(stored(tmp_path / "b"), stored(tmp_path / "a"))
    for name in ("ids", "document", "position"):
        assert torch.equal(stored(tmp_path / "b", name), stored(tmp_path / "a", name))


def test_special_tokens_stay_when_asked_to(LL: LanguageModel, rows: list[Row], tmp_path: Path) -> None:
    summary = extract(LL, rows, Recipe((SITE,), exclude_special=False), tmp_path)
    assert summary["tokens"] == summary["tokens_read"] == sum(len(row.ids) for row in rows)
    assert (stored(tmp_path, "ids") == 1).sum() == len(rows)


def test_the_summary_tells_norms_and_place(LL: LanguageModel, rows: list[Row], tmp_path: Path) -> None:
    summary = extract(LL, rows, RECIPE, tmp_path)
    norms = stored(tmp_path).norm(dim=1)
    site = summary["sites"][0]
    assert (site["hook_name"], site["module"], site["d_model"]) == (
        "blocks.1.hook_resid_post",
        "model.layers.1",
        16,
    )
    assert site["norm_median"] == pytest.approx(norms.median().item(), rel=1e-6)
    assert site["norm_max"] == pytest.approx(norms.max().item(), rel=1e-6)
    assert site["norm_mean"] == pytest.approx(norms.mean().item(), rel=1e-6)
    assert sum(site["shard_tokens"]) == summary["tokens"]
    assert json.loads((tmp_path / "activations.json").read_text()) == summary


def test_a_stopped_extraction_goes_on_where_it_was(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    asked = iter(range(1000))
    with pytest.raises(Stopped):
        extract(LL, rows, RECIPE, tmp_path / "a", batch_size=2, should_stop=lambda: next(asked) == 9)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("shard_*")}
    assert done
    progress: list[int] = []
    extract(
        LL, rows, RECIPE, tmp_path / "a", batch_size=2, on_progress=lambda step, *_: progress.append(step)
    )
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert progress[0] > 2 * 16  # begins after the shards that were there
    extract(LL, rows, RECIPE, tmp_path / "b", batch_size=2)
    assert torch.equal(stored(tmp_path / "a"), stored(tmp_path / "b"))
    assert not list(tmp_path.rglob(".tmp-*"))


def test_another_recipe_starts_over(LL: LanguageModel, rows: list[Row], tmp_path: Path) -> None:
    extract(LL, rows, RECIPE, tmp_path)
    summary = extract(LL, rows[:4], RECIPE, tmp_path)
    assert len(stored(tmp_path)) == summary["tokens"] == sum(len(row.ids) - 1 for row in rows[:4])


def test_it_writes_ten_vectors_for_two_prompts_of_five_tokens_f01(LL: LanguageModel, tmp_path: Path) -> None:
    """LL, layer 1, both prompts in one batch: each vector is that of its prompt run alone."""
    prompts = [Row(0, (5, 9, 12, 7, 30)), Row(1, (8, 4, 4, 21, 13))]
    extract(LL, prompts, Recipe((SITE,), dtype="float32"), tmp_path, batch_size=2)
    found = stored(tmp_path)
    assert found.shape == (10, 16)
    solo = [capture(LL.model, [SITE], input_ids=torch.tensor([row.ids]))[SITE][0] for row in prompts]
    torch.testing.assert_close(found, torch.cat(solo), atol=1e-5, rtol=1e-5)


def test_it_runs_no_later_block_and_no_head_f11(LL: LanguageModel, rows: list[Row], tmp_path: Path) -> None:
    """LL, block 0, the whole extraction: zero calls of blocks 1, 2, the final norm and the head."""
    calls: list[str] = []
    for name in ("model.layers.1", "model.layers.2", "model.norm", "lm_head"):
        LL.model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    extract(LL, rows, Recipe((Site(0),), dtype="float32"), tmp_path)
    assert calls == []
    LL.model(torch.tensor([[1, 5]]))
    assert calls == ["model.layers.1", "model.layers.2", "model.norm", "lm_head"]


@pytest.mark.parametrize("name", ["G2", "LL"])
def test_a_context_over_the_limit_never_reaches_the_model_f09(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lm = request.getfixturevalue(name)
    rows = list(RowStream(["a" * 60], lm.tokenizer, 40, max_tokens=1000, bos_id=1))
    for block in blocks_of(lm.model)[1]:
        block.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(Unusable, match=rf"40.*32.*{name}"):
        extract(lm, rows, RECIPE, tmp_path)


def test_values_that_a_dtype_cannot_hold_are_refused(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    with torch.no_grad():
        LL.model.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(Unusable, match=r"float16 can hold; use bfloat16"):
        extract(LL, rows, Recipe((SITE,), dtype="float16"), tmp_path)
    assert not list(tmp_path.rglob("shard_*"))


def test_nothing_left_is_refused(LL: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="No token is left"):
        extract(LL, [Row(0, (1, 1, 2))], RECIPE, tmp_path)


# Reading back -----------------------------------------------------------------------------------------


def test_shards_keep_their_order_beyond_five_digits(tmp_path: Path) -> None:
    """Numbers 99 999 and 100 000: read in this order, and what lies beyond the last one is what is removed."""
    site, texts = tmp_path / SITE.hook_name, tmp_path / "tokens"
    for folder in (site, texts):
        folder.mkdir()
    for number in (100_000, 99_999, 99_998):
        one = torch.tensor([number], dtype=torch.int32)
        save_file({"acts": torch.full((1, 2), float(number))}, path_of(site, number))
        save_file(
            {"ids": one, "lengths": torch.ones_like(one), "documents": one.clone()}, path_of(texts, number)
        )
    assert stored(tmp_path)[:, 0].tolist() == [99_998, 99_999, 100_000]
    assert heldout_text(tmp_path, torch.arange(200_000), 10).rows == [(99_998,), (99_999,), (100_000,)]
    forget_from(tmp_path, 100_000)
    assert stored(tmp_path)[:, 0].tolist() == [99_998, 99_999]
    forget_from(tmp_path, 99_999)
    assert [path.name for path in texts.iterdir()] == ["shard_99998.safetensors"]


def made_up(folder: Path, acts: torch.Tensor, *, shards: int = 4, documents: int = 8) -> Store:
    """A store of given vectors, in equal shards, documents in turn."""
    for number, part in enumerate(acts.split(len(acts) // shards)):
        first = number * len(part)
        save_file(
            {
                "acts": part.contiguous(),
                "norms": part.norm(dim=1),
                "document": torch.arange(first, first + len(part), dtype=torch.int32) % documents,
            },
            folder / f"shard_{number:05d}.safetensors",
        )
    return Store(folder)


def everything(store: Store) -> Selection:
    return Selection(store, tuple(store.sizes), lambda number: torch.arange(store.sizes[number]))


def numbered(count: int) -> torch.Tensor:
    """Vectors that tell their own number."""
    return torch.arange(count, dtype=torch.float32)[:, None].expand(count, 8).contiguous()


def test_outliers_are_dropped_and_no_others_f12(tmp_path: Path, X32: torch.Tensor) -> None:
    """X32 with rows 3 and 17 times 500; the filter at ten medians takes exactly those, and so do estimates."""
    X32[[3, 17]] *= 500
    store = made_up(tmp_path, X32)
    parts = split(store, heldout_fraction=0.2)
    found = torch.cat([parts.train.load(n) for n in range(4)] + [parts.heldout.load(n) for n in range(4)])
    assert (len(found), parts.dropped_outliers) == (30, 2)
    assert found.norm(dim=1).max() < 10
    train = torch.cat([parts.train.load(number) for number in range(4)])
    assert parts.train.mean_norms()[0] == pytest.approx(train.norm(dim=1).mean().item(), rel=1e-6)
    assert split(store, heldout_fraction=0.2, outlier_ratio=None).dropped_outliers == 0


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    store = made_up(tmp_path, numbered(400), documents=20)
    parts = split(store, heldout_fraction=0.1, outlier_ratio=None)
    train = torch.cat(list(parts.train.batches(64)))[:, 0].long()
    heldout = torch.cat(list(parts.heldout.batches(64)))[:, 0].long()
    assert set(train.tolist()) | set(heldout.tolist()) == set(range(400))
    assert not set((train % 20).tolist()) & set((heldout % 20).tolist())
    assert len(heldout) == 40
    assert set((heldout % 20).tolist()) == set(parts.documents.tolist())


def test_one_document_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="too little text"):
        split(made_up(tmp_path, numbered(40), documents=1))


@pytest.mark.parametrize("shards", [1, 4])
def test_a_pass_gives_every_row_once_in_a_new_order(tmp_path: Path, shards: int) -> None:
    store = made_up(tmp_path, numbered(120), shards=shards)
    stream = Shuffled(everything(store), 10, seed=0, buffer_bytes=60 * 32)
    first, second = (
        torch.cat([stream.batch(step) for step in range(start, start + 12)])[:, 0].tolist()
        for start in (0, 12)
    )
    assert sorted(first) == sorted(second) == list(range(120))
    assert first != second
    assert first != sorted(first)


def test_a_batch_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    rows = everything(made_up(tmp_path, numbered(120)))
    straight = Shuffled(rows, 50, seed=0, buffer_bytes=60 * 32)
    batches = [straight.batch(step) for step in range(8)]  # runs over the ends of buffers and passes
    for step in (5, 0, 7, 2):
        assert torch.equal(Shuffled(rows, 50, seed=0, buffer_bytes=60 * 32).batch(step), batches[step])
    assert not torch.equal(Shuffled(rows, 50, seed=1, buffer_bytes=60 * 32).batch(0), batches[0])
    assert all(batch.shape == (50, 8) for batch in batches)


def test_data_that_run_out_are_gone_through_again_in_a_new_order_f22(tmp_path: Path) -> None:
    """100 vectors, 250 wanted, batches of 10: two and a half passes, counted, each in an order of its own."""
    stream = Shuffled(everything(made_up(tmp_path, numbered(100))), 10, seed=0)
    passes = [torch.cat([stream.batch(step) for step in range(n, n + 10)])[:, 0].tolist() for n in (0, 10)]
    half = torch.cat([stream.batch(step) for step in range(20, 25)])[:, 0].tolist()
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(100))
    assert passes[0] != passes[1]
    assert len(set(half)) == 50 and half not in (passes[0][:50], passes[1][:50])
    assert [stream.epoch(step) for step in (0, 9, 10, 19, 20, 24)] == [0, 0, 1, 1, 2, 2]


def test_the_scale_is_of_all_vectors_not_of_the_first_f20(tmp_path: Path) -> None:
    """Lengths 1, 1, 1, 9 in four dimensions: mean 3, factor 2/3."""
    store = made_up(tmp_path, torch.tensor([1.0, 1, 1, 9])[:, None] * torch.eye(4)[0], shards=2, documents=2)
    assert everything(store).mean_norms() == (3.0,)
    rows = torch.cat(list(everything(store).batches(2)))
    settings = Settings(8, Options(k=2), tokens=64, batch_size=16)
    assert Training.begin(settings, rows, everything(store).mean_norms()).scales == pytest.approx((2 / 3,))


def test_a_batch_may_be_larger_than_the_data(tmp_path: Path) -> None:
    stream = Shuffled(everything(made_up(tmp_path, numbered(20))), 50, seed=0)
    counts = stream.batch(0)[:, 0].long().bincount()
    assert counts.min() >= 2
    assert counts.sum() == 50


def test_the_next_buffer_is_read_while_this_one_is_trained_on(tmp_path: Path) -> None:
    """Two shards of four fit: two fillings of so many rows are in memory, and nobody waits for the second."""
    stream = Shuffled(everything(made_up(tmp_path, numbered(120))), 10, seed=0, buffer_bytes=60 * 32)
    for step in range(24):
        stream.batch(step)
        assert stream._held is not None and stream._ahead is not None
        assert len(stream._held[1]) == 60
        buffer, task = stream._ahead
        assert buffer == stream.order.after(stream._held[0])
        assert torch.equal(task.result(), stream._filled(buffer))
    assert (stream.epoch(11), stream.epoch(12)) == (0, 1)


def test_a_shard_that_cannot_be_read_ahead_is_told_when_it_is_needed(tmp_path: Path) -> None:
    stream = Shuffled(everything(made_up(tmp_path, numbered(120))), 10, seed=0, buffer_bytes=60 * 32)
    for path in tmp_path.glob("shard_*"):
        path.rename(path.with_suffix(".away"))
    with pytest.raises(FileNotFoundError):
        stream.batch(0)
    for path in tmp_path.glob("shard_*"):
        path.rename(path.with_suffix(".safetensors"))
    stream.batch(0)
    stream._ahead[1].exception()
    for path in tmp_path.glob("shard_*"):
        path.rename(path.with_suffix(".away"))
    stream.batch(6)  # was read ahead
    with pytest.raises(FileNotFoundError):
        stream.batch(12)


def test_the_median_is_exact_however_the_norms_lie_in_shards(tmp_path: Path) -> None:
    lengths = torch.cat([torch.rand(90).exp(), torch.full((20,), 1.5), torch.zeros(6), torch.rand(4) * 1e4])
    mixed = lengths[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
    store = made_up(tmp_path, mixed[:, None] * torch.eye(8)[0])
    assert median_norms(store) == (torch.cat([store.read(n, "norms") for n in range(4)]).median().item(),)


def test_held_out_text_is_that_of_held_out_documents(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    extract(LL, rows, RECIPE, tmp_path)
    parts = split(Store(tmp_path / SITE.hook_name), heldout_fraction=0.2)
    held = [row.ids for row in rows if row.document in parts.documents.tolist()]
    assert heldout_text(tmp_path, parts.documents, 10_000).rows == held
    assert heldout_text(tmp_path, parts.documents, 20).tokens == 20


def test_a_shard_tells_where_each_vector_comes_from(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    extract(LL, rows, RECIPE, tmp_path)
    shard = load_file(tmp_path / SITE.hook_name / "shard_00000.safetensors")
    for vector in (0, 5, len(shard["ids"]) - 1):
        row = rows[int(shard["row"][vector])]
        assert row.document == shard["document"][vector]
        assert row.ids[int(shard["position"][vector])] == shard["ids"][vector]

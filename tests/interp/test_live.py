"""Training vectors straight from a model: the vectors and the order of stored ones."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from jobs.interp import sizes
from jobs.interp.activations import Recipe, extract
from jobs.interp.errors import Stopped, Unusable
from jobs.interp.live import Live, Text, measured_of, state_of
from jobs.interp.models import LanguageModel
from jobs.interp.reading import Store, heldout_text, split
from jobs.interp.sae import estimates
from jobs.interp.sae.sources import held, text_digest
from jobs.interp.shuffling import Shuffled
from jobs.interp.site import Site
from jobs.interp.tokens import Row, RowStream
from tests.interp.conftest import LETTERS, assert_same_vectors

SITE, PAIR = Site(1), (Site(1, "mlp_in"), Site(1, "mlp_out"))
UNIT, BUFFER = 64, 2 * 64 * 16 * 4  # two units of 64 vectors of 16 float32 numbers


@pytest.fixture
def rows(LL: LanguageModel) -> list[Row]:
    """60 documents of pseudo-words in rows of at most 16 tokens, BOS first."""
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(0, len(LETTERS), (60, 24), generator=draw)
    documents = ["".join(LETTERS[i] for i in row) for row in letters]
    return list(RowStream(documents, LL.tokenizer, 16, max_tokens=1200, bos_id=LL.bos_id))


def text_of(LL: LanguageModel, rows: list[Row]) -> Text:
    return Text.divided(rows, LL.special_ids, 0.1, unit_tokens=UNIT)


def live(
    LL: LanguageModel, rows: list[Row], *views: tuple[Site, ...], seed: int = 0, **options: object
) -> Live:
    given = {"batch_size": 50, "seed": seed, "rows_per_pass": 4, "buffer_bytes": BUFFER} | options
    return Live(LL, text_of(LL, rows), views or ((SITE,),), **given)  # type: ignore[arg-type]


def test_it_gives_the_vectors_of_stored_activations_in_their_order(
    LL: LanguageModel, rows: list[Row], tmp_path: Path
) -> None:
    sites = (SITE, *PAIR)
    extract(LL, rows, Recipe(sites, dtype="float32", shard_tokens=UNIT), tmp_path)
    source = live(LL, rows, (SITE,), PAIR)
    for view in source.views:
        store = Store(*(tmp_path / site.hook_name for site in view))
        parts = split(store, heldout_fraction=0.1, outlier_ratio=None)
        stored = Shuffled(parts.train, 50, 0, buffer_bytes=BUFFER)
        assert len(stored) == source.order.length > 800
        for step in (0, 7, 19, 40):  # over the ends of buffers, and in the second and third pass
            assert_same_vectors(source.at(view).batch(step), stored.batch(step))
        assert source.at(view).epoch(40) == stored.epoch(40) == 2
        assert source.measure(None).norms[view] == pytest.approx(parts.train.mean_norms(), rel=1e-6)
        for found, theirs in ((source.heldout, parts.heldout), (source.training, parts.train)):
            assert_same_vectors(torch.cat(list(found(view))), torch.cat(list(theirs.batches(64))))
    text = source.text.heldout_text(100)
    assert text.rows == heldout_text(tmp_path, parts.documents, 100).rows


def test_a_batch_depends_on_seed_and_step_alone(LL: LanguageModel, rows: list[Row]) -> None:
    straight = live(LL, rows)
    batches = [straight.batch(step)[SITE,] for step in range(6)]
    assert torch.equal(live(LL, rows).batch(5)[SITE,], batches[5])
    assert not torch.equal(live(LL, rows, seed=1).batch(5)[SITE,], batches[5])
    assert not torch.equal(batches[0], batches[5])


def test_one_pass_of_the_model_serves_every_view_and_no_later_block_runs(
    LL: LanguageModel, rows: list[Row]
) -> None:
    calls = {"first": 0, "last": 0}
    LL.model.model.layers[0].register_forward_hook(lambda *_: calls.update(first=calls["first"] + 1))
    LL.model.model.layers[2].register_forward_hook(lambda *_: calls.update(last=calls["last"] + 1))
    alone = live(LL, rows)
    batches = [alone.batch(step)[SITE,] for step in range(5)]
    needed = calls["first"]
    together = live(LL, rows, (SITE,), PAIR, (Site(0),))
    for step, batch in enumerate(batches):
        for view in together.views:
            together.at(view).batch(step)
        assert torch.equal(together.at((SITE,)).batch(step), batch)
    assert calls == {"first": 2 * needed, "last": 0}


def test_outliers_are_left_out_of_batches_and_scales_f12(LL: LanguageModel, rows: list[Row]) -> None:
    source = live(LL, rows)
    lengths = torch.cat(list(source.training((SITE,)))).norm(dim=1)
    measured = source.measure(1.2)
    limit = 1.2 * lengths.median().item()
    assert measured.limits == {SITE: pytest.approx(limit, rel=1e-6)}
    usual = lengths[lengths <= limit]
    assert measured.norms[SITE,][0] == pytest.approx(usual.mean().item(), rel=1e-6)
    assert measured.dropped[SITE,] == len(lengths) - len(usual) > 10
    one_pass = [source.batch(step)[SITE,] for step in range(source.order.length // 50)]
    assert all(0 < len(batch) <= 50 and batch.norm(dim=1).max() <= limit for batch in one_pass)
    again = measured_of(json.loads(json.dumps(state_of(measured))), source.views)
    assert again == measured
    source.limits = {SITE: 0.0}
    with pytest.raises(Unusable, match="All 50 vectors of step 100"):
        source.batch(99)


def test_it_stops_between_passes_of_the_model(LL: LanguageModel, rows: list[Row]) -> None:
    read: list[int] = []
    source = live(
        LL, rows, buffer_bytes=10 * BUFFER, on_tokens=read.append, should_stop=lambda: len(read) == 3
    )
    with pytest.raises(Stopped):
        source.batch(0)
    assert len(read) == 3
    assert sum(read) <= 3 * 4 * 16


def test_the_old_buffer_is_gone_when_the_next_one_is_filled(
    LL: LanguageModel, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = live(LL, rows), Live._vectors
    filled: list[weakref.ref[torch.Tensor]] = []

    def vectors(self: Live, units: Sequence[Sequence[Row]]) -> dict[Site, torch.Tensor]:
        assert [buffer() for buffer in filled] == [None] * len(filled)
        found = read(self, units)
        filled.append(weakref.ref(found[SITE]))
        return found

    monkeypatch.setattr(Live, "_vectors", vectors)
    for step in range(6):
        source.batch(step)  # some begin in one buffer and end in the next
    assert len(filled) > 2


def test_what_is_measured_comes_in_pieces_however_wide_a_pass_is(
    LL: LanguageModel, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = live(LL, rows, rows_per_pass=16)
    whole = torch.cat(list(source.heldout((SITE,))))
    monkeypatch.setattr("jobs.interp.live.MEASURED_ROWS", 24)
    pieces = list(source.heldout((SITE,)))
    assert max(map(len, pieces)) == 24 < len(whole)
    assert torch.equal(torch.cat(pieces), whole)


def text_params(**params: object) -> dict[str, object]:
    given = {"corpus": "text.txt", "context_size": 128, "tokens": 0, "heldout_fraction": 0.0}
    return given | {"max_tokens": None} | params


@pytest.mark.parametrize("length", [32, 128])
def test_rows_take_no_more_than_estimated(length: int) -> None:
    count = 2000
    tracemalloc.start()
    rows = held(Row(300 + n, tuple(range(300, 300 + length))) for n in range(count))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sum(rows[9].ids) == sum(range(300, 300 + length))
    params = text_params(context_size=length, max_tokens=count * length)
    estimated = estimates.text_bytes(params) - sizes.READER_BYTES
    assert 0.7 * estimated < taken < estimated


def test_much_text_is_estimated_in_full() -> None:
    needed = estimates.text_bytes(text_params(tokens=10**10))
    assert 10**10 * 5 < needed < 10**10 * 6
    assert estimates.text_bytes(text_params(tokens=10**10, corpus="english")) == sizes.CORPUS_BYTES


def test_rows_are_read_until_a_stop() -> None:
    asked: list[int] = []
    with pytest.raises(Stopped):
        held((Row(n, (1, 5)) for n in range(9)), lambda: asked.append(1) or len(asked) > 3)  # type: ignore[func-returns-value]
    assert len(asked) == 4


def test_a_digest_knows_documents_rows_and_tokens_apart() -> None:
    texts = [[(0, (1, 5)), (0, (6,))], [(0, (1, 5)), (1, (6,))], [(0, (1,)), (0, (5, 6))], [(0, (1, 5))]]
    digests = {text_digest(Row(*row) for row in text) for text in texts}
    assert len(digests) == len(texts)
    assert text_digest([Row(0, array("i", [1, 5]))]) in digests


def test_one_document_cannot_be_divided(LL: LanguageModel) -> None:
    with pytest.raises(Unusable, match="too little text"):
        text_of(LL, [Row(0, (1, 5, 6)), Row(1, (1,))])  # the second gives no vector


def test_without_exclusions_every_token_counts_f23(LL: LanguageModel, rows: list[Row]) -> None:
    every = Text.divided(rows, (), 0.1, unit_tokens=UNIT)
    some = Text.divided(rows, [LL.bos_id], 0.1, unit_tokens=UNIT)
    counts = [
        sum(text.count(unit) for unit in text.units) + text.count(text.heldout) for text in (every, some)
    ]
    assert counts == [sum(len(row.ids) for row in rows), sum(len(row.ids) - 1 for row in rows)]
    for text in (every, some):
        source = Live(LL, text, [(SITE,)], batch_size=50, seed=0, buffer_bytes=BUFFER)
        assert [len(source.batch(step)[SITE,]) for step in range(2)] == [50, 50]

"""Documents to rows, rows to batches: what is padded, masked, left out, and where each token stands."""

from __future__ import annotations

import pytest
import torch

from jobs.interp.errors import Unusable
from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel, Pad, choose_pad
from jobs.interp.site import Site
from jobs.interp.tokens import Side, batches_by_length, kept, pad, rows_of
from tests.interp.conftest import language_model, tokenizer

SHORT, LONG = [1, 5, 9, 12, 7], [1, 4, 8, 15, 16, 23, 30, 11]


def stream(lm: LanguageModel, rows: list[list[int]], side: Side) -> torch.Tensor:
    return capture(lm.model, [Site(2)], **pad(rows, 0, side=side).model_inputs("cpu"))[Site(2)]


@pytest.mark.parametrize("name", ["G2", "LL", "NX"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_gives_what_it_gives_alone_f04(name: str, side: Side) -> None:
    lm = language_model(name)
    alone = stream(lm, [SHORT], "right")[0]
    padded = stream(lm, [SHORT, LONG], side)[0]
    real = padded[3:] if side == "left" else padded[:5]
    torch.testing.assert_close(real, alone, atol=1e-5, rtol=1e-5)


def test_without_positions_the_learned_ones_would_be_wrong_f04(G2: LanguageModel) -> None:
    """The test above would see it: the fault is real for this model."""
    inputs = pad([SHORT, LONG], 0, side="left").model_inputs("cpu")
    del inputs["position_ids"]
    wrong = capture(G2.model, [Site(2)], **inputs)[Site(2)][0, 3:]
    assert (wrong - stream(G2, [SHORT], "right")[0]).abs().max() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_bos_and_padding_are_left_out_by_id_and_mask_f05(side: Side) -> None:
    """Two prompts of 4 and 7 tokens, BOS among them, BOS excluded: 3 + 6 vectors, none at id 0 or 1."""
    rows = rows_of(["fbd", "eaf-iq"], tokenizer(), 16, max_tokens=100, bos_id=tokenizer().bos_token_id)
    assert [row.ids for row in rows] == [(1, 9, 5, 7), (1, 8, 4, 9, 33, 12, 20)]
    batch = pad([row.ids for row in rows], tokenizer().pad_token_id, side=side)
    chosen = kept(batch.input_ids, batch.mask, [1])
    assert chosen.sum(1).tolist() == [3, 6]
    assert not torch.isin(batch.input_ids[chosen], torch.tensor([0, 1])).any()


def test_padding_that_is_also_a_word_stays_when_it_is_real_f05() -> None:
    """The mask decides what is padding, so a pad id that occurs in the text is kept there."""
    batch = pad([[9, 9], [9, 5, 6]], 9)
    assert kept(batch.input_ids, batch.mask, []).sum() == 5


def test_documents_are_never_joined_f06() -> None:
    rows = rows_of(["abcde", "fghij", "klmno"], tokenizer(), 8, max_tokens=100, bos_id=1)
    assert [row.document for row in rows] == [0, 1, 2]
    assert all(row.ids[0] == 1 and 1 not in row.ids[1:] for row in rows)


def test_long_documents_are_cut_and_each_part_begins_with_bos() -> None:
    rows = rows_of(["abcdefghij"], tokenizer(), 5, max_tokens=100, bos_id=1)
    assert [row.ids for row in rows] == [(1, 4, 5, 6, 7), (1, 8, 9, 10, 11), (1, 12, 13)]
    assert rows_of(["abcdefghij"], tokenizer(), 5, max_tokens=100)[0].ids == (4, 5, 6, 7, 8)


@pytest.mark.parametrize(("most", "lengths"), [(12, [5, 5, 2]), (11, [5, 5]), (10, [5, 5]), (100, [5, 5, 3])])
def test_max_tokens_counts_every_token_and_ends_in_no_lonely_bos(most: int, lengths: list[int]) -> None:
    rows = rows_of(["abcdefghij"], tokenizer(), 5, max_tokens=most, bos_id=1)
    assert [len(row.ids) for row in rows] == lengths


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(Unusable, match="no room"):
        rows_of(["abc"], tokenizer(), 1, max_tokens=10, bos_id=1)
    with pytest.raises(Unusable, match="no token"):
        rows_of([], tokenizer(), 8, max_tokens=10)


def test_a_tokenizer_without_pad_batches_like_any_other_f08() -> None:
    """TKn: the job runs, results equal solo runs, the choice is recorded, the vocabulary stays."""
    lm = language_model("G2", pad_token=None)
    assert lm.tokenizer.pad_token_id is None
    assert lm.pad == Pad(2, "eos")
    inputs = pad([SHORT, LONG], lm.pad.id).model_inputs("cpu")
    together = capture(lm.model, [Site(2)], **inputs)[Site(2)]
    torch.testing.assert_close(together[0, :5], stream(lm, [SHORT], "right")[0], atol=1e-5, rtol=1e-5)
    assert lm.model.get_input_embeddings().weight.shape[0] == 64 == lm.d_vocab
    assert len(lm.tokenizer) == 34


def test_a_pad_id_that_the_model_has_no_embedding_for_is_not_taken_f08() -> None:
    """A pad token that somebody added to the tokenizer alone: id 34, one more than the model knows."""
    tk = tokenizer(pad_token="<added>")
    assert tk.pad_token_id == 34
    assert choose_pad(tk, d_vocab=34) == Pad(2, "eos")
    assert choose_pad(tk, d_vocab=64) == Pad(34, "pad")


def test_pad_that_is_eos_is_taken_as_it_is_f08() -> None:
    assert language_model("LL", pad_token="</s>").pad == Pad(2, "pad")


def test_batches_are_of_similar_length_and_miss_no_row() -> None:
    lengths = [3, 9, 1, 9, 4, 2, 8]
    batches = batches_by_length(lengths, 3)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert [[lengths[index] for index in batch] for batch in batches] == [[9, 9, 8], [4, 3, 2], [1]]

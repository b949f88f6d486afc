"""Documents to rows, rows to batches: what is padded, masked, left out, and where each token stands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from jobs.interp.errors import Unusable
from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel, Pad, choose_pad
from jobs.interp.site import Site
from jobs.interp.tokens import GROUP_DOCUMENTS, RowStream, Side, batches_by_length, kept, pad
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
    rows = list(
        RowStream(["fbd", "eaf-iq"], tokenizer(), 16, max_tokens=100, bos_id=tokenizer().bos_token_id)
    )
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
    rows = list(RowStream(["abcde", "fghij", "klmno"], tokenizer(), 8, max_tokens=100, bos_id=1))
    assert [row.document for row in rows] == [0, 1, 2]
    assert all(row.ids[0] == 1 and 1 not in row.ids[1:] for row in rows)


def test_long_documents_are_cut_and_each_part_begins_with_bos() -> None:
    rows = list(RowStream(["abcdefghij"], tokenizer(), 5, max_tokens=100, bos_id=1))
    assert [row.ids for row in rows] == [(1, 4, 5, 6, 7), (1, 8, 9, 10, 11), (1, 12, 13)]
    assert next(iter(RowStream(["abcdefghij"], tokenizer(), 5, max_tokens=100))).ids == (4, 5, 6, 7, 8)


@pytest.mark.parametrize(("most", "lengths"), [(12, [5, 5, 2]), (11, [5, 5]), (10, [5, 5]), (100, [5, 5, 3])])
def test_max_tokens_counts_every_token_and_ends_in_no_lonely_bos(most: int, lengths: list[int]) -> None:
    rows = list(RowStream(["abcdefghij"], tokenizer(), 5, max_tokens=most, bos_id=1))
    assert [len(row.ids) for row in rows] == lengths


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(Unusable, match="no room"):
        list(RowStream(["abc"], tokenizer(), 1, max_tokens=10, bos_id=1))
    with pytest.raises(Unusable, match="no token"):
        list(RowStream([], tokenizer(), 8, max_tokens=10))


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


# Packing, templates, tokens that come ready-made ---------------------------------------------------------
def test_packed_rows_are_full_and_begin_with_bos_f06() -> None:
    """TK, three 5-token documents in rows of 8, BOS between them: every word once, BOS only where a text begins."""
    rows = list(
        RowStream(["abcde", "fghij", "klmno"], tokenizer(), 8, max_tokens=100, bos_id=1, packing=True)
    )
    assert [row.ids for row in rows] == [
        (1, 4, 5, 6, 7, 8, 1, 9),
        (1, 10, 11, 12, 13, 1, 14, 15),
        (1, 16, 17, 18),
    ]
    batch = pad([row.ids for row in rows], 0)
    chosen = kept(batch.input_ids, batch.mask, [1])
    assert (chosen.sum(), batch.mask.sum() - chosen.sum()) == (15, 5)
    assert 1 not in batch.input_ids[chosen]


def test_packing_leaves_no_bos_at_the_end_of_a_row() -> None:
    rows = list(RowStream(["abcdef", "gh"], tokenizer(), 8, max_tokens=100, bos_id=1, packing=True))
    assert [row.ids for row in rows] == [(1, 4, 5, 6, 7, 8, 9), (1, 10, 11)]
    assert [row.document for row in rows] == [0, 1]


def test_without_bos_packed_documents_are_parted_by_eos() -> None:
    rows = list(RowStream(["abc", "def"], tokenizer(), 5, max_tokens=100, packing=True))
    assert [row.ids for row in rows] == [(4, 5, 6, 2, 7), (8, 9)]
    bare = tokenizer()
    bare.eos_token = None
    assert [row.ids for row in list(RowStream(["abc", "def"], bare, 5, max_tokens=100, packing=True))] == [
        (4, 5, 6, 7, 8),
        (9,),
    ]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("context_size", [2, 3, 7, 8, 50])
def test_no_token_is_lost_and_bos_never_doubled(packing: bool, context_size: int) -> None:
    documents = ["abcdefg", "h", "ij klm", "nopqrstuvwxyz", "a"]
    stream = RowStream(documents, tokenizer(), context_size, max_tokens=1000, bos_id=1, packing=packing)
    rows = [row.ids for row in stream]
    words = [token for row in rows for token in row if token != 1]
    assert words == [token for text in documents for token in tokenizer()(text)["input_ids"]]
    assert all(row[0] == 1 and len(row) <= context_size and row[-1] != 1 for row in rows)
    assert not any(pair == (1, 1) for row in rows for pair in pairwise(row))
    assert (stream.tokens, stream.documents) == (sum(map(len, rows)), 5)


CHAT = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def chat_tokenizer() -> Any:
    """TKc: adds BOS itself, and its template begins with BOS."""
    tk = tokenizer()
    tk.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tk.chat_template = CHAT
    assert tk("abc")["input_ids"] == [1, 4, 5, 6]
    return tk


@pytest.mark.parametrize("packing", [False, True])
def test_a_conversation_has_one_bos_f07(packing: bool) -> None:
    """TKc, one user message "abc": the ids of templating and tokenizing in one step, exactly one BOS."""
    tk, messages = chat_tokenizer(), [{"role": "user", "content": "abc"}]
    [row] = list(RowStream([messages], tk, 16, max_tokens=100, bos_id=1, packing=packing))
    assert (
        list(row.ids) == tk.apply_chat_template(messages, tokenize=True, return_dict=False) == [1, 4, 5, 6, 2]
    )
    twice = tk(tk.apply_chat_template(messages, tokenize=False))["input_ids"]
    assert twice[:2] == [1, 1]  # what text tokenized again would give


def test_text_of_a_tokenizer_that_adds_bos_itself_has_one_f07() -> None:
    assert next(iter(RowStream(["abc"], chat_tokenizer(), 16, max_tokens=100, bos_id=1))).ids == (1, 4, 5, 6)


def test_a_conversation_without_a_template_is_refused() -> None:
    with pytest.raises(Unusable, match="no chat template"):
        list(RowStream([[{"role": "user", "content": "abc"}]], tokenizer(), 16, max_tokens=100))


@pytest.mark.parametrize(
    ("role", "content", "words"),
    [
        ("system", "abc", "Roles must alternate"),  # `raise_exception`, as the templates of models have it
        ("user", 5, "concatenate"),  # Python's TypeError
        ("user", 0, "no attribute 'strip'"),  # jinja's UndefinedError
    ],
)
def test_a_conversation_that_the_template_refuses_is_named(role: str, content: Any, words: str) -> None:
    tk, usual = chat_tokenizer(), [{"role": "user", "content": "abc"}]
    tk.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
        "{% if m['content'] == 0 %}{{ m['content'].strip() }}{% else %}{{ 'a' + m['content'] }}{% endif %}{% endfor %}"
    )
    refused = [{"role": role, "content": content}]
    with pytest.raises(
        Unusable, match=rf"refuses the conversation of document 3: .*{words}.*\. Leave such rows"
    ):
        list(RowStream(["abc", usual, refused], tk, 16, max_tokens=100))


@pytest.mark.parametrize("bos_id", [None, 1])
def test_rows_longer_than_the_context_are_split_and_counted_f10(bos_id: int | None) -> None:
    """Rows of 12 tokens, context 8: every token is read, none is cut away, and how many were split is told."""
    given = [list(range(4, 16)), list(range(16, 28))]
    stream = RowStream(given, tokenizer(), 8, max_tokens=100, bos_id=bos_id)
    rows = list(stream)
    assert [token for row in rows for token in row.ids if token != 1] == [*range(4, 28)]
    assert [len(row.ids) for row in rows] == ([8, 4, 8, 4] if bos_id is None else [8, 6, 8, 6])
    assert (stream.split, stream.documents) == (2, 2)


def test_ready_made_rows_keep_their_own_bos() -> None:
    assert next(iter(RowStream([[1, 5, 6]], tokenizer(), 8, max_tokens=100, bos_id=1))).ids == (1, 5, 6)
    assert next(iter(RowStream([[5, 6]], tokenizer(), 8, max_tokens=100, bos_id=1))).ids == (1, 5, 6)


@pytest.mark.parametrize("strange", [64, -1])
def test_tokens_that_the_model_does_not_know_are_refused(strange: int) -> None:
    stream = RowStream([[4, 5], [4, strange]], tokenizer(), 8, max_tokens=100, d_vocab=64)
    with pytest.raises(Unusable, match=rf"Document 2 holds the token {strange}.*0 to 63.*another tokenizer"):
        list(stream)


def test_rows_are_made_while_they_are_asked_for() -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        for number in range(10**9):
            taken.append(number)
            yield "abcdefgh" * 40

    rows = iter(RowStream(endless(), tokenizer(), 8, max_tokens=10**9, bos_id=1))
    for _ in range(200):
        next(rows)
    assert len(taken) <= GROUP_DOCUMENTS


def test_what_is_to_come_is_told_from_the_part_already_read() -> None:
    stream = RowStream(["abcdefg"] * 1000, tokenizer(), 8, max_tokens=10**6, bos_id=1)
    assert stream.expected == 10**6  # nothing is known yet
    rows = iter(stream)
    for _ in range(10):
        next(rows)
    assert stream.expected == pytest.approx(8000, rel=0.01)
    assert len(list(rows)) == 990
    assert (stream.expected, stream.tokens, stream.finished) == (8000, 8000, True)

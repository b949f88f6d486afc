"""Documents to rows of tokens, and rows to padded batches.

Rules, each from somebody's lost week: documents are joined in a row only where packing is asked for; a token is left
out because of its *id* or the *mask*, never because of its column (F05: with left padding the first column is padding,
not BOS); positions come from the mask, so that models with learned positions see what they would see without padding
(F04); BOS is never doubled (F07), and no token is cut away in silence (F10).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from jobs.interp.documents import as_bytes, is_conversation
from jobs.interp.errors import Unusable
from jobs.interp.readers import Document

#: Text that is tokenized at a time: enough for all of a tokenizer's threads, little in memory.
GROUP_CHARACTERS, GROUP_DOCUMENTS = 2**18, 256

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one document, at most a context long. A packed row is a document of its own."""

    document: int
    ids: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """A padded batch. `input_ids`, `mask` (1 = real token) and `position_ids`: [batch, seq], int64."""

    input_ids: Tensor
    mask: Tensor
    position_ids: Tensor

    def model_inputs(self, device: str | torch.device) -> dict[str, Tensor]:
        """Arguments for a causal LM's forward on `device`."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.mask, "position_ids": self.position_ids}
        return {name: tensor.to(device) for name, tensor in inputs.items()}


class RowStream:
    """Rows of at most `context_size` tokens until there are `max_tokens` in all, made while they are asked for.

    With `bos_id` each row starts with it (many models park huge values on the first position; with BOS there they can
    be left out by its id). The tokenizer adds nothing itself and a document that brings its BOS keeps it, so none is
    doubled. What is longer than a row is split, each part beginning with BOS; nothing is lost.
    `packing` joins documents end to end into full rows, each document after BOS (where there is none, after EOS); a
    token then sees the texts before it in its row. Conversations are what the model's chat template makes of them.

    Raises `Unusable` when the context has no room for text, the documents hold no token, or one that the model (of
    `d_vocab` words) does not know.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Any,
        context_size: int,
        *,
        max_tokens: int,
        bos_id: int | None = None,
        packing: bool = False,
        d_vocab: int | None = None,
    ) -> None:
        self.source, self.tokenizer, self.packing = documents, tokenizer, packing
        self.context_size, self.max_tokens, self.d_vocab = context_size, max_tokens, d_vocab
        self.start = [] if bos_id is None else [bos_id]
        if context_size <= len(self.start):
            raise Unusable(f"A context of {context_size} has no room for text beside BOS.")
        self._clear()

    def _clear(self) -> None:
        self.tokens = self.documents = self.split = 0
        self.finished = False
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Digest over the documents of which something was read; a zero byte parts them."""
        return self._digest.hexdigest()

    @property
    def expected(self) -> int:
        """Tokens in all: exact when the last row is out, before that as far as the part already read can tell."""
        if self.finished:
            return self.tokens
        share = self._share()
        return max(
            self.tokens, min(self.max_tokens, round(self.tokens / share) if share else self.max_tokens)
        )

    def _share(self) -> float:
        if isinstance(self.source, Sequence):
            return self.documents / max(1, len(self.source))
        return getattr(self.source, "share", 0.0)

    def __iter__(self) -> Iterator[Row]:
        self._clear()
        rows = self._packed() if self.packing else self._parted()
        while self.max_tokens - self.tokens > len(self.start):  # or there would be a row of BOS alone
            row = next(rows, None)
            if row is None:
                break
            ids = row.ids[: self.max_tokens - self.tokens]
            self.tokens += len(ids)
            yield Row(row.document, ids)
        self.finished = True
        if not self.tokens:
            raise Unusable("The corpus holds no token.")

    def _parted(self) -> Iterator[Row]:
        room = self.context_size - len(self.start)
        for ids in self._tokenized():
            number, begun = self.documents - 1, [] if self._begins(ids) else self.start
            first = self.context_size - len(begun)
            self.split += len(ids) > first
            yield Row(number, (*begun, *ids[:first]))
            for at in range(first, len(ids), room):
                yield Row(number, (*self.start, *ids[at : at + room]))

    def _packed(self) -> Iterator[Row]:
        between = self.start or self._end()
        held, number = list(self.start), 0
        for ids in self._tokenized():
            body = ids[len(self.start) :] if self._begins(ids) else ids
            if len(held) > len(self.start) and len(held) + len(between) < self.context_size:
                held += between
            elif len(held) > len(self.start):  # no room for a word of it
                yield Row(number, tuple(held))
                held, number = list(self.start), number + 1
            self.split += len(held) + len(body) > self.context_size
            at = 0
            while at < len(body):
                if len(held) == self.context_size:
                    yield Row(number, tuple(held))
                    held, number = list(self.start), number + 1
                taken = body[at : at + self.context_size - len(held)]
                held, at = held + taken, at + len(taken)
        if len(held) > len(self.start):
            yield Row(number, tuple(held))

    def _begins(self, ids: list[int]) -> bool:
        """Whether a document brings its own BOS."""
        return bool(self.start) and ids[:1] == self.start

    def _end(self) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [] if end is None or not 0 <= end < (self.d_vocab or end + 1) else [end]

    def _tokenized(self) -> Iterator[list[int]]:
        """Token ids of each document that has any, in order."""
        for group in _groups(self.source):
            for document, ids in zip(group, self._ids_of(group), strict=True):
                self._digest.update(as_bytes(document))
                self.documents += 1
                self._require_known(ids)
                if ids:
                    yield ids

    def _require_known(self, ids: list[int]) -> None:
        if ids and self.d_vocab is not None and not 0 <= min(ids) <= max(ids) < self.d_vocab:
            strange = max(ids) if min(ids) >= 0 else min(ids)
            raise Unusable(
                f"Document {self.documents} holds the token {strange}, and the model knows 0 to {self.d_vocab - 1}: "
                "the tokens come from another tokenizer."
            )

    def _ids_of(self, group: list[Document]) -> list[list[int]]:
        texts = [document for document in group if isinstance(document, str)]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        tokenized = iter(self.tokenizer(texts, **options)["input_ids"] if texts else ())
        return [
            next(tokenized) if isinstance(document, str) else self._given(document, number)
            for number, document in enumerate(group, self.documents + 1)
        ]

    def _given(self, document: Any, number: int) -> list[int]:
        return self._templated(document, number) if is_conversation(document) else list(document)

    def _templated(self, messages: list[dict[str, Any]], number: int) -> list[int]:
        """A conversation by the model's chat template, in one step: its text tokenized again would double BOS (F07)."""
        require_template(self.tokenizer)
        try:
            return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        except (TemplateError, TypeError, KeyError) as error:
            words = str(error)[:300].rstrip(".")
            raise Unusable(
                f"The model's chat template refuses the conversation of document {number}: {words}. "
                "Leave such rows out, or take a field that holds text."
            ) from error


def require_template(tokenizer: Any) -> None:
    """Raises `Unusable` when the tokenizer cannot write out conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise Unusable(
            "The corpus holds conversations (messages), and the model's tokenizer has no chat template; "
            "take an instruction-tuned model, or a field that holds text."
        )


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, side: Side = "right") -> Batch:
    """Rows of token ids as one batch.

    Shapes: all three tensors `[len(rows), longest row]`. Positions count real tokens only; padding gets
    position 0.
    """
    width = max(len(row) for row in rows)
    filled = [_filled(list(row), width, pad_id, side) for row in rows]
    input_ids = torch.tensor([ids for ids, _ in filled])
    mask = torch.tensor([real for _, real in filled])
    return Batch(input_ids, mask, positions(mask))


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its own row, from the mask alone. Shapes: `mask` and result `[batch,
    seq]`.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def kept(input_ids: Tensor, mask: Tensor, excluded_ids: Iterable[int]) -> Tensor:
    """Which positions count: real ones whose id is not excluded. Shapes: all `[batch, seq]`, result bool."""
    excluded = torch.tensor(sorted(set(excluded_ids)), dtype=torch.long, device=input_ids.device)
    return mask.bool() & ~torch.isin(input_ids, excluded)


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indexes of rows in batches of similar length, longest first (memory runs out at once or never)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def _filled(ids: list[int], width: int, pad_id: int, side: Side) -> tuple[list[int], list[int]]:
    padding, real = [pad_id] * (width - len(ids)), [1] * len(ids)
    blank = [0] * len(padding)
    return (padding + ids, blank + real) if side == "left" else (ids + padding, real + blank)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in handfuls for the tokenizer."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group

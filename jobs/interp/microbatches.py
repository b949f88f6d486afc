"""Rows through the model in parts that fit: where memory runs out, the same part again in halves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: How other parts of torch than its CUDA allocator say that memory ran out.
WORDS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory", "can't allocate memory", "not enough memory")


class MicroBatches:
    """`size` rows at a time, and never more again than last fitted. Who halves goes on; nothing is started again."""

    def __init__(self, size: int) -> None:
        self.size = size

    def over(
        self, rows: Sequence[int], work: Callable[[Sequence[int]], T]
    ) -> Iterator[tuple[Sequence[int], T]]:
        """Each part of `rows` with what `work` made of it.

        Raises `torch.OutOfMemoryError` when a single row does not fit.
        """
        first = 0
        while first < len(rows):
            part = rows[first : first + self.size]
            found = self._tried(part, work)
            if found is not None:
                yield part, found
                first += len(part)

    def _tried(self, part: Sequence[int], work: Callable[[Sequence[int]], T]) -> T | None:
        """What `work` made of the part; None when memory ran out and the parts are smaller now."""
        try:
            return work(part)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            if len(part) == 1:
                raise torch.OutOfMemoryError(f"A single row does not fit into memory: {error}") from error
            words = str(error).partition("\n")[0]
        # Only here, where the exception is gone, are the tensors of its frames free.
        self.size = len(part) // 2
        logger.warning(
            "out of memory with %d rows; going on with %d at a time: %s", len(part), self.size, words
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def is_short_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in WORDS)

"""The order of a training: endless shuffled batches, each a function of (seed, step) alone.

Each pass draws a new order of units (shards of stored vectors, or of text that a model will read), fills buffers of up
to a fixed number of rows with them, and draws a new order of the rows in each buffer. Batches run over the ends of
buffers and passes. So a training can go on anywhere, and memory is a buffer, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from jobs.interp.reading import Selection
from jobs.interp.seeds import generator

#: Vectors of one site mixed at a time. A constant, because the order of training depends on it.
BUFFER_BYTES = 512 * 2**20


class Buffer(NamedTuple):
    """One filling of the buffer: the how manieth of which pass, and the units in it, in order."""

    epoch: int
    number: int
    units: tuple[int, ...]


class Part(NamedTuple):
    """Consecutive rows of a buffer in its own order."""

    buffer: Buffer
    start: int
    stop: int


class Order:
    """Which rows stand where in the endless stream. `sizes`: rows of each unit; `room`: rows of a buffer, at most,
    though a unit is never cut."""

    def __init__(self, sizes: Sequence[int], room: int, seed: int) -> None:
        self.sizes, self.room, self.seed = sizes, room, seed
        self.length = sum(sizes)
        self._plan: tuple[int, list[Buffer]] | None = None

    def parts(self, start: int, count: int) -> list[Part]:
        """Where the rows from `start` of the endless stream on are found."""
        found = []
        while count:
            part = self._part(start, count)
            found.append(part)
            start, count = start + part.stop - part.start, count - (part.stop - part.start)
        return found

    def permutation(self, buffer: Buffer) -> Tensor:
        """The order of a buffer's rows: its j-th row is row `permutation[j]` of its units, one after another."""
        draw = generator(self.seed, "rows", buffer.epoch, buffer.number)
        return torch.randperm(self.size(buffer), generator=draw)

    def size(self, buffer: Buffer) -> int:
        return sum(self.sizes[unit] for unit in buffer.units)

    def after(self, buffer: Buffer) -> Buffer:
        """The filling that comes next."""
        plan = self.plan(buffer.epoch)
        return plan[buffer.number + 1] if buffer.number + 1 < len(plan) else self._drawn(buffer.epoch + 1)[0]

    def plan(self, epoch: int) -> list[Buffer]:
        """The fillings of a pass."""
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self._drawn(epoch))
        return self._plan[1]

    def _part(self, position: int, count: int) -> Part:
        epoch, offset = divmod(position, self.length)
        for buffer in self.plan(epoch):
            size = self.size(buffer)
            if offset < size:
                return Part(buffer, offset, min(size, offset + count))
            offset -= size
        raise AssertionError("a pass is as long as its buffers")

    def _drawn(self, epoch: int) -> list[Buffer]:
        order = torch.randperm(len(self.sizes), generator=generator(self.seed, "shards", epoch)).tolist()
        groups: list[list[int]] = [[]]
        size = 0
        for unit in order:
            if groups[-1] and size + self.sizes[unit] > self.room:
                groups.append([])
                size = 0
            groups[-1].append(unit)
            size += self.sizes[unit]
        return [Buffer(epoch, number, tuple(units)) for number, units in enumerate(groups)]


class Shuffled:
    """Stored vectors in the order of a training. While a buffer is trained on, a thread reads the next one, so at most
    two are in memory.
    """

    def __init__(
        self, selection: Selection, batch_size: int, seed: int, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.selection, self.batch_size = selection, batch_size
        self.dtype = selection.store.read(0, "acts").dtype
        room = max(1, buffer_bytes // (self.dtype.itemsize * selection.store.d_model))
        self.order = Order(selection.counts, room, seed)
        self._held: tuple[Buffer, Tensor] | None = None
        self._ahead: tuple[Buffer, Future[Tensor]] | None = None
        # One thread for all buffers: each new one would take memory from the system that it never gives back.
        self._reader = ThreadPoolExecutor(1, "next-buffer")

    def __len__(self) -> int:
        """Rows in one pass."""
        return self.order.length

    def batch(self, step: int) -> Tensor:
        """The batch of `step` (from 0). Shapes: `[batch_size, width]` in the stored dtype."""
        parts = self.order.parts(step * self.batch_size, self.batch_size)
        return torch.cat([self._rows(part.buffer)[part.start : part.stop] for part in parts])

    def epoch(self, step: int) -> int:
        """The pass, from 0, in which the batch of `step` begins."""
        return step * self.batch_size // self.order.length

    def release(self) -> None:
        """Let go of both buffers."""
        self._reader.shutdown(cancel_futures=True)
        self._ahead = self._held = None

    def _rows(self, buffer: Buffer) -> Tensor:
        if self._held is None or self._held[0] != buffer:
            self._held = None  # let go of the old buffer before a third one is filled
            self._held = (buffer, self._read(buffer))
            following = self.order.after(buffer)
            self._ahead = (following, self._reader.submit(self._filled, following))
        return self._held[1]

    def _read(self, buffer: Buffer) -> Tensor:
        ahead, self._ahead = self._ahead, None
        found = ahead[1].result() if ahead else None  # also one that nobody wants now: two fillings at most
        return found if ahead and found is not None and ahead[0] == buffer else self._filled(buffer)

    def _filled(self, buffer: Buffer) -> Tensor:
        """The rows of a buffer in its order; beside them never more than one shard is in memory."""
        places = torch.empty(self.order.size(buffer), dtype=torch.long)
        places[self.order.permutation(buffer)] = torch.arange(len(places))
        rows = torch.empty(len(places), sum(self.selection.store.widths), dtype=self.dtype)
        first = 0
        for unit in buffer.units:
            part = self.selection.load(unit)
            rows[places[first : first + len(part)]] = part
            first += len(part)
        return rows

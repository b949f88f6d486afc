"""What goes on beside the model, each in one thread: rows made ahead, files written behind.

The tokenizer and the disk leave the interpreter while they work, so neither holds up the next forward pass.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")
#: How often a thread whose products nobody takes looks whether anybody ever will.
LOOK_SECONDS = 0.1


class Ahead(Generic[T]):
    """The items of `source`, made by a thread that runs at most `room` items ahead; it ends with the `with` block.

    What `source` raises is raised where its next item would be taken.
    """

    def __init__(self, source: Iterable[T], room: int = 2) -> None:
        self.source = source
        self.made: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._make, name="rows ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        self.thread.start()
        return self._taken()

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self.thread.join()

    def _taken(self) -> Iterator[T]:
        while True:
            what, item = self.made.get()
            if what == "error":
                raise item
            if what == "end":
                return
            yield item

    def _make(self) -> None:
        try:
            for item in self.source:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:  # told where the item is missed
            self._put("error", error)

    def _put(self, what: str, item: Any) -> bool:
        """Whether somebody will take it."""
        while not self.closed.is_set():
            try:
                self.made.put((what, item), timeout=LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False


class Behind:
    """Does one thing at a time in the background; the next one waits until it is done.

    What one raises, the next call or the end of the `with` block raises.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files behind")
        self._last: Future[None] | None = None

    def __enter__(self) -> Behind:
        return self

    def __call__(self, work: Callable[[], None]) -> None:
        self.wait()
        self._last = self._thread.submit(work)

    def wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._thread.shutdown(wait=True)  # whatever ended the block: a shard that is being written is kept
        if kind is None:
            self.wait()

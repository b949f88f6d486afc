"""The outbox: what a reader that falls behind still gets."""

from __future__ import annotations

import json
from typing import Any

from monitor.hub import QUEUE_LENGTH, Outbox


def put(outbox: Outbox, event: str, number: int, **data: Any) -> None:
    frame = {"channel": "c", "event": event, "seq": number, "data": data}
    outbox.put(frame, json.dumps(frame))


async def drained(outbox: Outbox) -> list[Any]:
    lines = []
    while outbox._lines:
        line = json.loads(await outbox.get())
        lines.append(line.get("seq", line["event"]))
    return lines


async def test_it_keeps_the_newest_of_each_sort_and_every_change() -> None:
    outbox = Outbox()
    for number in range(1, 4):
        put(outbox, "system:metrics", number, host="alpha")
        put(outbox, "system:metrics", 10 + number, host="beta")
        put(outbox, "job:changed", 20 + number)
    assert await drained(outbox) == [21, 22, 3, 13, 23]


async def test_it_says_resync_instead_of_a_queue_that_is_too_long() -> None:
    outbox = Outbox()
    for number in range(QUEUE_LENGTH + 3):
        put(outbox, "job:log", number)
    assert await drained(outbox) == ["resync", QUEUE_LENGTH + 1, QUEUE_LENGTH + 2]
    put(outbox, "job:log", 1)
    assert await drained(outbox) == [1]


async def test_it_counts_right_after_a_resync() -> None:
    outbox = Outbox()
    for number in range(QUEUE_LENGTH):
        put(outbox, "job:log", number)
    await outbox.get()
    outbox.resync()
    for number in range(QUEUE_LENGTH):
        put(outbox, "job:log", number)
    assert len(await drained(outbox)) == QUEUE_LENGTH + 1

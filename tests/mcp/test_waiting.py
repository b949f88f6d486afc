"""`wait_for_job`: until it settles or the time is over, with progress that grows; for a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpus.rest import ApiError
from monitor.mcp import calls, waiting
from monitor.mcp.calls import Answer


def job(status: str, fraction: float | None = None) -> Answer:
    progress = (
        {"stage": "counting", "fraction": fraction, "done": 1, "total": 2} if fraction is not None else {}
    )
    return Answer(
        {"kind": "rehearsal", "status": status, "progress": progress, "waiting_for": None, "error": ""}
    )


async def wait(*looks: Answer, seconds: float = 5) -> tuple[Answer, list[float]]:
    told: list[float] = []
    following: Iterator[Answer] = iter([*looks, *[looks[-1]] * 99])

    async def look() -> Answer:
        return next(following)

    async def tell(fraction: float, total: float | None, message: str | None) -> None:
        told.append(fraction)

    return await waiting.wait(look, seconds, tell), told


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)


@pytest.mark.parametrize("status", ["succeeded", "failed", "refused", "cancelled", "paused", "held"])
async def test_it_returns_when_the_job_moves_no_more_by_itself(status: str) -> None:
    answer, told = await wait(
        job("queued"), job("running", 0.2), job("running", 0.2), job("running", 0.1), job(status)
    )
    assert (answer.data["settled"], answer.data["job"]["status"], told) == (True, status, [0.2])


@pytest.mark.parametrize("seconds", [0, 0.05])
async def test_it_returns_when_the_time_is_over(seconds: float) -> None:
    answer, _ = await wait(job("running", 0.5), seconds=seconds)
    assert (answer.data["settled"], answer.outcome) == (False, "ok")
    assert seconds <= answer.data["waited_seconds"] + 0.05 < 1


async def test_it_says_what_a_look_says() -> None:
    answer, _ = await wait(job("running"), calls.GONE)
    assert answer == calls.GONE


def test_one_user_has_so_many_and_no_more() -> None:
    def open_waits(count: int) -> Any:
        with waiting.one_of_few("alice"):
            return open_waits(count - 1) if count > 1 else None

    open_waits(waiting.WAITS_PER_USER)
    with pytest.raises(ApiError, match="16 jobs"):
        open_waits(waiting.WAITS_PER_USER + 1)
    open_waits(waiting.WAITS_PER_USER)

"""`wait_for_job`: until it settles or the time is over, with progress that grows; for a few at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.contrib.auth.models import User
from django.db import OperationalError

from gpus.rest import ApiError
from jobs.models import Job, Status
from monitor.mcp import calls, waiting
from monitor.mcp.caller import Caller
from monitor.mcp.calls import Answer
from monitor.mcp.server import Desk
from monitor.models import ToolCall


def job(status: str, fraction: float | None = None) -> Answer:
    progress = (
        {"stage": "counting", "fraction": fraction, "done": 1, "total": 2} if fraction is not None else {}
    )
    return Answer(
        {"kind": "rehearsal", "status": status, "progress": progress, "waiting_for": None, "error": ""}
    )


async def wait(*looks: Answer, seconds: float = 5) -> tuple[Answer, list[float]]:
    """Each look and each peek sees the next state; the last one stays."""
    told: list[float] = []
    states = list(looks)

    async def look() -> Answer:
        return states.pop(0) if len(states) > 1 else states[0]

    async def peek() -> dict[str, Any]:
        return (await look()).data

    async def tell(fraction: float, total: float | None, message: str | None) -> None:
        told.append(fraction)

    return await waiting.wait(look, peek, seconds, tell), told


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


@pytest.mark.parametrize("looks", [[calls.GONE], [job("running"), job("succeeded"), calls.GONE]])
async def test_it_says_what_a_look_says(looks: list[Answer]) -> None:
    """The last one, too: who may no longer see the job is not told of it."""
    answer, _ = await wait(*looks)
    assert answer == calls.GONE


def test_one_user_has_so_many_and_no_more() -> None:
    def open_waits(count: int) -> Any:
        with waiting.one_of_few("alice"):
            return open_waits(count - 1) if count > 1 else None

    open_waits(waiting.WAITS_PER_USER)
    with pytest.raises(ApiError, match="16 jobs"):
        open_waits(waiting.WAITS_PER_USER + 1)
    open_waits(waiting.WAITS_PER_USER)


async def call(user: User, **given: Any) -> Answer:
    context: Any = SimpleNamespace(session=SimpleNamespace(report_progress=None))
    return await Desk(lambda: Caller(user, ("read",))).wait(
        context, Caller(user, ("read",)), "wait_for_job", given
    )


@pytest.mark.django_db(transaction=True)
async def test_a_database_that_is_away_and_odd_arguments_are_told_as_everywhere(
    alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(job_id: object) -> dict[str, Any]:
        raise OperationalError("gone")

    monkeypatch.setattr(waiting, "peek", away)
    job = await database_sync_to_async(Job.objects.create)(
        kind="rehearsal", owner=alice, status=Status.RUNNING
    )
    assert (await call(alice, id=str(job.pk), seconds=5)).outcome == "database_unavailable"
    odd = await call(alice, **{"\ud800": 1})
    assert (odd.outcome, odd.text.encode() != b"") == ("invalid", True)
    rows = await database_sync_to_async(list)(
        ToolCall.objects.order_by("pk").values_list("outcome", flat=True)
    )
    assert rows == ["database_unavailable", "invalid"]

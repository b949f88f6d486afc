"""Forty mixed jobs on four cards at the real clock: how close the queue comes to the best list schedule."""

from __future__ import annotations

import heapq
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.system import REHEARSAL, System

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

GIB = 1024  # in MiB
CARDS = (2, 3, 4, 4)
#: What a job costs beside its steps, in seconds: its process and card verified, its memory back, the next one granted.
OVERHEAD = 0.5
JOBS = 40


@dataclass(frozen=True)
class Wish:
    """One job of the test: its seconds, its need in MiB, its card if it names one."""

    seconds: float
    need: int
    card: int | None

    def fits(self, card: int) -> bool:
        return self.card in (None, card) and self.need <= CARDS[card] * GIB - 256


def wishes(seed: int = 11) -> list[Wish]:
    """A third names a card; most are small, and some fit on the largest two only."""
    draw = random.Random(seed)
    found = []
    for n in range(JOBS):
        need = draw.choice((500, 500, 1000, 2000, 3000))
        cards = [card for card in range(4) if need <= CARDS[card] * GIB - 256]
        found.append(Wish(draw.uniform(1.5, 5.0), need, draw.choice(cards) if n % 3 == 0 else None))
    return found


def list_schedule(order: Sequence[Wish]) -> float:
    """The makespan when each card that gets free takes the first in `order` that may run there."""
    left, free, done = list(order), [(0.0, card) for card in range(4)], 0.0
    while free and left:
        now, card = heapq.heappop(free)
        wish = next((wish for wish in left if wish.fits(card)), None)
        if wish is not None:
            left.remove(wish)
            done = max(done, now + wish.seconds + OVERHEAD)
            heapq.heappush(free, (now + wish.seconds + OVERHEAD, card))
    return done


def best_schedule() -> float:
    """The better of two: as submitted, and longest first."""
    asked = wishes()
    return min(list_schedule(asked), list_schedule(sorted(asked, key=lambda wish: -wish.seconds)))


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The forty submitted at once, with a question in the midst of them; all that was written down meanwhile."""
    home = tmp_path_factory.mktemp("makespan")
    cards = ",".join(f"{size}GiB" for size in CARDS)
    kinds = f"{REHEARSAL}:{REHEARSAL.parent / 'question'}"
    with System(home, cards=cards, time_scale=1, MISTUDIO_KIND_PATHS=kinds) as system:
        warm = system.submit("rehearsal", steps=1)  # the fork server's imports
        system.wait(warm["id"])
        system.wait_for_free_cards()
        journal = home / "journal"
        held = [submitted(system, wish, journal) for wish in wishes()]
        began = time.time()
        for job in held:
            system.call("POST", f"jobs/{job}/release/")
        time.sleep(8)
        question = asked(system, journal)
        for job in held:
            assert system.wait(job, timeout=300)["status"] == "succeeded"
        yield {"began": began, "question": question, "notes": notes(journal), "leases": leases(system, began)}


def submitted(system: System, wish: Wish, journal: Path) -> str:
    body: dict[str, Any] = {
        "steps": 4,
        "seconds_per_step": wish.seconds / 4,
        "journal": str(journal),
        "hold": True,
    }
    if wish.card is not None:
        body["gpu"] = wish.card
    return system.submit("rehearsal", estimate_mib=wish.need - 160, **body)["id"]


def asked(system: System, journal: Path) -> float:
    """Seconds from the submit of a question until its first step begins, beside the jobs on the cards."""
    began = time.time()
    job = system.submit("question", steps=1, journal=str(journal))
    assert system.wait(job["id"])["status"] == "succeeded"
    return next(note["at"] for note in notes(journal) if note["job"] == job["id"]) - began


def notes(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def leases(system: System, since: float) -> dict[str, list[tuple[float, float]]]:
    """By card, when its batch leases began and ended."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rows = system.rows(
        "SELECT resource, created_at, ended_at FROM jobs_lease WHERE job_class = 'batch' ORDER BY created_at"
    )
    for card, created, ended in (row for row in rows if moment(row[1]) > since):
        found[card].append((moment(created), moment(ended) if ended else time.time()))
    return found


def moment(text: str) -> float:
    return datetime.fromisoformat(f"{text}+00:00").timestamp()


def test_the_makespan_is_within_15_percent_of_the_best_list_schedule(lived: dict[str, Any]) -> None:
    took, best = max(note["at"] for note in lived["notes"]) - lived["began"], best_schedule()
    print(
        f"\nmakespan {took:.1f} s, best list schedule {best:.1f} s with {OVERHEAD} s per job: {took / best:.2f}"
    )
    assert took <= 1.15 * best


def test_no_card_is_free_for_two_seconds_while_a_job_waits_for_any(lived: dict[str, Any]) -> None:
    """Gaps between a lease and the next on its card, up to the start of the last job."""
    idle = [after[0] - before[1] for card in lived["leases"].values() for before, after in pairwise(card)]
    print(f"\nidle p50 {statistics.median(idle):.2f} s, max {max(idle):.2f} s")
    assert max(idle) < 2


def test_from_the_end_of_a_job_to_the_first_step_of_the_next_p95_is_under_three_seconds(
    lived: dict[str, Any],
) -> None:
    spans = sorted(handovers(lived["notes"]))
    p95 = statistics.quantiles(spans, n=20)[18]
    print(
        f"\nhand-over p50 {statistics.median(spans):.2f} s, p95 {p95:.2f} s, max {spans[-1]:.2f} s of {len(spans)}"
    )
    assert p95 < 3


def handovers(notes: list[dict[str, Any]]) -> Iterator[float]:
    """Seconds from an `end` on a card to the next `start` there."""
    ended: dict[str, float] = {}
    for note in sorted(notes, key=lambda note: note["at"]):
        card = note["cards"][0]
        if note["event"] == "end":
            ended[card] = note["at"]
        elif note["event"] == "start" and card in ended:
            yield note["at"] - ended.pop(card)


def test_a_question_starts_within_a_second_beside_the_jobs(lived: dict[str, Any]) -> None:
    print(f"\nquestion: {lived['question']:.2f} s")
    assert lived["question"] < 1

"""Free, promised and outside memory of a card: the arithmetic of admission, case by case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpus.owners import Owner
from jobs.memory import GIB, MIB, CardMemory, card_memory, reserve_bytes
from jobs.models import Lease

TOTAL, DRIVER = 24 * GIB, 256 * MIB
OURS: Owner = {"owner": "job", "job_id": "one"}
FOREIGN: Owner = {"owner": "foreign", "job_id": None}
UNKNOWN: Owner = {"owner": "unknown", "job_id": None}


def lease(estimate: int, observed: int | None = None, state: str = Lease.State.ACTIVE) -> Any:
    return SimpleNamespace(
        attempt=SimpleNamespace(job_id="one"), estimate_bytes=estimate, observed_bytes=observed, state=state
    )


def entry(used: int | None, pid: int = 7) -> dict[str, Any]:
    return {"pid": pid, "name": "python", "memory_used_bytes": used}


def memory(
    used: int,
    listed: list[tuple[int | None, Owner]],
    leases: list[Any] | None = None,
    lately_ours: bool = False,
) -> CardMemory:
    reading = {
        "memory_used_bytes": used,
        "memory_free_bytes": TOTAL - DRIVER - used,
        "memory_reserved_bytes": DRIVER,
    }
    entries, owners = [entry(bytes_) for bytes_, _ in listed], [owner for _, owner in listed]
    return card_memory(TOTAL, reading, entries, owners, leases or [], lately_ours or bool(leases))


@pytest.mark.parametrize(
    ("total", "kept"), [(4 * GIB, 256 * MIB), (12 * GIB, 256 * MIB), (24 * GIB, 24 * GIB // 50)]
)
def test_the_reserve_is_256_mib_or_two_percent(total: int, kept: int) -> None:
    assert reserve_bytes(total) == kept


def test_what_a_running_job_has_still_to_take_is_not_free() -> None:
    """Estimate 10 GiB, 4 of them taken: 6 are promised; one that took more than it said promises nothing."""
    found = memory(4 * GIB, [(4 * GIB, OURS)], [lease(10 * GIB)])
    assert found.promised == 6 * GIB
    assert found.free_for_jobs == TOTAL - DRIVER - 10 * GIB
    assert found.outside == 0
    assert memory(12 * GIB, [(12 * GIB, OURS)], [lease(10 * GIB)]).promised == 0


def test_a_job_that_ends_takes_nothing_more() -> None:
    assert memory(0, [], [lease(10 * GIB, state=Lease.State.RELEASING)]).promised == 0


def test_the_keepers_measure_counts_where_the_card_lists_nobody() -> None:
    assert memory(3 * GIB, [], [lease(10 * GIB, observed=3 * GIB)]).promised == 7 * GIB


@pytest.mark.parametrize("owner", [FOREIGN, UNKNOWN])
def test_listed_strangers_are_outside(owner: Owner) -> None:
    found = memory(23 * GIB, [(20 * GIB, owner), (3 * GIB, OURS)], [lease(3 * GIB)])
    assert found.outside == 20 * GIB
    assert [p["memory_used_bytes"] for p in found.strangers] == [20 * GIB]
    assert found.without_ours == TOTAL - DRIVER - 20 * GIB


def test_memory_that_nobody_is_listed_for_is_outside_unless_a_lease_is_or_was_just_there() -> None:
    assert memory(5 * GIB, [(1 * GIB, FOREIGN)]).outside == 5 * GIB
    assert memory(5 * GIB, [(1 * GIB, FOREIGN)], lately_ours=True).outside == 1 * GIB
    assert memory(5 * GIB, [], [lease(1 * GIB)]).outside == 0


def test_where_no_memory_is_told_all_that_our_leases_cannot_account_for_is_outside() -> None:
    found = memory(20 * GIB, [(None, FOREIGN), (None, OURS)], [lease(8 * GIB)])
    assert found.outside == 12 * GIB
    assert memory(20 * GIB, [(None, FOREIGN)]).outside == 20 * GIB


def test_it_holds_what_leaves_the_reserve_to_the_byte() -> None:
    empty = memory(0, [])
    fits = TOTAL - DRIVER - reserve_bytes(TOTAL)
    assert empty.holds(fits)
    assert not empty.holds(fits + 1)
    assert empty.would_hold(fits)
    assert not empty.would_hold(fits + 1)


def test_a_card_that_does_not_say_refuses_nobody() -> None:
    silent = card_memory(None, {}, [], [], [], False)
    assert silent.holds(10**15)
    assert silent.would_hold(10**15)
    assert silent.capacity is silent.without_ours is silent.free_for_jobs is None


def test_the_agent_that_a_driver_lists_is_no_use_of_the_card_g51() -> None:
    """It is listed without memory; that must not turn what is known of the others into a guess."""
    agent: Owner = {"owner": "self", "job_id": None}
    used = 20 * GIB + 500 * MIB
    found = memory(used, [(20 * GIB, FOREIGN), (None, agent)], lately_ours=True)
    assert found.outside == 20 * GIB
    assert [entry["memory_used_bytes"] for entry in found.strangers] == [20 * GIB]
    assert memory(used, [(20 * GIB, FOREIGN), (None, UNKNOWN)], lately_ours=True).outside == used

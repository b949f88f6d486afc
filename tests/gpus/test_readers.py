"""Readers under supervision: what a driver may do to us, and what it costs the other cards."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpus import backends, readers, sampling
from gpus.backends.base import BackendUnavailable, CardLost
from gpus.backends.simulated import SimulatedBackend, stat
from gpus.readers import CardHung, Readers, ReadFailed
from gpus.sampling import Sampler, in_pci_order


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def spec(home: Path, monkeypatch: pytest.MonkeyPatch) -> backends.Spec:
    monkeypatch.setattr(readers, "MODULE", "tests.gpus.stub_reader")
    monkeypatch.setattr(readers, "CALL_SECONDS", 0.8)
    return {"backend": "simulated", "host": "vm", "home": str(home), "sizes": [2**30, 2**30, 2**30]}


@pytest.fixture
def uuids(spec: backends.Spec) -> list[str]:
    return list(SimulatedBackend(spec["home"], spec["host"], spec["sizes"]).cards)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is asked again without a pause."""
    monkeypatch.setattr(readers, "scaled", lambda seconds: 0.0)


@pytest.fixture
async def pool(spec: backends.Spec) -> AsyncIterator[Readers]:
    pool = Readers(spec)
    yield pool
    await pool.close()


@pytest.fixture
async def sampler(spec: backends.Spec) -> AsyncIterator[Sampler]:
    sampler = Sampler(spec)
    await sampler.discover()
    yield sampler
    await sampler.close()


def pid_of(pool: Readers) -> int:
    assert pool.shared.process
    return pool.shared.process.pid


async def test_it_replaces_a_reader_whose_call_hangs(pool: Readers, uuids: list[str], home: Path) -> None:
    await pool.call("read", uuids[0])
    first = pid_of(pool)
    (home / f"hang-{uuids[1]}").touch()
    start = time.monotonic()
    with pytest.raises(CardHung):
        await pool.call("read", uuids[1])
    assert time.monotonic() - start < 1.5
    assert stat(first) is None
    assert (await pool.call("read", uuids[0]))["memory_total_bytes"] == 2**30
    assert pid_of(pool) != first


async def test_a_card_that_hung_gets_a_reader_of_its_own_and_comes_back(
    pool: Readers, uuids: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    hang = home / f"hang-{uuids[1]}"
    hang.touch()
    with pytest.raises(CardHung):
        await pool.call("read", uuids[1])
    await pool.call("read", uuids[0])
    shared = pid_of(pool)
    with pytest.raises(CardHung):
        await pool.call("read", uuids[1])
    assert pool.alone(uuids[1])
    assert pid_of(pool) == shared  # the second hang cost the others nothing
    hang.unlink()
    assert await pool.call("read", uuids[1])
    monkeypatch.setattr(readers, "PROVEN_SECONDS", 0.0)
    proven = pool.own[uuids[1]].reader
    assert await pool.call("read", uuids[1])
    assert not pool.alone(uuids[1])
    assert pool.shared is proven  # it knows the card as it is now
    assert stat(shared) is None
    assert await pool.call("read", uuids[0])


async def test_a_card_that_goes_on_hanging_is_asked_less_and_less_often(
    pool: Readers, uuids: list[str], home: Path
) -> None:
    (home / f"hang-{uuids[1]}").touch()
    with pytest.raises(CardHung):
        await pool.call("read", uuids[1])
    start = time.monotonic()
    with pytest.raises(CardHung, match="did not answer"):
        await pool.call("read", uuids[1])
    assert time.monotonic() - start < 0.1  # told what it said last, and not asked
    assert pool.own[uuids[1]].reader.process is None
    own, pauses = pool.own[uuids[1]], []
    for _ in range(6):
        own.failed(CardHung("…"))
        pauses.append(own.pause)
    assert pauses == [4, 8, 16, 30, 30, 30]


async def test_readers_that_cannot_be_killed_stay_few(
    pool: Readers, uuids: list[str], home: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in a dead driver does not even die of SIGKILL; here the signal does not reach it."""
    (home / f"hang-{uuids[1]}").touch()
    with monkeypatch.context() as dead:
        dead.setattr(asyncio.subprocess.Process, "kill", lambda self: None)
        for _ in range(6):
            with pytest.raises(CardHung):
                await pool.call("read", uuids[1])
        assert len(pool.own[uuids[1]].reader.undead) == readers.MOST_UNDEAD
        with pytest.raises(CardHung, match="cannot be killed: reboot"):
            await pool.call("read", uuids[1])
        undead = pool.own[uuids[1]].reader.undead + pool.shared.undead
    for process in undead:
        process.kill()
        await process.wait()


async def test_a_reader_goes_with_its_card(sampler: Sampler, uuids: list[str], home: Path) -> None:
    (home / f"lost-{uuids[1]}").touch()
    await sampler.sweep(with_processes=False)
    assert sampler.readers.alone(uuids[1])
    (home / f"gone-{uuids[1]}").touch()
    await sampler.discover()
    assert not sampler.readers.own


async def test_it_tells_lost_unavailable_and_failed_apart(
    pool: Readers, uuids: list[str], home: Path
) -> None:
    (home / f"lost-{uuids[0]}").touch()
    with pytest.raises(CardLost, match="bus"):
        await pool.call("read", uuids[0])
    (home / "unavailable").touch()
    with pytest.raises(BackendUnavailable, match="changed") as caught:
        await pool.call("list")
    assert caught.value.repair == "Reboot."
    with pytest.raises(ReadFailed, match="unknown call"):
        await pool.call("dance")


async def test_a_reader_that_dies_is_started_again(pool: Readers, uuids: list[str], home: Path) -> None:
    (home / "die").touch()
    with pytest.raises(ReadFailed, match="ended"):
        await pool.call("read", uuids[0])
    (home / "die").unlink()
    assert await pool.call("read", uuids[0])


def children() -> set[str]:
    """Of this process: systems that other tests keep running are among them."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_it_ends_in_the_middle_of_a_start(pool: Readers, uuids: list[str]) -> None:
    before = children()
    for turns in range(1, 8):
        call = asyncio.create_task(pool.call("read", uuids[0]))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        done, _ = await asyncio.wait([call], timeout=10)
        assert done, f"cut off after {turns} turns of the loop, it never ends"
    assert children() <= before


async def test_nothing_is_read_after_the_end(
    sampler: Sampler, uuids: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CALL_SECONDS", 20)
    (home / f"hang-{uuids[0]}").touch()
    assert await sampler.fresh(uuids[0], 0.1) is None  # its question is still under way
    start = time.monotonic()
    await sampler.close()
    assert time.monotonic() - start < 5
    assert not sampler.tasks
    await sampler.read(uuids[1], with_processes=False)
    assert sampler.readers.shared.process is None


async def test_a_reader_starts_fast_and_without_django(
    spec: backends.Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MODULE", "gpus.reader")
    monkeypatch.setattr(readers, "CALL_SECONDS", 5)
    pool = Readers(spec)
    assert len((await pool.call("list"))["cards"]) == 3
    known = stat(pid_of(pool))
    maps = Path(f"/proc/{pid_of(pool)}/statm").read_text().split()
    await pool.close()
    assert known
    assert known.cpu_ticks < 50  # half a second of CPU time, however busy the machine
    assert int(maps[1]) * os.sysconf("SC_PAGE_SIZE") < 40 * 2**20


async def test_a_reader_ends_with_its_parent_even_in_a_hung_call(
    child: Any, home: Path, uuids: list[str]
) -> None:
    (home / "hang").touch()
    code = f"""
import json, subprocess, sys, time
spec = {{"backend": "simulated", "host": "vm", "home": {str(home)!r}, "sizes": [1]}}
reader = subprocess.Popen([sys.executable, "-m", "tests.gpus.stub_reader", json.dumps(spec)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
reader.stdout.readline()
reader.stdin.write(b'{{"call": "list"}}\\n'); reader.stdin.flush()
print("ready", flush=True)
time.sleep(60)
"""
    parent = child(code)
    reader = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()[0])
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 3
    while (known := stat(reader)) and known.state != "Z" and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert known is None or known.state == "Z"


# The sweep


async def test_a_hung_card_gets_an_error_and_the_others_are_read(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    (home / f"hang-{uuids[1]}").touch()
    await sampler.sweep(with_processes=True)
    cards = sampler.cards
    assert "did not answer" in cards[uuids[1]].error
    assert cards[uuids[1]].sampled_at is None
    assert not cards[uuids[1]].lost
    assert cards[uuids[0]].sampled_at
    assert cards[uuids[2]].sampled_at
    start = time.monotonic()
    await sampler.sweep(with_processes=False)
    assert time.monotonic() - start < 0.7  # it has its own reader now


async def test_a_card_that_hangs_for_a_minute_is_lost_and_recovers(
    sampler: Sampler, uuids: list[str], home: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = home / f"hang-{uuids[1]}"
    hang.touch()
    for _ in range(3):
        await sampler.read(uuids[1], with_processes=False)
    assert not sampler.cards[uuids[1]].lost  # a driver under load may keep one waiting
    monkeypatch.setattr(sampling, "SILENT_SECONDS", 1.0)
    await sampler.read(uuids[1], with_processes=False)
    assert sampler.cards[uuids[1]].lost
    hang.unlink()
    await sampler.read(uuids[1], with_processes=False)
    card = sampler.cards[uuids[1]]
    assert (card.lost, card.error) == (False, "")


async def test_a_card_that_the_driver_calls_lost_is_lost_at_once(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    (home / f"lost-{uuids[2]}").touch()
    await sampler.sweep(with_processes=True)
    assert [card.lost for card in sampler.cards.values()] == [False, False, True]


async def test_it_keeps_known_cards_while_the_driver_is_away(sampler: Sampler, home: Path) -> None:
    (home / "unavailable").touch()
    await sampler.discover()
    assert sampler.backend_error == "The driver changed. Reboot."
    assert not sampler.complete
    assert len(sampler.cards) == 3
    await sampler.sweep(with_processes=True)
    (home / "unavailable").unlink()
    await sampler.discover()
    assert sampler.backend_error  # not asked again at once
    sampler.ask_at = 0.0
    await sampler.discover()
    assert (sampler.backend_error, sampler.complete) == ("", True)


async def test_g04_it_finds_cards_that_the_driver_reports_later(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    gone = [home / f"gone-{uuid}" for uuid in uuids]
    for file in gone:
        file.touch()
    await sampler.discover()
    assert sampler.cards == {}
    await sampler.sweep(with_processes=True)
    for file in gone:
        file.unlink()
    await sampler.discover()
    assert list(sampler.cards) == uuids


async def test_a_reading_that_is_not_a_number_becomes_null(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    (home / "odd").touch()
    await sampler.sweep(with_processes=False)
    assert sampler.cards[uuids[0]].reading["power_draw_watts"] is None


async def test_a_card_that_lists_no_processes_is_read_all_the_same(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    (home / "no-list").touch()
    for _ in range(3):
        await sampler.sweep(with_processes=True)
    card = sampler.cards[uuids[0]]
    assert card.sampled_at
    assert "insufficient permissions" in card.error
    assert not card.lost
    fresh = await sampler.fresh(uuids[0], 1.0)
    assert fresh is not None and not fresh.lists  # whoever asks learns that members alone decide


async def test_fresh_answers_at_once_or_not_at_all(sampler: Sampler, uuids: list[str], home: Path) -> None:
    fresh = await sampler.fresh(uuids[0], 1.0)
    assert fresh
    assert fresh.processes_at
    (home / f"hang-{uuids[1]}").touch()
    start = time.monotonic()
    assert await sampler.fresh(uuids[1], 0.2) is None
    assert time.monotonic() - start < 0.6
    await asyncio.sleep(0.9)
    answers = await asyncio.gather(*(sampler.fresh(uuids[1], 0.1) for _ in range(20)))
    assert answers == [None] * 20
    assert len(sampler.late) == 1  # they wait for one question, not in a row for twenty
    assert await sampler.fresh(uuids[0], 1.0)


def test_cards_are_numbered_by_pci_address() -> None:
    infos = [
        {"uuid": uuid, "pci_bus_id": bus, "index": i}
        for i, (uuid, bus) in enumerate((("b", "00:81"), ("a", "00:0A")))
    ]
    assert [(info["uuid"], info["index"]) for info in in_pci_order(infos)] == [("a", 0), ("b", 1)]


async def test_the_agent_knows_itself_and_its_readers_on_a_card_g51(
    sampler: Sampler, uuids: list[str], home: Path
) -> None:
    """The process that reads the cards may be listed on them; the others are not it."""
    await sampler.discover()
    reader = sampler.readers.shared.process
    assert reader is not None
    folder = home / "run" / "cards" / uuids[0]
    folder.mkdir(parents=True)
    for pid in (os.getpid(), reader.pid, os.getppid()):
        known = stat(pid)
        assert known is not None
        (folder / f"{pid}.{known.start}").touch()
    await sampler.read(uuids[0], with_processes=True)
    listed = {entry["pid"]: entry.get("own", False) for entry in sampler.cards[uuids[0]].processes}
    assert listed == {os.getpid(): True, reader.pid: True, os.getppid(): False}

"""The simulated backend against real processes: what it reports is what they really take."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpus.backends import simulated
from gpus.backends.base import CardLost
from gpus.backends.simulated import SimulatedBackend, cards_folder, stat

MIB = 2**20
IDLE = "import time; print('ready', flush=True); time.sleep(60)"
BIG = f"b = bytearray({200 * MIB}); b[::4096] = b'x' * len(b[::4096]); " + IDLE
BUSY = "print('ready', flush=True)\nwhile True: pass"
Child = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.MISTUDIO_HOME = tmp_path
    return tmp_path


@pytest.fixture
def backend(home: Path) -> SimulatedBackend:
    return SimulatedBackend(home, "vm", [24 * 2**30, 80 * 2**30])


def start_of(pid: int) -> int:
    known = stat(pid)
    assert known
    return known.start


def test_it_sees_the_memory_that_a_process_really_takes(backend: SimulatedBackend, child: Child) -> None:
    first, second = backend.cards
    small, big = child(IDLE), child(BIG)
    simulated.hold(first, small.pid, start_of(small.pid))
    base = backend.read(first).memory_used_bytes
    simulated.hold(first, big.pid, start_of(big.pid))
    reading = backend.read(first)
    assert base is not None
    assert reading.memory_used_bytes is not None
    assert 200 * MIB <= reading.memory_used_bytes - base < 220 * MIB
    assert reading.memory_free_bytes == 24 * 2**30 - reading.memory_used_bytes
    assert backend.read(second).memory_used_bytes == 0


GROW_ON_SIGNAL = """
import signal, time
kept = []
def grow(*args):
    kept.append(bytearray(100 * 2**20))
    kept[0][::4096] = b"x" * len(kept[0][::4096])
signal.signal(signal.SIGUSR1, grow)
print("ready", flush=True)
while True: time.sleep(1)
"""


def test_it_follows_a_process_between_two_walks_of_its_pages(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []
    walk = simulated.private_bytes
    monkeypatch.setattr(simulated, "private_bytes", lambda pid: walks.append(pid) or walk(pid))
    monkeypatch.setattr(simulated.Memories, "WALK_SHARE", 1e-6)
    memories, growing = simulated.Memories(), child(GROW_ON_SIGNAL)
    before = memories.of(growing.pid, 1)
    growing.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    after = memories.of(growing.pid, 1)
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(100 * MIB, rel=0.1)
    assert walks == [growing.pid]
    memories.keep([])
    assert memories.of(growing.pid, 1) == pytest.approx(after, rel=0.1)
    assert len(walks) == 2


def test_it_does_not_count_memory_that_a_fork_shares(backend: SimulatedBackend, child: Child) -> None:
    uuid = next(iter(backend.cards))
    code = f"import os; b = bytearray({100 * MIB}); b[::4096] = b'x' * len(b[::4096]); p = os.fork()\n"
    parent = child(code + "if p: print(p, flush=True)\nimport time; time.sleep(60)")
    forked = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()[0])
    simulated.hold(uuid, forked, start_of(forked))
    used = backend.read(uuid).memory_used_bytes
    os.kill(forked, 9)
    assert used is not None
    assert used < 20 * MIB


def test_it_lists_the_process_with_name_user_and_memory(backend: SimulatedBackend, child: Child) -> None:
    uuid = next(iter(backend.cards))
    big = child(BIG)
    simulated.hold(uuid, big.pid, start_of(big.pid))
    (process,) = backend.processes(uuid)
    assert process.pid == big.pid
    assert process.name is not None
    assert "python" in process.name
    assert process.user
    assert process.type == "compute"
    assert process.memory_used_bytes is not None
    assert process.memory_used_bytes > 200 * MIB


def test_it_removes_the_file_of_a_dead_process(backend: SimulatedBackend, child: Child, home: Path) -> None:
    uuid = next(iter(backend.cards))
    idle = child(IDLE)
    simulated.hold(uuid, idle.pid, start_of(idle.pid))
    idle.kill()
    time.sleep(0.1)  # a zombie holds no memory either
    assert backend.read(uuid).memory_used_bytes == 0
    assert list((cards_folder(home) / uuid).iterdir()) == []


def test_it_removes_the_file_of_another_process_with_that_pid(
    backend: SimulatedBackend, child: Child, home: Path
) -> None:
    uuid = next(iter(backend.cards))
    idle = child(IDLE)
    simulated.hold(uuid, idle.pid, start_of(idle.pid) - 1)
    assert backend.processes(uuid) == []
    assert list((cards_folder(home) / uuid).iterdir()) == []


def test_it_ignores_files_that_are_none_of_ours(backend: SimulatedBackend, home: Path) -> None:
    uuid = next(iter(backend.cards))
    folder = cards_folder(home) / uuid
    folder.mkdir(parents=True)
    (folder / "README").touch()
    assert backend.processes(uuid) == []
    assert (folder / "README").exists()


def test_it_reports_real_cpu_use_as_utilization_and_the_rest_follows(
    backend: SimulatedBackend, child: Child
) -> None:
    uuid = next(iter(backend.cards))
    idle_reading = backend.read(uuid)
    assert idle_reading.utilization_gpu_percent == 0
    busy = child(BUSY)
    simulated.hold(uuid, busy.pid, start_of(busy.pid))
    time.sleep(0.2)
    backend.read(uuid)
    before, start = stat(busy.pid), time.monotonic()
    time.sleep(1.0)
    reading, after = backend.read(uuid), stat(busy.pid)
    assert before and after
    share = (after.cpu_ticks - before.cpu_ticks) / simulated.TICKS_PER_SECOND / (time.monotonic() - start)
    expected = 100 * share / (os.cpu_count() or 1)
    assert reading.utilization_gpu_percent == pytest.approx(expected, abs=6)
    assert reading.utilization_gpu_percent > 0
    assert reading.power_draw_watts is not None
    assert idle_reading.power_draw_watts is not None
    assert reading.power_draw_watts > idle_reading.power_draw_watts
    assert reading.temperature_celsius is not None
    assert simulated.AMBIENT_CELSIUS < reading.temperature_celsius < simulated.FULL_LOAD_CELSIUS


def test_it_keeps_its_utilization_between_two_readings_in_a_moment(backend: SimulatedBackend) -> None:
    uuid = next(iter(backend.cards))
    thermals = backend.thermals[uuid]
    thermals.load = 0.5
    thermals.at = time.monotonic()
    assert backend.read(uuid).utilization_gpu_percent == 50.0


def test_it_never_counts_the_past_of_a_process_that_arrives(backend: SimulatedBackend) -> None:
    thermals = simulated.Thermals(at=time.monotonic() - 1)
    thermals.update({(1, 1): 360000})
    assert thermals.load == 0


def test_it_says_nothing_about_what_such_a_card_does_not_have(backend: SimulatedBackend) -> None:
    reading = backend.read(next(iter(backend.cards))).as_dict()
    assert reading["missing"]
    for name, why in reading["missing"].items():
        assert reading[name] is None, name
        assert why
    unsaid = {name for name, value in reading.items() if value is None}
    assert unsaid == set(reading["missing"])


def test_it_gives_cards_the_same_uuid_after_a_restart_and_on_no_other_host(home: Path) -> None:
    def uuids(host: str) -> list[str]:
        return [card.uuid for card in SimulatedBackend(home, host, [2**30, 2**30]).list_cards()]

    assert uuids("vm") == uuids("vm")
    assert len({*uuids("vm"), *uuids("other")}) == 4


def test_it_names_cards_after_their_size(home: Path) -> None:
    cards = SimulatedBackend(home, "vm", [24 * 2**30, 512 * MIB]).list_cards()
    assert [card.name for card in cards] == ["Simulated 24 GiB", "Simulated 0.5 GiB"]
    assert all(card.simulated for card in cards)


def test_it_reports_no_more_memory_than_the_card_has(home: Path, child: Child) -> None:
    backend = SimulatedBackend(home, "vm", [64 * MIB])
    uuid = next(iter(backend.cards))
    big = child(BIG)
    simulated.hold(uuid, big.pid, start_of(big.pid))
    reading = backend.read(uuid)
    assert (reading.memory_used_bytes, reading.memory_free_bytes) == (64 * MIB, 0)


def test_it_knows_no_other_card(backend: SimulatedBackend) -> None:
    assert backend.lookup("GPU-x") is None
    with pytest.raises(CardLost):
        backend.read("GPU-x")

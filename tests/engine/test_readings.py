"""What a person sees of cards that break: our stand-in library, a real agent, frames as a browser gets them.

SIM-4 of the field cases: a call for A hangs for 30 s, B is lost, C tells no power, D is well.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.stubs.driver import IS_LOST, NOT_SUPPORTED, StandIn, StandInCard
from tests.system import System

pytestmark = pytest.mark.engine


class Frames:
    """Listens to `system/gpus` in a thread of its own; `seen` are arrival and frame."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)

    def __enter__(self) -> Frames:
        self.thread.start()
        until(lambda: len(self.seen) > 1)
        return self

    def __exit__(self, *args: object) -> None:
        self.ended.set()
        self.thread.join(10)

    async def _listen(self) -> None:
        address = f"{self.system.url.replace('http', 'ws')}/ws/system/gpus/"
        headers = {"Authorization": f"Token {self.system.token}"}
        async with websockets.connect(address, additional_headers=headers) as socket:
            while not self.ended.is_set():
                try:
                    frame = json.loads(await asyncio.wait_for(socket.recv(), 0.2))
                except TimeoutError:
                    continue
                if frame["seq"]:  # 0 is the snapshot
                    self.seen.append((time.monotonic(), frame))

    def longest_gap(self, since: float) -> float:
        """Seconds between two frames of readings."""
        times = [at for at, frame in self.seen if at >= since and frame["event"] == "system:metrics"]
        return max(b - a for a, b in itertools.pairwise(times))

    def oldest(self, uuid: str, since: float) -> float:
        """The age in seconds of this card's oldest reading in a frame."""
        frames = [f["data"] for at, f in self.seen if at >= since and f["event"] == "system:metrics"]
        return max(card["age_s"] for data in frames for card in data["gpus"] if card["uuid"] == uuid)

    def events(self, uuid: str) -> list[str]:
        return [frame["event"] for _, frame in self.seen if frame["data"].get("uuid") == uuid]


def until(holds: Callable[[], Any], seconds: float = 40) -> float:
    """The seconds until it held."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "it never came to hold"
        time.sleep(0.05)
    return time.monotonic() - began


def readers_of(agent: int) -> list[int]:
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(pid) for pid in children if alive(int(pid))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Most(threading.Thread):
    """The most reader processes that the agent had at once."""

    def __init__(self, agent: int) -> None:
        super().__init__(daemon=True)
        self.agent, self.count, self.ended = agent, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.count = max(self.count, len(readers_of(self.agent)))


def healths(host: System) -> list[str]:
    return [card["health"] for card in host.cards()]


@pytest.mark.parametrize("scale", [0.25, pytest.param(1.0, marks=pytest.mark.slow)])
def test_cards_that_break_cost_the_others_nothing_and_come_back(
    scale: float, driver_library: Path, tmp_path: Path
) -> None:
    """Frames of the others within 2.5 s; lost, stale and null are said; few readers; an end within 5 s."""
    cards = [StandInCard(bus=f"00000000:{bus}:00.0") for bus in ("01", "41", "81", "C1")]
    driver = StandIn(tmp_path, driver_library, cards)
    with System(tmp_path / "home", driver=driver, time_scale=scale) as host, Frames(host) as frames:
        until(lambda: healths(host) == ["ok"] * 4)
        agent = host.pid("agent")
        assert len(readers_of(agent)) == 1
        most = Most(agent)
        most.start()
        began = time.monotonic()
        cards[0].hangs = {"utilization": 30}  # the first, so that all others stand behind it
        cards[1].faults = {"handle": IS_LOST}
        cards[2].faults = {"power": NOT_SUPPORTED}
        driver.write()
        said = until(lambda: healths(host) == ["stale", "lost", "ok", "ok"])
        shown = host.get("system/gpu-metrics")["gpus"]
        assert (shown[2]["power_draw_watts"], shown[2]["missing"]) == (
            None,
            {"power_draw_watts": "Not Supported"},
        )
        until(lambda: "did not answer" in (host.get("system/all")["gpus"][0]["error"] or ""))
        time.sleep(8 * scale)
        assert healths(host) == ["stale", "lost", "ok", "ok"]
        gap, age = frames.longest_gap(began), frames.oldest(cards[3].uuid, began)

        cards[0].hangs, cards[1].faults, cards[2].faults = {}, {}, {}
        driver.write()
        back = until(lambda: healths(host) == ["ok"] * 4)
        assert host.pid("agent") == agent  # nobody was restarted
        most.ended.set()
        until(lambda: frames.events(cards[1].uuid) == ["gpu:lost", "gpu:recovered"])
        assert frames.events(cards[0].uuid) == []  # a card that hangs is stale, not lost

        cards[0].hangs = {"memory": 30}
        driver.write()
        time.sleep(2.5 * scale)  # the call hangs now
        readers = readers_of(agent)
        os.kill(agent, signal.SIGTERM)
        end = until(lambda: not alive(agent))
        assert not any(alive(pid) for pid in readers)
    print(
        f"\nat {scale}: said after {said:.1f} s; frames {gap:.2f} s apart at most, D's reading {age:.2f} s old at"
        f" most; all back after {back:.1f} s; {most.count} readers at most; end after {end:.2f} s"
    )
    noise = 0.0 if scale == 1 else 0.5  # at a faster clock the machine's own hiccups weigh more
    assert gap <= 2.5 * scale + noise
    assert age <= 6 * scale + noise  # never stale
    assert most.count <= 3  # the one that all share, and one for each card that broke
    assert end < 5

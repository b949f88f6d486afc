"""Claim: `/ws/system/gpu/<uuid>/` brings a frame every 2 s ± 0.3 s, and an idle socket lives.

    .venv/bin/python -m bench.frames [seconds]

Starts a system of its own with three simulated cards at the real clock and listens to one card's channel.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import websockets

from tests.system import System


async def listen(system: System, seconds: float) -> tuple[list[float], list[int]]:
    """Times and numbers of the frames that arrive."""
    uuid = system.cards()[1]["uuid"]
    address = f"{system.url.replace('http', 'ws')}/ws/system/gpu/{uuid}/"
    times, numbers = [], []
    async with websockets.connect(
        address, additional_headers={"Authorization": f"Token {system.token}"}
    ) as socket:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                frame = json.loads(await asyncio.wait_for(socket.recv(), left))
            except TimeoutError:
                break
            if frame["seq"]:  # 0 is the snapshot
                times.append(time.monotonic())
                numbers.append(frame["seq"])
    return times, numbers


async def idle(system: System, seconds: float) -> bool:
    """Whether a socket that subscribes to nothing is still open after `seconds`."""
    address = f"{system.url.replace('http', 'ws')}/ws/"
    async with websockets.connect(
        address, additional_headers={"Authorization": f"Token {system.token}"}
    ) as socket:
        await asyncio.sleep(seconds)
        await socket.send(json.dumps({"action": "subscribe", "channel": "system/cpu"}))
        return bool(await asyncio.wait_for(socket.recv(), 5))


async def both(system: System, seconds: float) -> tuple[tuple[list[float], list[int]], bool]:
    return await asyncio.gather(listen(system, seconds), idle(system, seconds))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    with System(Path(tempfile.mkdtemp()) / "home", time_scale=1) as system:
        (times, numbers), lives = asyncio.run(both(system, seconds))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    print(
        f"{len(times)} frames in {seconds:.0f} s, {min(gaps):.3f} to {max(gaps):.3f} s apart, seq steps {steps}"
    )
    print(f"an idle socket after {seconds:.0f} s: {'open' if lives else 'closed'}")


if __name__ == "__main__":
    main()

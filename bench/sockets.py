"""Claim: many pages cost the server little, each gets every frame, and those that do not read cost nobody anything.

    .venv/bin/python -m bench.sockets [--sockets 25] [--silent 0] [--frames 30] [--every 2.0]

Starts a system of its own with eight simulated cards. Every socket listens to `system/gpus`: all cards in one frame.
`--every 0.2 --frames 1800` is an hour's worth of frames in six minutes. Clients run in this process: on a machine with
few cores their own work is part of the latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil
import websockets

from tests.system import ROOT, System

CARDS = ",".join(["80GiB"] * 8)


@dataclass
class Heard:
    """What one socket heard: delays from the publisher's stamp in ms, and numbers that did not come."""

    delays: list[float] = field(default_factory=list)
    missed: int = 0
    resyncs: int = 0
    size: int = 0
    seq: int | None = None

    def take(self, line: str | bytes) -> None:
        now = time.time()
        frame = json.loads(line)
        self.resyncs += frame["event"] == "resync"
        if frame["event"] != "system:metrics" or not frame["seq"]:
            return
        self.size = len(line)
        self.delays.append(1000 * (now - datetime.fromisoformat(frame["ts"]).timestamp()))
        self.missed += frame["seq"] - self.seq - 1 if self.seq is not None else 0
        self.seq = frame["seq"]


#: Below the limit of sockets per user.
PER_USER = 16
USERS = """
from django.contrib.auth.models import User
from monitor.models import ApiToken
for n in range({count}):
    user = User.objects.create(username=f"crowd{{n}}")
    print(ApiToken.objects.create(user=user, name="bench", scopes=["read"])[1])
"""


def tokens(system: System, count: int) -> list[str]:
    """One for every socket, of users enough for all."""
    command = [
        sys.executable,
        "manage.py",
        "shell",
        "--no-imports",
        "-c",
        USERS.format(count=-(-count // PER_USER)),
    ]
    printed = subprocess.run(command, cwd=ROOT, env=system.env, check=True, capture_output=True, text=True)
    return [value for value in printed.stdout.split() for _ in range(PER_USER)][:count]


def connect(system: System, token: str, **options: int) -> websockets.connect:
    address = f"{system.url.replace('http', 'ws')}/ws/system/gpus/"
    return websockets.connect(
        address, additional_headers={"Authorization": f"Token {token}"}, open_timeout=60, **options
    )


async def listen(system: System, token: str, began: asyncio.Event, done: asyncio.Event) -> Heard:
    heard = Heard()
    async with connect(system, token) as socket:
        while not done.is_set():
            try:
                line = await asyncio.wait_for(socket.recv(), 1)
            except TimeoutError:
                continue
            if began.is_set():
                heard.take(line)
    return heard


async def ignore(system: System, token: str, done: asyncio.Event) -> None:
    """A client that has subscribed and never reads: TCP's window closes, the server's buffer fills."""
    async with connect(system, token, max_queue=1) as socket:
        await done.wait()
        socket.transport.abort()


async def crowd(system: System, sockets: int, silent: int, seconds: float) -> tuple[list[Heard], str]:
    began, done = asyncio.Event(), asyncio.Event()
    keys = tokens(system, sockets + silent)
    readers = [asyncio.create_task(listen(system, key, began, done)) for key in keys[:sockets]]
    others = [asyncio.create_task(ignore(system, key, done)) for key in keys[sockets:]]
    await asyncio.sleep(3 + (sockets + silent) / 40)  # all are in, each has its snapshot
    web = psutil.Process(system.pid("web"))
    before, rss = sum(web.cpu_times()[:2]), web.memory_info().rss
    began.set()
    clock = time.monotonic()
    await asyncio.sleep(seconds)
    used = (sum(web.cpu_times()[:2]) - before) / (time.monotonic() - clock)
    grown = (web.memory_info().rss - rss) / 2**20
    done.set()
    heard = await asyncio.gather(*readers)
    await asyncio.gather(*others, return_exceptions=True)
    return heard, f"web: {used:.1%} of a core, {rss / 2**20:.0f} MiB, {grown:+.1f} MiB at the end"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sockets", type=int, default=25)
    parser.add_argument("--silent", type=int, default=0)
    parser.add_argument("--frames", type=int, default=30)
    parser.add_argument("--every", type=float, default=2.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    home = Path(tempfile.mkdtemp()) / "home"
    with System(home, cards=CARDS, time_scale=1, MISTUDIO_SAMPLE_SECONDS=str(options.every)) as system:
        seconds = options.frames * options.every
        heard, server = asyncio.run(crowd(system, options.sockets, options.silent, seconds))
    report(options, heard, server)


def report(options: argparse.Namespace, heard: list[Heard], server: str) -> None:
    delays = sorted(delay for one in heard for delay in one.delays)
    cuts = statistics.quantiles(delays, n=100)
    counts = sorted(len(one.delays) for one in heard)
    print(
        f"{options.sockets} sockets, {options.silent} more that do not read; 8 cards, a frame every {options.every:g} s"
    )
    print(f"frames per socket: {counts[0]} to {counts[-1]}, {heard[0].size} bytes each")
    print(f"delay: p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms, max {delays[-1]:.0f} ms")
    print(f"missed: {sum(one.missed for one in heard)} frames, {sum(one.resyncs for one in heard)} resyncs")
    print(server)


if __name__ == "__main__":
    main()

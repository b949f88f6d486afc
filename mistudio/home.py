"""The data folder: its secret key, its broker socket, and what it remembers (`home.json`)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

#: A unix socket's path must fit `sun_path` (108 bytes); beyond this it moves to a short folder.
MAX_SOCKET_PATH = 90


def prepare(home: Path) -> None:
    """Make what is missing. The folder is its owner's alone: sessions and password hashes lie in its database."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if home.stat().st_uid == os.getuid() and home.stat().st_mode & 0o077:
        home.chmod(0o700)
    for name in ("run", "logs", "import", "jobs", "artifacts", ".staging"):
        (home / name).mkdir(parents=True, exist_ok=True, mode=0o700)


def remembered(home: Path) -> dict[str, Any]:
    try:
        return json.loads((home / "home.json").read_text())
    except FileNotFoundError:
        return {}


def remember(home: Path, **values: Any) -> None:
    path = home / "home.json"
    write_private(path, json.dumps(remembered(home) | values, indent=1))


def write_private(path: Path, content: str) -> None:
    """Write a file only its owner may read, through a temporary name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    os.replace(temporary, path)


def secret_key(home: Path) -> str:
    """The key of this data folder, made once; two processes that start together agree on one."""
    path = home / "secret-key"
    if not path.exists():
        fresh = home / f".secret-key.{os.getpid()}"
        write_private(fresh, secrets.token_urlsafe(50))
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        fresh.unlink()
    return path.read_text().strip()


def socket_folder(home: Path) -> Path:
    """`run/`, or a short 0700 folder of this user when a socket path in `run/` would be too long."""
    run = home / "run"
    if len(os.fsencode(run / "forkserver.sock")) <= MAX_SOCKET_PATH:
        return run
    tag = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"mistudio-{os.getuid()}-{tag}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.is_symlink() or short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise PermissionError(f"{short} belongs to somebody else; set TMPDIR to a folder of your own.")
    return short


def broker_url(home: Path) -> str:
    """Where the private broker of a single host listens (started by `manage.py up`)."""
    return f"unix://{socket_folder(home) / 'broker.sock'}"


def celery_url(redis_url: str) -> str:
    """Celery's spelling of a Redis URL: `unix://path` becomes `redis+socket://path`."""
    return "redis+socket" + redis_url.removeprefix("unix") if redis_url.startswith("unix://") else redis_url


def take_lock(folder: Path) -> IO[str]:
    """One `up` per data folder, proven by a lock that ends with its process."""
    from django.core.management.base import CommandError

    lock = open(folder / "run" / "up.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(
            f"miStudio already runs on {folder}; see {folder / 'run' / 'ready.json'}."
        ) from None
    return lock


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No `up` runs on this data folder, nor starts meanwhile."""
    with take_lock(folder):
        yield

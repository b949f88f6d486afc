"""The machine itself: the data folder, its disk, and the limits of processes."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator

import psutil
from django.conf import settings

from jobs.memory import GIB, disk_reserve_bytes, gib
from mistudio.doctor import Finding, note, ok, wrong

#: Sockets, shards and pipes of a busy host; systemd's default is 1024.
OPEN_FILES = 4096
#: File systems on which SQLite's locks cannot be relied on.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")


def data_folder() -> Iterator[Finding]:
    home = settings.MISTUDIO_HOME
    try:
        with tempfile.TemporaryFile(dir=home):
            yield ok(f"{home} can be written")
    except OSError as error:
        yield wrong(f"{home} cannot be written: {error.strerror}", "Give it to the user that runs miStudio.")
    if home.stat().st_mode & 0o077:
        yield wrong(f"others may look into {home}", f"chmod 700 {home}")
    yield disk()
    kind = file_system()
    if kind in NETWORK and settings.DATABASES["default"]["ENGINE"].endswith("sqlite3"):
        yield wrong(
            f"the data folder lies on {kind}, where SQLite's locks fail",
            "Put it on a local disk, or set DATABASE_URL to PostgreSQL.",
        )


def disk() -> Finding:
    usage = shutil.disk_usage(settings.MISTUDIO_HOME)
    reserve = disk_reserve_bytes(usage.total)
    says = f"{gib(usage.free)} of {gib(usage.total)} free, {gib(reserve)} of it kept as reserve"
    if usage.free > reserve:
        return ok(says)
    return wrong(
        says, "No job that writes will start: delete artifacts, or move the data folder to a larger disk."
    )


def file_system() -> str:
    """Type of the file system under the data folder: that of the longest mount point above it."""
    home = str(settings.MISTUDIO_HOME)
    above = [
        p
        for p in psutil.disk_partitions(all=True)
        if os.path.commonpath([p.mountpoint, home]) == p.mountpoint
    ]
    return max(above, key=lambda p: len(p.mountpoint)).fstype if above else ""


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES:
        yield ok(f"{soft} open files per process")
    else:
        yield note(
            f"{soft} open files per process (at most {hard})",
            f"ulimit -n {OPEN_FILES}, or LimitNOFILE= of the unit",
        )
    memory = psutil.virtual_memory()
    yield ok(f"{gib(memory.available)} of {gib(memory.total)} memory free, {os.cpu_count()} CPUs")
    yield from shared_memory()


def shared_memory() -> Iterator[Finding]:
    """Where processes that share tensors put them."""
    size = next((shutil.disk_usage(p).total for p in ("/dev/shm",) if os.path.isdir(p)), 0)  # noqa: S108 (measured)
    if size < GIB:
        yield note(
            f"shared memory holds {gib(size)}",
            "In a container: --shm-size=8g, for training on several cards.",
        )

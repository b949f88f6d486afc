"""A copy of this installation that `restore` puts back: its database, and if wanted the files that it speaks of.

What it holds, as a tar (a name that ends so) or as a folder:

    manifest.json   home.json   database.sqlite3 | database.pgdump   artifacts/…  jobs/…  (with files)

Who signs in here now is left out (sessions, one-time keys), and so are the secret key and the operator's token: a
restored installation makes its own. Password hashes are in it: it is readable by its owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from jobs import paths
from jobs.memory import gib
from jobs.version import VERSION
from mistudio import databases

Say = Callable[[str], None]
#: Folders of the data folder that the rows speak of.
FOLDERS = ("artifacts", "jobs")
#: Files that are written in place: copied, where the others can be hard links.
GROWING = ("job.log",)
KEPT_BEFORE_UPGRADES = 3


class Refused(Exception):
    """The backup cannot be made, in a sentence."""


def default_name() -> str:
    return f"mistudio-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar"


def make(target: Path, *, with_files: bool = False, say: Say = lambda text: None) -> dict[str, Any]:
    """Write the backup under a temporary name beside `target` and rename it when it is whole; its manifest.

    Raises `Refused` when the disk has no room, `databases.Damaged` when the copy does not pass its own check.
    """
    if target.exists():
        raise Refused(f"{target} exists; a backup is never written over another.")
    target.parent.mkdir(parents=True, exist_ok=True)
    require_room(target, with_files)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        whole = Path(folder) / "backup"
        whole.mkdir(mode=0o700)
        # The database first: what is made meanwhile is in no row, but every row has its files.
        dump = databases.dump(whole, say)
        with suppress(FileNotFoundError):
            shutil.copyfile(settings.MISTUDIO_HOME / "home.json", whole / "home.json")
        told = manifest(dump, with_files)
        (whole / "manifest.json").write_text(json.dumps(told, indent=1))
        write = write_tar if target.suffix == ".tar" else fill_folder
        made = write(whole, with_files, say)
        os.rename(made, target)
    paths.sync_folder(target.parent)
    return told


def require_room(target: Path, with_files: bool) -> None:
    linked = target.suffix != ".tar" and target.parent.stat().st_dev == settings.MISTUDIO_HOME.stat().st_dev
    need = 2 * databases.size_bytes()  # the copy, and its place in the tar
    if with_files and not linked:
        need += sum(path.stat().st_size for path, _ in files())
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise Refused(f"The backup needs about {gib(need)}; {gib(free)} are free at {target.parent}.")


def manifest(dump: Path, with_files: bool) -> dict[str, Any]:
    return {
        "mistudio": VERSION,
        "created_at": datetime.now(UTC).isoformat(),
        "engine": connection.vendor,
        "database": dump.name,
        "sha256": digest(dump),
        "migrations": sorted(".".join(key) for key in MigrationRecorder(connection).applied_migrations()),
        "with_files": with_files,
    }


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files() -> Iterator[tuple[Path, str]]:
    """Every file and folder of the results with its place in the backup, but what is only being written."""
    for name in FOLDERS:
        for folder, below, names in os.walk(settings.MISTUDIO_HOME / name):
            below[:] = [one for one in below if not one.startswith(".")]
            for path in (Path(folder), *(Path(folder) / one for one in names if not one.startswith("."))):
                yield path, str(path.relative_to(settings.MISTUDIO_HOME))


def write_tar(whole: Path, with_files: bool, say: Say) -> Path:
    made = whole.with_suffix(".tar")
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in sorted(whole.iterdir()):
                tar.add(path, path.name)
            for number, (path, place) in enumerate(files() if with_files else ()):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    tar.add(path, place, recursive=False)
                say(f"{number + 1} files")
        file.flush()
        os.fsync(file.fileno())
    return made


def fill_folder(whole: Path, with_files: bool, say: Say) -> Path:
    for number, (path, place) in enumerate(files() if with_files else ()):
        with suppress(FileNotFoundError):
            link_or_copy(path, whole / place)
        say(f"{number + 1} files")
    os.sync()
    return whole


def link_or_copy(source: Path, target: Path) -> None:
    """Results are never written in place, so that a hard link stays what it is; another disk gets a copy."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    if source.name not in GROWING:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def before_upgrade(say: Say = lambda text: None) -> Path:
    """A backup of the database in `backups/`, of which the last three are kept. Raises as `make` does."""
    folder = settings.MISTUDIO_HOME / "backups"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"before-upgrade-{datetime.now(UTC):%Y%m%dT%H%M%S_%fZ}.tar"
    make(target, say=say)
    for old in sorted(folder.glob("before-upgrade-*.tar"))[:-KEPT_BEFORE_UPGRADES]:
        old.unlink()
    return target

"""Puts a backup back. Nothing of miStudio may run meanwhile, and what was there before is kept aside.

For the restored rows every process is of another life, as after a reboot: recovery queues the jobs that ran from
their last checkpoints, and no number of a process that stands in them is ever signalled.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connection, connections
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

from gpus.models import Host, Pulse
from jobs import paths, processes
from jobs.models import Attempt, Lease
from mistudio import backup, databases

Say = Callable[[str], None]
ANOTHER_LIFE = "restored"  # in place of a boot id


class Refused(Exception):
    """The backup cannot be put back, in a sentence."""


def restore(source: Path, say: Say = lambda text: None) -> Path:
    """Put the backup in place; returns the folder where what was there before lies now."""
    require_silence()
    unpacked = settings.MISTUDIO_HOME / f".restoring-{os.getpid()}"
    try:
        say("unpacking")
        unpack(source, unpacked)
        told = checked(unpacked)
        aside = settings.MISTUDIO_HOME / f"aside-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        aside.mkdir(mode=0o700)
        try:
            put_aside(told, aside)
            put_in_place(unpacked, told)
        except Exception as error:
            raise Refused(f"{error}. Nothing is lost: what is not in its place is in {aside}.") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    say("bringing the tables up to date")
    call_command("migrate", verbosity=0, interactive=False, backup=False)
    forget_processes()
    return aside


# Before -------------------------------------------------------------------------------------------------


def require_silence() -> None:
    """Refuse while services or jobs use the database."""
    found = [f"{name} (pid {pid})" for pid, name in databases.holders()] + heard_lately()
    if found:
        raise Refused(
            f"Still running: {'; '.join(found[:5])}. End the services, and the jobs with `manage.py stop-jobs`, first."
        )


def heard_lately() -> list[str]:
    """Parts that spoke within seconds; on SQLite the open file is the better proof. Nothing where there is no table."""
    if connection.vendor == "sqlite" or Host._meta.db_table not in connection.introspection.table_names():
        return []
    found = [
        f"services of {host}" for host in Host.objects.all() if host.agent_alive() or host.worker_alive()
    ]
    keepers = Attempt.objects.filter(ended_at=None, boot_id=processes.boot_id()).exclude(keeper_pid=None)
    found += [f"{attempt.job}" for attempt in keepers if alive(attempt)]
    return found


def alive(attempt: Attempt) -> bool:
    return processes.alive(processes.Process(attempt.keeper_pid or 0, attempt.keeper_start or 0))


def unpack(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, copy_function=lambda a, b: backup.link_or_copy(Path(a), Path(b)))
        # The database's file is going to be written: it may not be the backup's own.
        for name in ("database.sqlite3", "home.json"):
            if (source / name).exists():
                (folder / name).unlink()
                shutil.copy2(source / name, folder / name)
        return
    folder.mkdir(mode=0o700)
    try:
        with tarfile.open(source) as tar:
            tar.extractall(folder, filter="data")  # nothing outside of it, no devices, no owners
    except tarfile.TarError as error:
        why = str(error).partition(":")[0]  # behind it stands every compression that was tried
        raise Refused(f"This is no backup of miStudio, or only a part of one: {why}.") from None


def checked(folder: Path) -> dict[str, Any]:
    """The manifest, when the backup is whole and this version can read it."""
    try:
        told: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        missing = {"mistudio", "engine", "database", "sha256", "migrations", "with_files"} - set(told)
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"This is no backup of miStudio: {error}") from None
    if missing:
        raise Refused(f"This is no backup of miStudio: its manifest lacks {', '.join(sorted(missing))}.")
    if told["engine"] != connection.vendor:
        raise Refused(f"The backup is of {told['engine']}, this installation runs on {connection.vendor}.")
    unknown = set(told["migrations"]) - {".".join(key) for key in MigrationLoader(None).disk_migrations}
    if unknown:
        raise Refused(
            f"A newer miStudio made it ({told['mistudio']}): it has {', '.join(sorted(unknown)[:3])}."
        )
    database = folder / Path(told["database"]).name
    if backup.digest(database) != told["sha256"]:
        raise Refused("The database in it is not the one that was written: the backup is damaged.")
    if told["engine"] == "sqlite":
        with closing(databases.opened(database)) as copy:
            databases.check(copy)
    return told


# The change ---------------------------------------------------------------------------------------------


def put_aside(told: dict[str, Any], aside: Path) -> None:
    connections.close_all()
    if connection.vendor == "sqlite":
        for path in list(databases.sqlite_files()):
            os.rename(path, aside / path.name)
    else:
        databases.dump(aside, lambda text: None)
    with suppress(FileNotFoundError):
        shutil.copy2(settings.MISTUDIO_HOME / "home.json", aside)
    for name in backup.FOLDERS if told["with_files"] else ():
        os.rename(settings.MISTUDIO_HOME / name, aside / name)
        (settings.MISTUDIO_HOME / name).mkdir(mode=0o700)


def put_in_place(unpacked: Path, told: dict[str, Any]) -> None:
    databases.load(unpacked / Path(told["database"]).name)
    for name in ("home.json", *backup.FOLDERS):
        source, target = unpacked / name, settings.MISTUDIO_HOME / name
        if not source.exists():
            continue
        if target.is_dir():
            target.rmdir()  # the empty one that was made in its place
        os.replace(source, target)
    paths.sync_folder(settings.MISTUDIO_HOME)


def forget_processes() -> None:
    """Whatever ran when the backup was made runs no more, and its host may be another: ours takes its jobs."""
    here, _ = Host.objects.get_or_create(name=settings.MISTUDIO_HOST_NAME)
    Attempt.objects.update(boot_id=ANOTHER_LIFE)
    Attempt.objects.filter(ended_at=None).update(host=here)
    Lease.objects.filter(ended_at=None).update(state=Lease.State.ENDED, ended_at=timezone.now())
    Pulse.objects.all().delete()
    Host.objects.update(agent_seen_at=None, worker_seen_at=None)

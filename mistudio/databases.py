"""The database in one file and back: SQLite by its online backup, PostgreSQL by its own tools."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connection, connections

Say = Callable[[str], None]
#: What lets somebody in now, and is no part of a backup.
LEFT_OUT = ("django_session", "monitor_onetimekey")
PAGES = 4096  # 16 MiB a step
#: How PostgreSQL's tools take what the settings say; without `sslmode` they would trust servers that we do not.
ENVIRONMENT = {
    "PGHOST": "HOST",
    "PGPORT": "PORT",
    "PGUSER": "USER",
    "PGPASSWORD": "PASSWORD",
    "PGDATABASE": "NAME",
    **{f"PG{key.upper()}": key for key in ("sslmode", "sslrootcert", "sslcert", "sslkey", "connect_timeout")},
}


class Damaged(Exception):
    """What the database's own check says."""


class Missing(Exception):
    """A tool that is not on the PATH."""


#: What a command says as its own sentence: a database that cannot be read fails before its check can.
FAULTS = (Damaged, Missing, OSError, DatabaseError, sqlite3.Error)


def size_bytes() -> int:
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        else:
            cursor.execute("SELECT pg_database_size(current_database())")
        return int(cursor.fetchone()[0])


def dump(folder: Path, say: Say) -> Path:
    return dump_sqlite(folder, say) if connection.vendor == "sqlite" else dump_postgresql(folder)


def load(file: Path) -> None:
    """Into the configured database, in place of what it holds; a SQLite file is consumed."""
    connections.close_all()
    if connection.vendor == "sqlite":
        os.replace(file, sqlite_file())
    else:
        load_postgresql(file)


# SQLite -------------------------------------------------------------------------------------------------


def sqlite_file() -> Path:
    return Path(settings.DATABASES["default"]["NAME"])


def sqlite_files() -> Iterator[Path]:
    """The file, and what may lie beside it and belongs to it."""
    for ending in ("", "-wal", "-shm"):
        if (path := Path(f"{sqlite_file()}{ending}")).exists():
            yield path


def dump_sqlite(folder: Path, say: Say) -> Path:
    """One moment of a file that others go on writing. Raises `Damaged`."""
    target = folder / "database.sqlite3"
    os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))
    with closing(opened(sqlite_file())) as source, closing(opened(target)) as copy:
        # Held open, the transaction sees one moment; without it each writer would start the copy anew.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(
            copy, pages=PAGES, progress=lambda _, left, total: say(f"database {1 - left / max(1, total):.0%}")
        )
        forget_who_is_in(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, nothing beside it
        say("database: checking the copy")
        check(copy)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return target


def opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=20, isolation_level=None)


def forget_who_is_in(copy: sqlite3.Connection) -> None:
    copy.execute("PRAGMA secure_delete=ON")
    there = {name for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in LEFT_OUT:
        if table in there:
            copy.execute(f"DELETE FROM {table}")  # noqa: S608 (our own names)


def check(database: sqlite3.Connection) -> None:
    said = [row[0] for row in database.execute("PRAGMA integrity_check(5)")]
    if said != ["ok"]:
        raise Damaged(f"The database is damaged: {'; '.join(said)}")


def holders() -> list[tuple[int, str]]:
    """Processes that have the SQLite file open, by pid and name; without ourselves."""
    if connection.vendor != "sqlite":
        return []
    file, processes = str(sqlite_file().resolve()), (e for e in Path("/proc").iterdir() if e.name.isdigit())
    others = (process for process in processes if int(process.name) != os.getpid())
    return [(int(process.name), command(process)) for process in others if file in open_files(process)]


def open_files(process: Path) -> Iterator[str]:
    """Nothing of a process that is gone, or another user's."""
    with suppress(OSError):
        for handle in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile; the others are looked at all the same
                yield os.readlink(handle)


def command(process: Path) -> str:
    with suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


# PostgreSQL ---------------------------------------------------------------------------------------------


def dump_postgresql(folder: Path) -> Path:
    target = folder / "database.pgdump"
    left_out = [f"--exclude-table-data={table}" for table in LEFT_OUT]
    postgresql("pg_dump", "--format=custom", "--no-owner", *left_out, "--file", str(target))
    target.chmod(0o600)
    return target


def load_postgresql(file: Path) -> None:
    """All or nothing: the tables of now go, those that the dump does not know included, and its own come."""
    script = file.with_suffix(".sql")
    postgresql("pg_restore", "--no-owner", "--file", str(script), str(file))
    with connection.cursor() as cursor:
        names = ", ".join(map(connection.ops.quote_name, connection.introspection.table_names(cursor)))
    connections.close_all()
    drop = ["--command", f"DROP TABLE {names} CASCADE"] if names else []
    quiet = ("--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--single-transaction")
    postgresql("psql", *quiet, *drop, "--file", str(script))


def postgresql(tool: str, *words: str) -> None:
    """Run one of PostgreSQL's tools on the configured database; the password goes by the environment alone."""
    if shutil.which(tool) is None:
        raise Missing(f"{tool} is not on the PATH; it comes with PostgreSQL's client programs.")
    options: dict[str, Any] = {**settings.DATABASES["default"]}
    given = options | options.get("OPTIONS", {})
    env = os.environ | {name: str(given[key]) for name, key in ENVIRONMENT.items() if given.get(key)}
    ran = subprocess.run([tool, *words], check=False, env=env, capture_output=True, text=True)
    if ran.returncode:
        raise Damaged(f"{tool} ended with status {ran.returncode}: {ran.stderr.strip()[-2000:]}")

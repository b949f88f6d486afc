"""Backups: one moment of a database that is being written, put back whole, and never over something else."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError

from mistudio import databases, restore
from tests.chaos.test_kills import attempt_of, journal, steps_after, wait_until
from tests.system import System

#: Writes pairs as fast as it can; each pair is one transaction.
WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
while True:
    db.execute("BEGIN IMMEDIATE")
    for half in "ab":
        db.execute("INSERT INTO pairs VALUES (?, ?)", (half, "x" * 200))
    db.execute("COMMIT")
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A database of 4 MB that another process writes all the time."""
    path = tmp_path / "busy.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript("CREATE TABLE pairs (half, text); CREATE TABLE django_session (session_key)")
        db.execute("INSERT INTO django_session VALUES ('the-key-of-a-session')")
        db.executemany("INSERT INTO pairs VALUES (?, ?)", [(half, "x" * 2000) for half in "ab" * 1000])
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    monkeypatch.setattr(databases, "sqlite_file", lambda: path)
    monkeypatch.setattr(databases, "PAGES", 20)
    yield path
    writer.kill()
    writer.wait()


def test_it_copies_one_moment_of_what_is_being_written(busy: Path, tmp_path: Path) -> None:
    said: list[str] = []
    wait_for_writes(busy)
    (tmp_path / "out").mkdir()
    copy = databases.dump_sqlite(tmp_path / "out", said.append)
    assert rows(busy) > rows(copy), "the writer went on meanwhile"
    with sqlite3.connect(copy) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        halves = dict(db.execute("SELECT half, count(*) FROM pairs GROUP BY half"))
    assert halves["a"] == halves["b"] >= 1000
    pages = copy.stat().st_size / 4096
    assert len(said) <= pages / 20 + 3, "no writer made it begin again"
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    assert copy.stat().st_mode & 0o777 == 0o600


def test_who_is_signed_in_is_no_part_of_it(busy: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    copy = databases.dump_sqlite(tmp_path / "out", lambda text: None)
    assert b"the-key-of-a-session" in busy.read_bytes() + Path(f"{busy}-wal").read_bytes()
    assert b"the-key-of-a-session" not in copy.read_bytes()


def test_who_has_the_file_open_is_found_whatever_else_it_closes(
    busy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service closes sockets all the time; the handle that is gone must not hide the one of the database."""
    wait_for_writes(busy)
    read, gone, writer = os.readlink, iter([True]), writer_of(busy)

    def readlink(path: Any) -> str:
        if f"/{writer}/fd/" in str(path) and next(gone, False):
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert [pid for pid, _ in databases.holders()] == [writer]


def wait_for_writes(path: Path) -> None:
    before = rows(path)
    while rows(path) == before:
        time.sleep(0.01)


def writer_of(path: Path) -> int:
    found = subprocess.run(["pgrep", "-f", str(path)], check=True, capture_output=True, text=True)
    return int(found.stdout.split()[0])


@pytest.mark.parametrize("content", ["hello", "{}", "[]", "3", '{"engine": "sqlite"}'])
def test_what_is_no_backup_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(restore.Refused, match="This is no backup of miStudio"):
        restore.checked(tmp_path)
    with pytest.raises(restore.Refused, match="This is no backup of miStudio"):
        restore.unpack(tmp_path / "manifest.json", tmp_path / "unpacked")


@pytest.mark.parametrize("fault", [DatabaseError("malformed"), sqlite3.DatabaseError("not a database")])
def test_a_database_that_cannot_be_read_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def unreadable() -> int:
        raise fault

    monkeypatch.setattr(databases, "size_bytes", unreadable)
    with pytest.raises(CommandError, match=str(fault)):
        call_command("backup", str(tmp_path / "b.tar"))
    assert not list(tmp_path.iterdir())


def rows(path: Path) -> int:
    with sqlite3.connect(path, timeout=20) as db:
        return int(db.execute("SELECT count(*) FROM pairs").fetchone()[0])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(240)
def test_a_job_that_ran_when_it_was_made_goes_on_in_another_home(tmp_path: Path) -> None:
    """Both installations are on one host and one boot: the pids in the backup are those of living processes."""
    path = tmp_path / "journal"
    with System(tmp_path / "one", time_scale=0.2) as one:
        finished = one.submit("rehearsal", steps=2)
        one.wait(finished["id"])
        job = one.submit(
            "rehearsal", gpu=1, steps=4000, seconds_per_step=0.05, checkpoint_every=20, journal=str(path)
        )
        steps_after(path, job["id"], 45)
        made = one.manage("backup", str(tmp_path / "copies" / "b"), "--with-files")
        assert made.returncode == 0, made.stderr
        refused = one.manage("restore", str(tmp_path / "copies" / "b"))
        assert refused.returncode == 1 and "already runs" in refused.stderr
        work = attempt_of(one, job["id"])["work_pid"]
        artifact = next((one.home / "artifacts").glob("*/*/steps.txt"))
        linked = tmp_path / "copies" / "b" / artifact.relative_to(one.home)
        assert linked.stat().st_ino == artifact.stat().st_ino
        copied = counts(tmp_path / "copies" / "b" / "database.sqlite3")

        two = System(tmp_path / "two", time_scale=0.2)
        restored = two.manage("restore", str(tmp_path / "copies" / "b"))
        assert restored.returncode == 0, restored.stderr
        assert "1 jobs ran then" in restored.stdout
        assert counts(two.home / "db.sqlite3") == copied
        with two:
            resumed = two.wait(job["id"], "running", timeout=30)
            assert resumed["attempt"] == 2
            assert "lost" in [event["event"] for event in two.get(f"jobs/{job['id']}/events/")]
            wait_until(lambda: bool(starts(path, 2)), "the second attempt began", 20)
            assert starts(path, 2)[0]["step"] >= 40
            assert two.job(finished["id"])["artifacts"] == one.job(finished["id"])["artifacts"]
            two.call("POST", f"jobs/{job['id']}/cancel/")
            two.wait(job["id"])
            assert attempt_of(one, job["id"])["work_pid"] == work
            assert one.job(job["id"])["status"] == "running", "the job of the first one was never touched"
        one.call("POST", f"jobs/{job['id']}/cancel/")
        assert one.wait(job["id"])["attempt"] == 1


def starts(path: Path, attempt: int) -> list[dict[str, Any]]:
    return [line for line in journal(path) if line["attempt"] == attempt and line["event"] == "start"]


def counts(database: Path) -> dict[str, int]:
    names = ("jobs_job", "jobs_attempt", "jobs_artifact", "jobs_jobevent", "auth_user", "gpus_gpu")
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names}


@pytest.mark.slow
@pytest.mark.engine
def test_what_is_no_backup_or_damaged_is_not_put_back(tmp_path: Path) -> None:
    here = System(tmp_path / "home")
    assert here.manage("migrate").returncode == 0
    good = tmp_path / "good.tar"
    assert here.manage("backup", str(good)).returncode == 0
    assert good.stat().st_mode & 0o777 == 0o600
    again = here.manage("backup", str(good))
    assert again.returncode == 1 and "never written over another" in again.stderr
    before = (here.home / "db.sqlite3").read_bytes()
    for change, says in (
        (
            lambda told, data: (told | {"migrations": [*told["migrations"], "jobs.9999_later"]}, data),
            "A newer miStudio",
        ),
        (lambda told, data: (told, data[:-1] + b"x"), "is damaged"),
        (lambda told, data: (told | {"engine": "postgresql"}, data), "The backup is of postgresql"),
    ):
        refused = here.manage("restore", str(changed(good, tmp_path / "bad.tar", change)))
        assert refused.returncode == 1 and says in refused.stderr, refused.stderr
    assert (here.home / "db.sqlite3").read_bytes() == before
    assert not list(here.home.glob(".restoring-*"))


def changed(good: Path, bad: Path, change: Any) -> Path:
    folder = bad.with_suffix(".folder")
    with tarfile.open(good) as tar:
        tar.extractall(folder, filter="data")
    told, data = change(
        json.loads((folder / "manifest.json").read_text()), (folder / "database.sqlite3").read_bytes()
    )
    (folder / "manifest.json").write_text(json.dumps(told))
    (folder / "database.sqlite3").write_bytes(data)
    with tarfile.open(bad, "w") as tar:
        for path in folder.iterdir():
            tar.add(path, path.name)
    shutil.rmtree(folder)
    return bad


@pytest.mark.slow
@pytest.mark.engine
def test_an_upgrade_keeps_the_database_as_it_was(tmp_path: Path) -> None:
    """A database one migration behind, real migrations back and forth; a failing one says how to go back."""
    here = System(tmp_path / "home")
    first = here.manage("migrate")
    assert first.returncode == 0 and not (here.home / "backups").exists(), "an empty database needs none"
    assert here.manage("migrate", "jobs", "0002", "--no-backup").returncode == 0
    for _ in range(4):
        forth = here.manage("migrate")
        assert "the database as it is now is in" in forth.stdout
        assert here.manage("migrate", "jobs", "0002").returncode == 0
    kept = sorted((here.home / "backups").iterdir())
    assert len(kept) == 3
    with closing(sqlite3.connect(here.home / "db.sqlite3")) as db:
        db.execute("CREATE TABLE jobs_watchdogevent (in_the_way)")
    failed = here.manage("migrate")
    assert failed.returncode == 1
    assert "could not be changed: OperationalError" in failed.stderr
    newest = sorted((here.home / "backups").iterdir())[-1]
    assert f"manage.py restore {newest}" in failed.stderr
    assert here.manage("restore", str(kept[-1])).returncode == 0
    assert here.manage("migrate", "--check").returncode == 0, "restored, and brought up to date"

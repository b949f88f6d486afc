"""Backup and restore on PostgreSQL, by its own tools, on a cluster of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import dj_database_url
import pytest

from mistudio import databases
from tests.chaos.test_kills import wait_until
from tests.jobs.test_postgres import cluster  # noqa: F401 (a fixture)
from tests.jobs.test_postgres import pytestmark as where_it_is
from tests.postgres import Cluster
from tests.system import ROOT, System

psycopg = pytest.importorskip("psycopg")
pytestmark = [pytest.mark.slow, *where_it_is]


def test_it_comes_back_as_it_was(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    here = System(tmp_path / "home", cluster=cluster)
    assert here.manage("migrate").returncode == 0
    assert here.manage("user", "add", "before", "--link").returncode == 0
    made = here.manage("backup", str(tmp_path / "b"))
    assert made.returncode == 0, made.stderr
    dump = tmp_path / "b" / "database.pgdump"
    assert dump.stat().st_mode & 0o777 == 0o600
    assert here.manage("user", "add", "after", "--link").returncode == 0
    with psycopg.connect(cluster.url) as database:  # what a later version made, before its upgrade failed
        database.execute("CREATE TABLE later (person integer REFERENCES auth_user, note text)")
    restored = here.manage("restore", str(tmp_path / "b"))
    assert restored.returncode == 0, restored.stderr
    people = here.manage("user", "list").stdout
    assert "before:" in people and "after:" not in people
    with psycopg.connect(cluster.url) as database:
        assert database.execute("SELECT to_regclass('later')").fetchone() == (None,)
    assert list(here.home.glob("aside-*/database.pgdump"))
    assert here.manage("migrate", "--check").returncode == 0
    token = (here.home / "operator-token").read_text().strip()
    assert token
    upgraded = here.manage("migrate", "gpus", "0003")
    assert "the database as it is now is in" in upgraded.stdout


def test_a_restore_that_fails_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    here = System(tmp_path / "home", cluster=cluster)
    assert here.manage("migrate").returncode == 0
    assert here.manage("backup", str(tmp_path / "b")).returncode == 0
    assert here.manage("user", "add", "late", "--link").returncode == 0
    with psycopg.connect(
        cluster.url
    ) as database:  # no table that goes: it is in the way of the one that comes
        database.execute("DROP TABLE monitor_visit; CREATE VIEW monitor_visit AS SELECT 1")
    refused = here.manage("restore", str(tmp_path / "b"))
    assert refused.returncode == 1 and "monitor_visit" in refused.stderr, refused.stderr
    assert "late:" in here.manage("user", "list").stdout
    with psycopg.connect(cluster.url) as database:
        database.execute("DROP VIEW monitor_visit")


def test_a_maintenance_waits_for_a_grant_that_is_being_written(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    """A grant holds its card, then writes an attempt that points at the host: neither may wait for the other."""
    here = System(tmp_path / "home", cluster=cluster)
    assert here.manage("migrate").returncode == 0
    assert here.manage("shell", "-c", CARD).returncode == 0
    with psycopg.connect(cluster.url) as grant:
        grant.execute("SELECT 1 FROM gpus_gpu FOR UPDATE")
        command = [sys.executable, "manage.py", "maintenance", "begin"]
        begin = subprocess.Popen(command, cwd=ROOT, env=here.env, stdout=subprocess.PIPE)
        wait_until(lambda: cluster.rows(WAITING) == [(1,)], "it waits for the card", 30)
        grant.execute("SET lock_timeout = '2s'")
        grant.execute("SELECT 1 FROM gpus_host FOR KEY SHARE")  # what a foreign key asks for
        assert begin.poll() is None
    assert b"It is safe" in begin.communicate(timeout=30)[0]


CARD = """
from gpus.models import Gpu, Host
Gpu.objects.create(uuid="GPU-1", host=Host.objects.create(name="alpha"), index=0, name="A")
"""
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


def test_its_tools_trust_no_server_that_the_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pg_dump` in our place says what it was given."""
    (tmp_path / "pg_dump").write_text(
        '#!/bin/sh\necho "$PGSSLMODE $PGSSLROOTCERT $PGPASSWORD $*" >&2; exit 1\n'
    )
    (tmp_path / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    url = "postgres://me:pass@db/name?sslmode=verify-full&sslrootcert=/ca.pem"
    ours = SimpleNamespace(DATABASES={"default": dj_database_url.parse(url)})
    monkeypatch.setattr(databases, "settings", ours)
    with pytest.raises(databases.Damaged, match=r"status 1: verify-full /ca\.pem pass --format"):
        databases.postgresql("pg_dump", "--format=custom")


def test_without_its_tools_it_says_so(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    here = System(tmp_path / "home", cluster=cluster, PATH="/nowhere")
    refused = here.manage("backup", str(tmp_path / "b.tar"))
    assert refused.returncode == 1 and "pg_dump is not on the PATH" in refused.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]

"""Backup and restore on PostgreSQL, by its own tools, on a cluster of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.test_postgres import cluster  # noqa: F401 (a fixture)
from tests.jobs.test_postgres import pytestmark as where_it_is
from tests.system import System

pytestmark = [pytest.mark.slow, *where_it_is]


def test_it_comes_back_as_it_was(cluster: str, tmp_path: Path) -> None:  # noqa: F811
    here = System(tmp_path / "home", DATABASE_URL=cluster)
    assert here.manage("migrate").returncode == 0
    assert here.manage("user", "add", "before", "--link").returncode == 0
    made = here.manage("backup", str(tmp_path / "b"))
    assert made.returncode == 0, made.stderr
    dump = tmp_path / "b" / "database.pgdump"
    assert dump.stat().st_mode & 0o777 == 0o600
    assert here.manage("user", "add", "after", "--link").returncode == 0
    restored = here.manage("restore", str(tmp_path / "b"))
    assert restored.returncode == 0, restored.stderr
    people = here.manage("user", "list").stdout
    assert "before:" in people and "after:" not in people
    assert list(here.home.glob("aside-*/database.pgdump"))
    assert here.manage("migrate", "--check").returncode == 0
    token = (here.home / "operator-token").read_text().strip()
    assert token
    upgraded = here.manage("migrate", "gpus", "0003")
    assert "the database as it is now is in" in upgraded.stdout


def test_without_its_tools_it_says_so(cluster: str, tmp_path: Path) -> None:  # noqa: F811
    here = System(tmp_path / "home", DATABASE_URL=cluster, PATH="/nowhere")
    refused = here.manage("backup", str(tmp_path / "b.tar"))
    assert refused.returncode == 1 and "pg_dump is not on the PATH" in refused.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]

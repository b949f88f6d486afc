"""The data folder is its owner's alone, and what an unclean end leaves in it misleads nobody."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import CommandError

from mistudio import home
from mistudio.management.commands import demo


def test_nobody_else_may_look_into_it(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir(mode=0o755)
    old.chmod(0o755)
    for folder in (new, old):
        home.prepare(folder)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.MISTUDIO_HOME = tmp_path
    home.prepare(tmp_path)
    stale = {"url": "http://127.0.0.1:1", "pid": 1, "processes": {}}
    (tmp_path / "run" / "ready.json").write_text(json.dumps(stale))
    return tmp_path


def test_the_file_of_a_killed_up_does_not_pass_for_a_running_one(folder: Path) -> None:
    """Its pid, 1, lives; the lock is what counts."""
    assert not demo.running()
    with open(folder / "run" / "up.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert demo.running()


def test_a_server_that_does_not_answer_is_told_in_a_sentence(folder: Path) -> None:
    (folder / "operator-token").write_text("x")
    with pytest.raises(CommandError, match="does not answer"):
        demo.Server("http://127.0.0.1:1").get("jobs/")

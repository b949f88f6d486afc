"""A leftover on its page: found, signalled, gone, without a reload; on a phone, light and dark."""

from __future__ import annotations

import os
import secrets
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, expect  # noqa: E402

from jobs import processes  # noqa: E402
from tests.system import System  # noqa: E402

#: A folder in which to keep a picture of each state, for whoever wants to look.
PICTURES = os.environ.get("WATCHDOG_PICTURES")


@pytest.fixture
def leftover(system: System) -> Iterator[subprocess.Popen[bytes]]:
    """Started with the token of a job that has ended, on the first card; it does not listen to SIGTERM."""
    job = system.submit("rehearsal", steps=0, name="left it behind")
    system.wait(job["id"])
    system.wait_for_free_cards()
    token = secrets.token_hex(16)
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; while :; do read line; done"],
        env={"PATH": os.environ["PATH"], processes.TOKEN_VARIABLE: token},
        stdin=subprocess.PIPE,
    )
    found = processes.find(child.pid)
    assert found is not None
    mark = system.home / "run" / "cards" / system.cards()[0]["uuid"] / f"{found.pid}.{found.start}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    with sqlite3.connect(system.home / "db.sqlite3", timeout=20) as database:
        database.execute(
            "UPDATE jobs_attempt SET token_hash = ?, keeper_start = 1 WHERE job_id = ?",
            [processes.token_hash(token), job["id"].replace("-", "")],
        )
    yield child
    child.kill()
    child.wait()


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def test_a_leftover_is_followed_to_its_end(
    leftover: subprocess.Popen[bytes], open_page: Callable[..., Page], system: System
) -> None:
    page = open_page("/health/watchdog/")
    row = page.locator("tr", has_text=f"pid {leftover.pid}")
    expect(row).to_contain_text("left it behind")
    picture(page, "found")
    expect(row).to_contain_text("Ended by SIGKILL.", timeout=60_000)
    assert leftover.poll() is not None
    picture(page, "gone")
    for width, theme in ((1400, "dark"), (390, "light"), (360, "dark")):
        narrow = open_page("/health/watchdog/?show=all", width=width, theme=theme)
        expect(narrow.locator("tr", has_text=f"pid {leftover.pid}")).to_be_visible()
        assert narrow.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        picture(narrow, f"gone-{width}-{theme}")
    health = open_page("/health/", width=360)
    assert health.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    health.get_by_role("link", name="All that it found and did").click()
    expect(health.locator("h1")).to_contain_text("Watchdog")

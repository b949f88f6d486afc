"""What an operator's doing looks like: a maintenance on every page, one's own page, messages that do not arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.system import System

OpenPage = Callable[..., Page]
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_maintenance_is_said_on_every_page(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    page = open_page("/")
    assert system.manage("maintenance", "begin", "--note", "a new driver for all cards").returncode == 0
    try:
        job = system.submit("rehearsal", name="waits for the driver")
        expect(page.locator("[data-part=maintenance]")).to_contain_text(
            "a new driver for all cards", timeout=15_000
        )
        expect(page.locator("[data-part=queue]")).to_contain_text("maintenance since")
        shoot(page, "maintenance")
        page = open_page(f"/jobs/{job['id']}/")
        expect(page.locator("main")).to_contain_text("no job starts on any host until it ends")
        shoot(page, "maintenance-job")
    finally:
        system.manage("maintenance", "end")
    system.wait(job["id"])


def test_one_chooses_ones_mails(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page("/")
    page.locator(".user a").click()
    expect(page.get_by_label("when a job fails, is refused or held")).to_be_checked()
    page.get_by_label("at every end of a job").check()
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".notice")).to_contain_text("Mails: at every end of a job.")
    shoot(page, "me")

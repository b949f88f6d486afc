"""A job in the middle of its line: its place, who stands before it, and when its turn may come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def third(system: System) -> str:
    """The id of the third in line for card 0, behind a job that runs there."""
    holder = system.submit("rehearsal", name="layer 12, long", gpu=0, steps=5000, seconds_per_step=0.1)
    system.wait(holder["id"], "running")
    ids = [system.submit("rehearsal", name=f"layer {n}", gpu=0, steps=3)["id"] for n in (13, 14, 15)]
    return ids[-1]


def test_its_page_says_its_place_and_names_those_before_it(
    open_page: OpenPage, third: str, shoot: Shoot
) -> None:
    page = open_page(f"/jobs/{third}/")
    expect(page.locator("[data-lead]")).to_contain_text(
        "3rd in line for card 0; the first waits: after layer 12, long"
    )
    expect(page.locator("[data-part=why]")).to_contain_text("Before it in its line: layer 13, layer 14.")
    shoot(page, "job-in-line")


def test_the_lists_say_it_too(open_page: OpenPage, third: str, shoot: Shoot) -> None:
    page = open_page("/jobs/?status=queued")
    expect(page.locator(f"#job-{third}")).to_contain_text("3rd in line for card 0")
    shoot(page, "jobs-in-line")
    expect(open_page("/").locator("#queue")).to_contain_text("2nd in line for card 0")


def test_the_form_says_what_time_and_memory_it_goes_by(open_page: OpenPage, third: str, shoot: Shoot) -> None:
    page = open_page("/new/rehearsal/")
    page.get_by_label("Estimate mib").fill("2048")
    page.get_by_label("Estimate mib").blur()
    expect(page.locator(".need")).to_contain_text("time unknown until one like it has run")
    shoot(page, "form-estimate")

"""What people ask in a browser: why does it wait, why was it refused, who is let in, is all well."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot, fits
from tests.system import System

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def waiter(system: System) -> Iterator[str]:
    """A job that waits for card 1, which another holds."""
    holder = system.submit("rehearsal", name="holds card one", steps=9000, seconds_per_step=0.1, gpu=1)
    system.wait(holder["id"], "running")
    waits = system.submit("rehearsal", name="waits for card one", estimate_mib=200, gpu=1)
    yield waits["id"]
    for job in (waits, holder):
        system.call("POST", f"jobs/{job['id']}/cancel/")


@pytest.fixture(scope="module")
def refused(system: System) -> str:
    """A job whose card was switched off while it was held."""
    uuid = system.cards()[0]["uuid"]
    job = system.submit("rehearsal", name="its card is closed", gpu=0, hold=True)
    system.call("PATCH", f"system/gpus/{uuid}/", {"enabled": False})
    system.call("POST", f"jobs/{job['id']}/release/")
    system.wait(job["id"], "refused")
    system.call("PATCH", f"system/gpus/{uuid}/", {"enabled": True})
    return job["id"]


def test_a_waiting_job_is_held_and_released(open_page: OpenPage, system: System, waiter: str) -> None:
    page = open_page(f"/jobs/{waiter}/")
    row = page.locator(".verdicts tr", has_text="asked for")
    expect(row).to_contain_text("later")
    expect(row).to_contain_text("after holds card one")
    page.get_by_role("button", name="Hold").click()
    expect(page.locator("[data-part=said]")).to_contain_text("until somebody releases it")
    assert system.job(waiter)["status"] == "held"
    page.get_by_role("button", name="Release").click()
    expect(page.locator("[data-lead]")).to_contain_text("after holds card one")


def test_a_waiting_job_says_what_every_card_says(open_page: OpenPage, waiter: str, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{waiter}/")
    expect(page.locator(".verdicts tbody tr")).to_have_count(3)
    expect(page.locator(".verdicts tbody tr").last).to_contain_text("now")
    shoot(page, "why-queued")


def test_a_held_job_says_where_it_would_start(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    job = system.submit("rehearsal", name="large and held", estimate_mib=30 * 1024, hold=True)
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator(".verdicts tbody tr").first).to_contain_text("needs 30.2 GiB, this card can give")
    expect(page.locator(".verdicts tbody tr").last).not_to_contain_text("never")
    shoot(page, "why-held")
    system.call("POST", f"jobs/{job['id']}/cancel/")


def test_a_refused_job_says_why(open_page: OpenPage, refused: str, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{refused}/")
    expect(page.locator(".sentence")).to_contain_text("Card 0 is disabled")
    expect(page.locator("[data-part=said]")).to_contain_text("Retry on another card")
    expect(page.locator("[data-part=why]")).to_contain_text("Where a retry would fit now")
    shoot(page, "why-refused")


def test_a_token_is_made_seen_once_and_revoked(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    page, name = open_page("/"), "notebook"
    page.get_by_role("link", name="Tokens").click()
    page.get_by_label("Name").fill(name)
    page.get_by_label("submit").check()
    page.get_by_role("button", name="Make the token").click()
    expect(page.get_by_role("status")).to_contain_text("shown this once")
    value = page.locator("#value").inner_text()
    shoot(page, "tokens")
    page.goto(f"{system.url}/tokens/")
    assert value not in page.content()
    page.get_by_role("button", name=f"Revoke {name}…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Programs that use it are refused at once")
    shoot(page, "token-revoke")
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("status")).to_contain_text(f"{name} is revoked")
    expect(page.locator("tr", has_text=name)).to_have_count(0)


def test_health_is_told_in_words(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page("/")
    page.get_by_role("link", name="Health").click()
    expect(page).to_have_url(re.compile("/health/$"))
    expect(page.locator("[data-part=head]")).to_contain_text("all parts answer")
    expect(page.locator("[data-part=hosts]")).to_contain_text("testhost")
    shoot(page, "health")


@pytest.mark.parametrize("width", [901, 1280, 1281])
def test_the_top_bar_holds_all_its_links(width: int, open_page: OpenPage) -> None:
    page = open_page("/health/", width=width)
    expect(page.locator(".live")).to_have_attribute("data-state", "live")
    fits(page)

"""The Monitor in a browser: frames of the real agent, through the real hub."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import until
from tests.system import System

OpenPage = Callable[..., Page]


def test_cards_are_live_and_drawn_in_both_modes(open_page: OpenPage) -> None:
    page = open_page("/")
    expect(page.locator(".live")).to_contain_text("live,")
    expect(page.locator("#rows canvas")).to_have_count(12)
    expect(page.locator("[data-card] [data-field=temperature_celsius]").first).not_to_have_text("–")
    page.get_by_role("button", name="Aggregated").click()
    expect(page.locator("#aggregated canvas")).to_have_count(4)
    expect(page.locator("#aggregated [data-legend] .chip")).to_have_count(3)
    expect(page.locator("#rows.lines")).to_be_visible()
    page.reload()
    expect(page.locator("#aggregated canvas")).to_have_count(4)  # the choice is remembered


def test_history_grows_and_the_cursor_reads_all_four_charts(open_page: OpenPage) -> None:
    page = open_page("/")
    until(page, "document.querySelector('#rows .plot').chart?.data[0].length > 4")
    plots = page.locator("[data-card] .four").first.locator(".u-over")
    box = plots.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    for output in page.locator("[data-card] .four").first.locator("output").all():
        expect(output).to_contain_text(" at ")


def test_a_job_appears_on_its_card_and_leaves_it(open_page: OpenPage, system: System) -> None:
    page = open_page("/")
    card = system.cards()[1]
    row = page.locator(f'[data-card="{card["uuid"]}"]')
    expect(row.locator(".badge", has_text="free")).to_be_visible()
    job = system.submit("rehearsal", name="seen live", steps=40, seconds_per_step=0.1, memory_mib=200, gpu=1)
    expect(row.get_by_role("link", name="seen live")).to_be_visible()
    expect(row.locator(".badge", has_text="busy")).to_be_visible()
    expect(page.locator("[data-part=processes]").get_by_role("link", name="seen live")).to_be_visible()
    system.wait(job["id"])
    expect(row.locator(".badge", has_text="free")).to_be_visible()
    expect(row.get_by_text("takes the next job that fits")).to_be_visible()


def test_the_queue_says_what_a_job_waits_for(open_page: OpenPage, system: System) -> None:
    first = system.submit("rehearsal", name="in front", steps=60, seconds_per_step=0.1, gpu=0)
    second = system.submit("rehearsal", name="behind", steps=1, gpu=0)
    page = open_page("/")
    queue = page.locator("[data-part=queue]")
    expect(queue.locator("li", has_text="behind")).to_contain_text("after in front")
    system.call("POST", f"jobs/{first['id']}/cancel")
    system.wait(second["id"])
    expect(queue.get_by_text("Nothing waits.")).to_be_visible()


def test_a_silent_agent_turns_the_age_red(open_page: OpenPage, system: System) -> None:
    page = open_page("/")
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    agent = system.kill("agent", signal.SIGSTOP)
    try:
        expect(page.locator(".live[data-state=stale]")).to_contain_text("updated")
        expect(page.locator("[data-part=notices]")).to_contain_text("The agent of testhost was last heard")
    finally:
        os.kill(agent, signal.SIGCONT)
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    expect(page.locator("[data-part=notices]")).not_to_contain_text("was last heard")


def test_a_lost_connection_is_said_and_comes_back(open_page: OpenPage, system: System) -> None:
    page = open_page("/jobs/")
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    system.kill("web")
    expect(page.locator(".live[data-state=lost]")).to_contain_text("connection lost, trying again in")
    expect(page.locator(".live[data-state=live]")).to_be_visible(timeout=45_000)


def test_a_queue_that_nobody_reads_fills_in_sight(open_page: OpenPage, system: System) -> None:
    page = open_page("/")
    workers = page.locator("[data-part=workers]")
    expect(workers).to_contain_text("1 of 1 worker alive")
    expect(workers.get_by_role("row", name="gpu.testhost")).to_be_visible()
    waiting = workers.get_by_role("row", name="cpu ").locator("td").nth(1)
    expect(waiting).to_have_text("0")
    worker = system.kill("worker-cpu", signal.SIGSTOP)
    try:
        expect(waiting).to_have_text(re.compile(r"[1-9]\d*"))
    finally:
        with suppress(ProcessLookupError):  # `up` may have replaced one that does not answer
            os.kill(worker, signal.SIGCONT)
    expect(waiting).to_have_text("0")


def test_frames_do_not_pile_up(open_page: OpenPage) -> None:
    """At five frames a second: charts are drawn again, never made again."""
    page = open_page("/")
    until(page, "document.querySelector('#rows .plot').chart?.data[0].length > 3")
    before = page.evaluate("document.querySelectorAll('*').length")
    page.wait_for_timeout(5000)
    assert page.evaluate("document.querySelectorAll('*').length") <= before + 40


@pytest.mark.parametrize("width", [360, 390, 768, 1180, 1640])
@pytest.mark.parametrize("path", ["/", "/jobs/", "/new/", "/new/sae_training/"])
def test_nothing_overflows(path: str, width: int, open_page: OpenPage) -> None:
    page = open_page(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_remembered(theme: str, open_page: OpenPage) -> None:
    page = open_page("/", theme="light" if theme == "dark" else "dark")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    while page.evaluate("document.documentElement.dataset.theme") != theme:
        page.locator("#theme").click()
    assert page.evaluate(background) != before
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate(background) != before


def test_the_keyboard_reaches_everything(open_page: OpenPage) -> None:
    page = open_page("/")
    seen = []
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert seen[:5] == ["Skip to content", "miStudio", "Monitor", "Jobs", "Artifacts"]
    assert "Sign out" in seen

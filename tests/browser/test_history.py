"""The charts of the Monitor and of a card: filled from history, carried on by frames, whole after every trouble."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import until
from tests.browser.past import live_through
from tests.system import System

OpenPage = Callable[..., Page]
#: What the first row's first chart has: its times, and whether each step has a mean.
CHART = "document.querySelector('#rows .plot').chart?.data"
KNOWN = f"{CHART}?.[2].filter((value) => value !== null).length"
#: Steps without a reading between the first and the last that have one.
HOLES = f"""(() => {{
  const mean = {CHART}[2], said = mean.map((value) => value !== null);
  return mean.slice(said.indexOf(true), said.lastIndexOf(true)).filter((value) => value === null).length;
}})()"""

#: Whether there is no step of which the server has a reading and the chart has none, the one under way aside.
NOTHING_IS_MISSING = f"""(async () => {{
  const told = await (await fetch("/curves/?minutes=5")).json();
  const [times, , drawn] = {CHART};
  const mean = told.cards[document.querySelector("#rows [data-card]").dataset.card].utilization.mean;
  return times.slice(1, -1).filter((time, n) => {{
    const said = mean[Math.round((time - told.start) / told.step)];
    return drawn[n + 1] === null && said !== null && said !== undefined;
  }}).length === 0;
}})()"""


def choose(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


@pytest.fixture(scope="module")
def past(system: System) -> System:
    """Two hours of all cards; what was before is not there."""
    live_through(system, 120, [0.9, 0.4, 0.0], steps=7200)  # one a second
    return system


def test_charts_are_full_when_the_page_opens(open_page: OpenPage, past: System) -> None:
    page = open_page("/")
    choose(page, "30 min")
    until(page, f"{KNOWN} > 250")
    assert page.locator("#since").inner_text() == ""
    page.reload()  # the window is remembered, and nothing is lost
    until(page, f"{KNOWN} > 250")
    expect(page.get_by_role("button", name="30 min")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize(
    ("window", "label"),
    [
        ("1 h", "−1 h"),
        pytest.param("6 h", "−6 h", marks=pytest.mark.slow),
        pytest.param("24 h", "−24 h", marks=pytest.mark.slow),
        ("7 d", "−7 d"),
        pytest.param("30 d", "−30 d", marks=pytest.mark.slow),
    ],
)
def test_every_window_says_how_far_it_reaches(
    window: str, label: str, open_page: OpenPage, past: System
) -> None:
    page = open_page("/")
    choose(page, window)
    expect(page.locator("#rows [data-from]").first).to_have_text(label)
    if window == "1 h":
        until(page, f"{KNOWN} > 250")
    else:
        expect(page.locator("#since")).to_contain_text("readings since")
        until(page, f"{KNOWN} >= 1 && {CHART}[0].length < 320")


def test_a_step_of_several_readings_is_drawn_with_its_band(open_page: OpenPage, past: System) -> None:
    page = open_page("/")
    choose(page, "1 h")
    until(page, f"{CHART}?.[1].some((high, n) => high > {CHART}[2][n] && {CHART}[3][n] < {CHART}[2][n])")
    box = page.locator("#rows .u-over").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    outputs = page.locator("#rows output")
    for number in range(outputs.count()):  # of every card: one cursor over the whole page
        expect(outputs.nth(number)).to_contain_text(" at ")
    expect(outputs.nth(4)).to_contain_text("–")  # between what the readings lay


def test_what_a_lost_connection_missed_is_fetched(open_page: OpenPage, past: System) -> None:
    page = open_page("/")
    choose(page, "5 min")
    until(page, f"{KNOWN} > 250")
    before = page.evaluate(f"{CHART}[0].at(-1)")
    past.kill("web")
    expect(page.locator(".live[data-state=lost]")).to_be_visible()
    expect(page.locator(".live[data-state=live]")).to_be_visible(timeout=45_000)
    until(page, f"{CHART}[0].at(-1) > {before} + 3")
    until(page, NOTHING_IS_MISSING)


def test_a_gap_stays_a_gap(open_page: OpenPage, past: System) -> None:
    """While the agent was stopped nothing was read, and no line is drawn over it; also after a reload."""
    page = open_page("/")
    choose(page, "5 min")
    until(page, f"{KNOWN} > 250")
    before = page.evaluate(HOLES)  # on a machine with much to do a reading may be late
    agent = past.kill("agent", signal.SIGSTOP)
    try:
        page.wait_for_timeout(5000)
    finally:
        os.kill(agent, signal.SIGCONT)
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    until(page, f"{HOLES} >= {before} + 3")
    page.reload()
    until(page, f"{KNOWN} > 200 && {HOLES} >= {before} + 3")


def test_without_history_the_page_lives_and_says_so(open_page: OpenPage, past: System) -> None:
    page = open_page("/", prepare=lambda page: page.route("**/curves/**", lambda route: route.abort()))
    expect(page.locator("#since")).to_contain_text(
        "history does not answer: what comes live is shown, asked again in"
    )
    until(page, f"{KNOWN} >= 2")
    assert page.evaluate(KNOWN) < 60
    page.unroute("**/curves/**")
    until(page, f"{KNOWN} > 250", 60)
    expect(page.locator("#since")).to_have_text("")


def test_a_clock_that_is_set_stops_no_chart(open_page: OpenPage, past: System) -> None:
    clock = "{ const real = Date.now; window.by = 0; Date.now = () => real() + window.by; }"
    page = open_page("/", prepare=lambda page: page.add_init_script(clock))
    choose(page, "5 min")
    until(page, f"{KNOWN} > 250")
    before = page.evaluate(f"window.by = -3_600_000, {CHART}[0].at(-1)")
    until(page, f"{CHART}[0].at(-1) > {before} + 3 && {CHART}[2].at(-2) !== null")


# Compare ------------------------------------------------------------------------------------------------
def test_compare_overlays_the_chosen_cards_and_remembers_them(open_page: OpenPage, past: System) -> None:
    page = open_page("/")
    choose(page, "Compare")
    expect(page.locator("#compare canvas")).to_have_count(4)
    expect(page.locator("#compare [data-legend] .chip")).to_have_text(["0", "1", "2"])
    page.locator("#pick button").nth(1).click()
    expect(page.locator("#compare [data-legend] .chip")).to_have_text(["0", "2"])
    until(page, "document.querySelector('#compare .plot').chart.series.length === 3")
    page.reload()
    expect(page.locator("#compare [data-legend] .chip")).to_have_text(["0", "2"])
    expect(page.locator("#rows.lines")).to_be_visible()


# A card's page ------------------------------------------------------------------------------------------
def test_a_card_has_a_page_with_its_past_and_its_jobs(open_page: OpenPage, past: System) -> None:
    job = past.submit("rehearsal", name="on the second", steps=30, seconds_per_step=0.1, memory_mib=50, gpu=1)
    page = open_page("/")
    page.locator("#rows header a.chip").nth(1).click()
    page.wait_for_url("**/cards/GPU-*/")
    expect(page.locator(".four canvas")).to_have_count(4)
    until(
        page, "document.querySelector('.plot').chart.data[2].filter((value) => value !== null).length > 250"
    )
    expect(page.locator("[data-field=temperature_celsius]")).not_to_have_text("–")
    expect(page.locator("[data-part^=holds]").get_by_role("link", name="on the second")).to_be_visible()
    expect(page.locator("[data-part=processes]").get_by_role("link", name="on the second")).to_be_visible()
    past.wait(job["id"])
    expect(page.locator("[data-part^=holds]")).to_contain_text("takes the next job that fits")
    ran = page.locator("#rows tr", has_text="on the second")
    expect(ran).to_contain_text("succeeded")  # without a reload
    page.reload()
    expect(ran).to_contain_text("succeeded")


def test_staff_drains_and_reopens_a_card(open_page: OpenPage, past: System) -> None:
    page = open_page("/")
    page.locator("#rows header a.chip").nth(2).click()
    page.get_by_role("button", name="Drain…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Nothing runs on it now.")
    page.get_by_role("button", name="Drain it").click()
    expect(page.locator(".bar .badge", has_text="disabled")).to_be_visible()
    expect(page.locator("[data-part=events]")).to_contain_text("enabled = False")
    page.get_by_role("button", name="Reopen…").click()
    page.get_by_role("button", name="Reopen it").click()
    expect(page.locator(".bar .badge", has_text="free")).to_be_visible()
    page.get_by_label("Jobs at once").fill("0")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#s-max_jobs")).to_contain_text("greater than or equal to 1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400

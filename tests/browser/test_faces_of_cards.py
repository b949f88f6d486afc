"""Every state of the cards has a face: what the pages say then, in words, and a picture of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.camera import Shoot
from tests.browser.conftest import sign_in, visit
from tests.browser.past import live_through
from tests.stubs.driver import IS_LOST, NOT_SUPPORTED, StandIn, StandInCard
from tests.stubs.load import Load
from tests.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OpenPage = Callable[..., Page]
H100 = {"name": "NVIDIA H100 80GB HBM3", "total": 81559, "power": (70_000, 700_000), "temperature": (34, 87)}


@contextmanager
def visited(browser: Browser, system: System) -> Iterator[OpenPage]:
    with system, visit(browser, system, sign_in(browser, system)) as open_page:
        yield open_page


def cards(count: int) -> list[StandInCard]:
    """In PCI order; every fourth is a large one."""
    buses = [f"{n // 8:08X}:{1 + 4 * (n % 8):02X}:00.0" for n in range(count)]
    return [StandInCard(bus=bus, **(H100 if n % 4 == 2 else {})) for n, bus in enumerate(buses)]


def row(page: Page, card: StandInCard) -> object:
    return page.locator(f'[data-card="{card.uuid}"]')


def test_no_card(browser: Browser, tmp_path: Path, shoot: Shoot) -> None:
    system = System(tmp_path / "home", MISTUDIO_GPU_BACKEND="auto", MISTUDIO_ALLOW_CPU="off")
    with visited(browser, system) as open_page:
        page = open_page("/")
        notices = page.locator("[data-part=notices]")
        expect(notices).to_contain_text("No card of testhost can be read.")
        expect(notices).to_contain_text("no NVIDIA driver is installed")
        expect(notices).to_contain_text("nvidia-smi")
        shoot(page, "monitor-none")
        page = open_page("/new/rehearsal/")
        expect(page.locator("#place")).to_contain_text("no NVIDIA driver is installed")
        shoot(page, "form-no-card")


def test_one_card_and_nothing_done_yet(browser: Browser, tmp_path: Path, shoot: Shoot) -> None:
    with visited(browser, System(tmp_path / "home", cards="24GiB")) as open_page:
        page = open_page("/")
        expect(page.locator("[data-card]")).to_have_count(1)
        expect(page.locator("[data-card]")).to_contain_text("takes the next job that fits")
        expect(page.locator("[data-part=queue]")).to_contain_text("Nothing waits.")
        expect(page.locator("#since")).to_contain_text("readings since")
        page.wait_for_timeout(10_000)
        shoot(page, "monitor-one")
        page.get_by_role("button", name="Aggregated").click()
        shoot(page, "monitor-one-aggregated")
        page.get_by_role("button", name="Compare").click()
        shoot(page, "monitor-one-compare")
        page.locator("header a.chip").click()
        expect(page.locator("#rows")).to_contain_text("No job has run on it yet.")
        shoot(page, "card-new")
        page = open_page("/jobs/")
        expect(page.locator("#rows")).to_contain_text("No job yet. Begin with a model download")
        shoot(page, "jobs-empty")
        page = open_page("/artifacts/")
        expect(page.locator("#rows")).to_contain_text("No artifact yet")
        shoot(page, "artifacts-empty")
        page = open_page("/health/")
        expect(page.locator("[data-part=head]")).to_contain_text("all parts answer")
        shoot(page, "health-ok")


@pytest.mark.parametrize("count", [8, 64])
def test_many_cards(count: int, browser: Browser, driver_library: Path, tmp_path: Path, shoot: Shoot) -> None:
    driver = StandIn(tmp_path, driver_library, cards(count))
    shares = [(0.95, 0.6, 0.0, 0.35, 0.8)[n % 5] for n in range(count)]
    for card, share in zip(driver.cards, shares, strict=True):
        card.processes = [("compute", os.getpid(), round(0.8 * share * card.total))] if share else []
    system = System(tmp_path / "home", driver=driver, time_scale=0.2 if count == 8 else 0.5)
    with Load(driver, shares), visited(browser, system) as open_page:
        live_through(system, 30, shares, steps=500)
        page = open_page("/")
        expect(page.locator("[data-card]")).to_have_count(count)
        expect(page.locator("#rows")).to_have_class(
            re.compile(r"\blines\b") if count > 8 else re.compile("rows")
        )
        expect(page.locator("[data-card]").first).to_contain_text("of others")
        page.wait_for_timeout(5000)
        shoot(page, f"monitor-{count}", whole=count == 8)
        page.get_by_role("button", name="Aggregated").click()
        expect(page.locator("#aggregated [data-legend] .chip")).to_have_count(count)
        shoot(page, f"monitor-{count}-aggregated", whole=count == 8)
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("#compare [data-legend] .chip")).to_have_count(6)
        expect(page.locator("#pick button:disabled")).to_have_count(count - 6)
        shoot(page, f"monitor-{count}-compare", whole=count == 8)


def test_values_that_the_driver_does_not_say(
    browser: Browser, driver_library: Path, tmp_path: Path, shoot: Shoot
) -> None:
    laptop, virtual = (
        StandInCard(name="NVIDIA GeForce MX450", total=2048),
        StandInCard(bus="00000000:41:00.0"),
    )
    laptop.faults = dict.fromkeys(("power", "limit", "fan", "slowdown"), NOT_SUPPORTED)
    virtual.faults = dict.fromkeys(("utilization", "temperature", "power", "limit", "compute"), NOT_SUPPORTED)
    driver = StandIn(tmp_path, driver_library, [laptop, virtual])
    with visited(browser, System(tmp_path / "home", driver=driver)) as open_page:
        page = open_page("/")
        expect(row(page, laptop).locator("[data-field=power_draw_watts]")).to_have_text("–")
        expect(row(page, laptop).locator("[data-field=temperature_celsius]")).to_have_text("40")
        for field in ("utilization_gpu_percent", "temperature_celsius", "power_draw_watts"):
            expect(row(page, virtual).locator(f"[data-field={field}]")).to_have_text("–")
        expect(row(page, virtual).locator("[data-field=memory_free_bytes]")).to_have_text("23.7")
        expect(page.locator("[data-part=processes]")).to_contain_text(
            "does not say which processes use card 1"
        )
        page.wait_for_timeout(8000)
        expect(page.locator(".unsaid")).to_have_count(4)
        shoot(page, "monitor-unsaid")


@pytest.fixture(scope="module")
def four(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("standin"), driver_library, cards(4))


@pytest.fixture(scope="module")
def system(four: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    home = tmp_path_factory.mktemp("home")
    with Load(four, [0.9, 0, 0.5, 0.7]), System(home, driver=four, time_scale=0.2) as running:
        yield running


def test_a_lost_card_among_four(open_page: OpenPage, system: System, four: StandIn, shoot: Shoot) -> None:
    gone = four.cards[3]
    live_through(system, 30, [0.9, 0, 0.5, 0.7])
    page = open_page("/")
    page.wait_for_timeout(3000)
    gone.faults = {"handle": IS_LOST}
    expect(row(page, gone).locator(".badge")).to_contain_text("lost ·")
    expect(row(page, gone).locator("[data-field=utilization_gpu_percent]")).to_have_text("–")
    expect(row(page, gone)).to_contain_text("The card returns by itself when it answers again.")
    expect(page.locator("[data-part=notices]")).to_contain_text("Card 3 of testhost was lost")
    expect(page.locator(".strip")).to_contain_text("3/4 cards")
    page.wait_for_timeout(8000)
    shoot(page, "monitor-lost")
    page.get_by_role("button", name="Aggregated").click()
    shoot(page, "monitor-lost-aggregated")
    page.locator("[data-part=notices] a").click()
    expect(page.locator("[data-part=says]")).to_contain_text("lost ·")
    expect(page.locator("[data-field=temperature_celsius]")).to_have_text("–")
    shoot(page, "card-lost")
    gone.faults = {}
    expect(page.locator(".bar .badge").first).to_contain_text("free")


def test_a_card_that_is_drained(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    running = system.submit("rehearsal", name="in front", steps=5000, seconds_per_step=0.1, gpu=0)
    waiting = system.submit("rehearsal", name="behind", steps=1, gpu=0)
    system.wait(running["id"], "running")
    page = open_page("/")
    page.locator("#rows header a.chip").first.click()
    page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1 job goes on to the end: in front.")
    expect(dialog).to_contain_text("1 queued job that named this card is refused: behind.")
    shoot(page, "card-drain", whole=False)
    page.get_by_role("button", name="Drain it").click()
    expect(page.locator(".bar .badge").first).to_contain_text("draining")
    assert system.wait(waiting["id"])["failure_reason"] == "card_unavailable"
    page.get_by_label("Jobs at once").fill("many")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#s-max_jobs")).to_contain_text("valid integer")
    shoot(page, "card-draining")
    page.get_by_role("button", name="Reopen…").click()
    page.get_by_role("button", name="Reopen it").click()
    expect(page.locator(".bar .badge").first).to_contain_text("busy")
    system.call("POST", f"jobs/{running['id']}/cancel")
    system.wait(running["id"])


def test_a_long_past_and_none_that_answers(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    live_through(system, 8 * 24 * 60, [0.9, 0, 0.5, 0.7], steps=6000)
    page = open_page("/")
    page.get_by_role("button", name="7 d").click()
    page.wait_for_timeout(3000)
    shoot(page, "monitor-week")
    page = open_page("/", prepare=lambda page: page.route("**/curves/**", lambda route: route.abort()))
    expect(page.locator("#since")).to_contain_text("history does not answer")
    page.wait_for_timeout(5000)
    shoot(page, "monitor-no-history")


def test_a_stale_agent(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    page = open_page("/")
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    page.wait_for_timeout(5000)
    agent = system.kill("agent", signal.SIGSTOP)
    try:
        expect(page.locator(".live[data-state=stale]")).to_contain_text(re.compile(r"updated \d+ s ago"))
        expect(page.locator("[data-part=notices]")).to_contain_text("The agent of testhost was last heard")
        page.wait_for_timeout(8000)
        shoot(page, "monitor-stale")
        page = open_page("/health/")
        expect(page.locator("[data-part=head]")).to_contain_text("a part does not answer")
        expect(page.locator("[data-part=hosts]")).to_contain_text("silent for")
        shoot(page, "health-degraded")
    finally:
        os.kill(agent, signal.SIGCONT)


def test_a_lost_connection(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    """Whoever would start the web server again is stopped, so that it stays away for a picture."""
    page = open_page("/")
    expect(page.locator(".live[data-state=live]")).to_be_visible()
    page.wait_for_timeout(5000)
    assert system.process
    os.kill(system.process.pid, signal.SIGSTOP)
    try:
        system.kill("web")
        expect(page.locator(".live")).to_contain_text(re.compile(r"connection lost, trying again in \d+ s"))
        page.wait_for_timeout(5000)
        expect(page.locator(".live[data-state=lost]")).to_be_visible()
        shoot(page, "monitor-disconnected")
    finally:
        os.kill(system.process.pid, signal.SIGCONT)
    expect(page.locator(".live[data-state=live]")).to_be_visible(timeout=60_000)


def test_sign_in(browser: Browser, system: System, shoot: Shoot) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(system.url)
    expect(page.get_by_role("heading", level=1)).to_contain_text("Sign in")
    shoot(page, "signin")
    page.get_by_label("Name").fill("nobody")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("main")).to_contain_text("correct")
    shoot(page, "signin-refused")
    context.close()

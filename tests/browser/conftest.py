"""A real browser on a real running system. Whatever a page complains about in its console fails the test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, BrowserContext, Page, expect  # noqa: E402

from tests.browser.camera import shoot  # noqa: E402, F401  (a fixture of every file here)
from tests.system import ROOT, System  # noqa: E402

expect.set_options(timeout=20_000)  # a loaded machine is slow, not wrong
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
Prepare = Callable[[Page], None]
#: What browsers themselves write when a server goes away, when a form is refused, and htmx when a page is left.
EXPECTED = ("WebSocket connection to", "net::ERR_", "status of 400", "htmx:sendAbort", "htmx:afterRequest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser" in str(item.path):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Per file, not per run: the driver keeps an event loop in this thread, in which no asynchronous test runs."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def sign_in(browser: Browser, system: System) -> dict[str, object]:
    """As people do: open the printed link and press its button; the cookies to come back with."""
    command = [sys.executable, "manage.py", "signin-link", "--base-url", system.url]
    printed = subprocess.run(
        command, cwd=ROOT, env=system.env, check=True, capture_output=True, text=True
    ).stdout
    context = browser.new_context()
    page = context.new_page()
    page.goto(printed.strip().splitlines()[-1])
    page.click("main button.primary")
    page.wait_for_url(f"{system.url}/")
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture(scope="module")
def signed_in(browser: Browser, system: System) -> dict[str, object]:
    return sign_in(browser, system)


def until(page: Page, script: str, seconds: float = 15) -> None:
    """Wait for `script` to hold. Playwright's own `wait_for_function` evaluates text, which our policy forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < deadline, script
        page.wait_for_timeout(100)


@contextmanager
def visit(browser: Browser, system: System, signed_in: dict[str, object]) -> Iterator[Callable[..., Page]]:
    """`open_page("/jobs/", width=390, theme="dark")`; at the end of the visit the console must be clean."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def complain(text: str) -> None:
        if not any(word in text for word in EXPECTED):
            complaints.append(text)

    def open_at(
        path: str,
        width: int = 1400,
        height: int = 900,
        theme: str = "light",
        prepare: Prepare = lambda page: None,
    ) -> Page:
        size = {"width": width, "height": height}
        context = browser.new_context(storage_state=signed_in, viewport=size, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("console", lambda message: complain(message.text) if message.type == "error" else None)
        prepare(page)
        page.goto(system.url + path)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def open_page(
    browser: Browser, system: System, signed_in: dict[str, object]
) -> Iterator[Callable[..., Page]]:
    with visit(browser, system, signed_in) as open_at:
        yield open_at

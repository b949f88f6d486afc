"""The pictures of `docs/img/`, taken from a running system: `python -m tests.browser.pictures --home var`.

Wants a finished and a running training there (`make demo`, then one more); what is missing is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS
from tests.system import ROOT

MODES = ("cards", "aggregated")


def main() -> None:
    options = arguments()
    url = json.loads((options.home / "run" / "ready.json").read_text())["url"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        state = signed_in(browser, link(options.home, url))
        for name, path, wait, mode in pages(url, options.home, options.wait):
            for theme in ("light", "dark"):
                for label, width in (("", 1400), ("-narrow", 390)):
                    file = options.to / f"{name}-{theme}{label}.png"
                    take(browser, state, url + path, file, theme, width, wait, mode)
        browser.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "var")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--wait", type=float, default=20, help="seconds in which charts fill")
    return parser.parse_args()


def link(home: Path, url: str) -> str:
    command = [sys.executable, "manage.py", "signin-link", "--base-url", url]
    environment = os.environ | {"MISTUDIO_HOME": str(home)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return printed.stdout.strip().splitlines()[-1]


def signed_in(browser: Browser, address: str) -> Any:
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.click("main button.primary")
    page.wait_for_load_state()
    return context.storage_state()


def pages(url: str, home: Path, wait: float) -> Iterator[tuple[str, str, float, str]]:
    """Name, address, seconds to wait, mode of the Monitor."""
    for mode in MODES:
        yield f"monitor-{mode}", "/", wait, mode
    yield "jobs", "/jobs/", 3, ""
    yield "new-job", "/new/sae_training/", 3, ""
    for status, name in (("running", "training"), ("succeeded", "trained"), ("failed", "failed")):
        if job := newest(url, home, status):
            yield f"job-{name}", f"/jobs/{job}/", 6, ""


def newest(url: str, home: Path, status: str) -> str | None:
    token = (home / "operator-token").read_text().strip()
    kind = "" if status == "failed" else "&kind=sae_training"
    request = urllib.request.Request(
        f"{url}/api/v1/jobs/?status={status}{kind}", headers={"Authorization": f"Token {token}"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.loads(answer.read())["results"]
    return found[0]["id"] if found else None


def take(
    browser: Browser, state: Any, address: str, file: Path, theme: Any, width: int, wait: float, mode: str
) -> None:
    size = {"width": width, "height": 900}
    context = browser.new_context(storage_state=state, viewport=size, color_scheme=theme)
    if mode:
        choice = json.dumps({"mode": mode, "minutes": "5"})
        context.add_init_script(f"localStorage.setItem('monitor', {json.dumps(choice)})")
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(1000 * wait)
    file.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=file, full_page=True)
    context.close()


if __name__ == "__main__":
    main()

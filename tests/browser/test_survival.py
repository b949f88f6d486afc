"""Work that people left alone: the browser is closed, the session gone, the services killed; the results are there."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import sign_in
from tests.system import System

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """With a real language model in it."""
    with System(tmp_path_factory.mktemp("lab"), time_scale=0.2) as system:
        kinds = {kind["name"]: kind["example"] for kind in system.get("job-kinds/")}
        job = system.submit("model_download", **kinds["model_download"])
        assert system.wait(job["id"], timeout=180)["status"] == "succeeded"
        yield system


def queue_extraction(page: Page, system: System, number: int) -> str:
    """Through the form, on card 0; the job's id."""
    page.goto(f"{system.url}/new/activation_extraction/")
    page.get_by_label("Name of the job").fill(f"left alone {number}")
    page.locator("[name=model]").select_option(index=1)
    page.get_by_label("Block", exact=True).fill(str(number))
    page.locator("[name=max_tokens]").fill("6000")
    page.locator("[name=context_size]").fill("64")
    page.locator(f'input[name=gpu][value="{system.cards()[0]["uuid"]}"]').check()
    page.get_by_role("button", name="Queue the job").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f-]+/$"))
    return re.search(r"/jobs/([0-9a-f-]+)/", page.url)[1]


def test_five_extractions_outlive_browser_session_web_worker_and_broker(
    browser: Browser, lab: System
) -> None:
    context = browser.new_context(storage_state=sign_in(browser, lab))
    page = context.new_page()
    jobs = [queue_extraction(page, lab, number) for number in range(1, 6)]
    context.close()
    with sqlite3.connect(Path(lab.home) / "db.sqlite3", timeout=20) as database:
        database.execute("DELETE FROM django_session")
    for name in ("web", "worker", "broker"):
        lab.kill(name)
        time.sleep(2)
    wait_for_the_web(lab)
    ended = [lab.wait(job, timeout=200) for job in jobs]
    assert [(job["status"], job["attempt"]) for job in ended] == [("succeeded", 1)] * 5
    back = browser.new_context(storage_state=sign_in(browser, lab))
    page = back.new_page()
    page.goto(f"{lab.url}/jobs/?kind=activation_extraction")
    for number in range(1, 6):
        row = page.locator("tr, li, article", has_text=f"left alone {number}").first
        expect(row.locator(".badge", has_text="succeeded")).to_be_visible()
    assert len(lab.get("artifacts/?type=activations")["results"]) == 5
    back.close()


def wait_for_the_web(lab: System) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if lab.call("GET", "system/health")[0] in (200, 503):
                return
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)

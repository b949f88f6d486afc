"""Pause, Resume and Finalize on the page of a job: pressed by a person, with what the page says before and after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("verbs"), time_scale=0.2) as running:
        yield running


def test_a_job_is_paused_resumed_and_finalized(open_page: OpenPage, system: System, shoot: Shoot) -> None:
    job = system.submit(
        "rehearsal", name="a long count", gpu=1, steps=2000, checkpoint_every=5, time_limit_seconds=3600
    )
    system.wait(job["id"], "running")
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator("[data-part=lead]")).to_contain_text("1 h 0 min of running")
    page.get_by_role("button", name="Pause").click()
    resume = page.locator("[data-part=head]").get_by_role("button", name="Resume…")
    expect(resume).to_be_visible(timeout=20_000)
    shoot(page, "job-paused")
    resume.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile(r"goes on from its checkpoint \(step-\d+\)"))
    expect(dialog.get_by_label("On")).to_contain_text("same card: 1")
    shoot(page, "job-resume", whole=False)
    dialog.get_by_role("button", name="Resume the job").click()
    system.wait(job["id"], "running")
    page.get_by_role("button", name="Pause").click()
    finalize = page.get_by_role("button", name="Finalize")
    expect(finalize).to_be_visible(timeout=20_000)
    finalize.click()
    expect(page.locator("[data-lead]")).to_contain_text("done", timeout=20_000)
    expect(page.locator("[data-part=head]")).to_contain_text("a long count")
    expect(page.locator("[data-part=made]")).to_contain_text("rehearsal 2000")
    assert job["id"] not in page.url


def test_a_job_that_ran_out_of_time_says_what_to_do(
    open_page: OpenPage, system: System, shoot: Shoot
) -> None:
    job = system.submit(
        "rehearsal", name="too long", gpu=0, steps=2000, checkpoint_every=5, time_limit_seconds=2
    )
    system.wait(job["id"])
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator(".sentence")).to_contain_text("its limit is 2 s")
    said = page.locator("[data-part=said]")
    expect(said.get_by_role("button", name="Finalize")).to_be_visible()
    shoot(page, "job-timeout")
    said.get_by_role("button", name="Retry…").click()
    expect(page.get_by_role("dialog").get_by_label("From")).to_contain_text("its checkpoint")

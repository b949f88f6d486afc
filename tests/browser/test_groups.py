"""Sweeps, chains, templates and toasts in a browser: from the form to the page of a group."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.browser.conftest import until
from tests.system import System

OpenPage = Callable[..., Page]


def test_two_values_make_a_group_with_overlaid_curves(open_page: OpenPage, system: System) -> None:
    page = open_page("/new/rehearsal/")
    page.get_by_label("Steps", exact=True).fill("20, 30")
    page.get_by_label("Name of the job").fill("short ones")
    page.get_by_label("Steps", exact=True).blur()
    expect(page.locator("#place .sweep")).to_contain_text("This makes 2 jobs")
    page.get_by_role("button", name="Queue 2 jobs").click()
    page.wait_for_url(re.compile(r"/groups/[0-9a-f-]+/$"))
    expect(page.locator("[data-part=lead]")).to_contain_text("2 of 2 done")
    expect(page.locator("#overlaid canvas")).to_be_visible()
    expect(page.locator("#legend button")).to_have_text(["steps 20", "steps 30"])
    until(page, "document.querySelector('#overlaid .plot').chart.data.length === 3")
    page.locator("#legend button").first.click()
    until(page, "document.querySelector('#overlaid .plot').chart.data.length === 2")
    first = page.locator("[data-sorted] tbody tr").first
    expect(first).to_contain_text("steps 20")
    for _ in range(2):
        page.locator("[data-sort]", has_text="steps").click()
    expect(first).to_contain_text("steps 30")
    expect(page.locator("th[aria-sort=descending]")).to_have_text("steps")


def test_a_group_is_one_line_that_opens(open_page: OpenPage, system: System) -> None:
    page = open_page("/jobs/")
    group = system.submit("rehearsal", name="opened", steps=[3, 4, 5], seconds_per_step=0.2)
    line = page.locator(f"#group-{group['group_id']}")
    expect(line).to_contain_text("3 jobs")
    expect(page.locator(f"#job-{group['jobs'][0]['id']}")).to_have_count(0)
    line.get_by_role("button").click()
    expect(page.locator("#rows tr.member")).to_have_count(3)
    expect(line).to_contain_text("3 of 3 done")
    expect(page.locator("#rows tr.member .badge", has_text="succeeded")).to_have_count(3)
    line.get_by_role("button").click()
    expect(page.locator("#rows tr.member")).to_have_count(0)


def test_a_toast_tells_of_ones_own_jobs_and_goes(open_page: OpenPage, system: System) -> None:
    page = open_page("/artifacts/")
    expect(page.locator(".live")).to_have_attribute("data-state", "live")
    job = system.submit("rehearsal", name="told", steps=2, fail_at=1)
    toast = page.locator(".toast")
    expect(toast).to_have_text(re.compile("told failed: error"))
    expect(toast.get_by_role("link")).to_have_attribute("href", f"/jobs/{job['id']}/")
    expect(page.locator("[aria-live=polite]").filter(has=toast)).to_be_visible()
    expect(toast).to_have_count(0, timeout=12_000)
    tell(page, owner="somebody", name="not mine", status="failed")
    tell(page, owner="operator", name="mine", status="failed")
    expect(toast).to_have_text(re.compile("^mine failed"))
    for number in range(5):
        system.submit("rehearsal", name=f"many {number}", steps=1, seconds_per_step=0)
    expect(toast).to_have_count(3)
    expect(toast.last).to_contain_text("many")


def tell(page: Page, **job: str) -> None:
    """A frame as the socket would bring it."""
    frame = {"channel": "jobs", "event": "job:changed", "seq": 7, "data": {"id": job["name"], **job}}
    page.evaluate("frame => document.dispatchEvent(new CustomEvent('live:frame', {detail: frame}))", frame)


def test_the_next_job_is_set_up_from_the_form_of_the_first(open_page: OpenPage, system: System) -> None:
    page = open_page("/new/rehearsal/")
    page.get_by_label("Name of the job").fill("first link")
    page.get_by_role("button", name="then Rehearsal …").click()
    page.wait_for_url(re.compile(r"/new/rehearsal/\?source=job"))
    expect(page.get_by_label("Source")).to_have_value(re.compile("^job:"))
    page.get_by_role("button", name="Queue the job").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f-]+/$"))
    expect(page.locator("[data-part=links]")).to_contain_text("first link")


def test_a_template_is_kept_and_begun_with(open_page: OpenPage, system: System) -> None:
    page = open_page("/new/rehearsal/")
    page.get_by_label("Steps", exact=True).fill("7, 9")
    page.get_by_role("button", name="Save as template…").click()
    page.get_by_role("dialog").get_by_label("Name").fill("sevens")
    page.get_by_role("button", name="Keep as a template").click()
    expect(page.get_by_role("status").first).to_contain_text("Kept as the template 'sevens'")
    expect(page.get_by_label("Steps", exact=True)).to_have_value("7, 9")
    page.goto(f"{system.url}/new/rehearsal/")
    page.get_by_label("Begin with").select_option("sevens")
    expect(page.get_by_label("Steps", exact=True)).to_have_value("7, 9")
    page.get_by_role("button", name="Delete this template").click()
    expect(page.get_by_label("Begin with")).to_have_count(0)


def test_run_again_marks_what_was_changed(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="as it was", steps=4, gpu=1)
    page = open_page(f"/new/rehearsal/?again={job['id']}")
    expect(page.get_by_label("Name of the job")).to_have_value("as it was")
    expect(page.locator(f'input[name=gpu][value="{job["gpu_request"]}"]')).to_be_checked()
    field = page.locator(".field", has=page.get_by_label("Steps", exact=True))
    expect(field.get_by_text("was 4")).to_be_hidden()
    page.get_by_label("Steps", exact=True).fill("5")
    expect(field.get_by_text("was 4")).to_be_visible()

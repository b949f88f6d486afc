"""Lists, job pages and forms in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.system import System

OpenPage = Callable[..., Page]


def test_a_new_job_appears_on_top_and_changes_in_place(open_page: OpenPage, system: System) -> None:
    page = open_page("/jobs/")
    job = system.submit("rehearsal", name="comes in", steps=30, seconds_per_step=0.1)
    row = page.locator(f"#job-{job['id']}")
    expect(row).to_be_visible()
    expect(row.locator(".badge", has_text="running")).to_be_visible()
    expect(row.locator("progress")).to_be_visible()
    expect(row.locator(".badge", has_text="succeeded")).to_be_visible()


def test_filters_change_the_list_and_the_address(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="filtered", steps=1)
    system.wait(job["id"])
    page = open_page("/jobs/")
    expect(page.locator(f"#job-{job['id']}")).to_be_visible()
    page.get_by_label("State").select_option("failed")
    expect(page.locator(f"#job-{job['id']}")).to_have_count(0)
    expect(page).to_have_url(re.compile("status=failed"))
    page.reload()
    expect(page.get_by_label("State")).to_have_value("failed")


def test_a_job_page_follows_the_work(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="followed", steps=250, seconds_per_step=0.1, memory_mib=50, gpu=2)
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator("[data-lead]")).to_contain_text(
        re.compile(r"\d+ % · counting · \d+ of 250 steps .* left")
    )
    expect(page.locator("#curves .plot canvas").first).to_be_visible()
    expect(page.locator("#log")).to_contain_text("verified")
    first = page.locator("[data-lead]").inner_text()
    expect(page.locator("[data-lead]")).not_to_have_text(first)
    expect(page.locator("[data-part=lead] .chip").first).to_have_text("2")
    expect(page.locator("[data-part=head] .badge", has_text="succeeded")).to_be_visible(timeout=60_000)
    expect(page.locator("[data-part=made]")).to_contain_text("rehearsal 250")
    expect(page.locator("[data-part=result]")).to_contain_text("250")


def test_cancel_asks_first(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="too long", steps=500, seconds_per_step=0.1)
    system.wait(job["id"], "running")
    page = open_page(f"/jobs/{job['id']}/")
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its last checkpoint is kept")
    page.get_by_role("button", name="Let it go on").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("[data-part=head] .badge", has_text="cancelled")).to_be_visible()
    assert system.job(job["id"])["status"] == "cancelled"


def test_a_failed_job_is_retried_on_another_card(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="breaks", steps=5, fail_at=2, gpu=0)
    system.wait(job["id"], "failed")
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator(".sentence")).to_contain_text("told to fail at step 2")
    page.locator("[data-part=said]").get_by_role("button", name="Retry…").click()
    card = system.cards()[2]
    page.get_by_role("dialog").get_by_label("On").select_option(card["uuid"])
    page.get_by_role("button", name="Queue the retry").click()
    page.wait_for_url(lambda url: job["id"] not in url)
    again = system.job(re.search(r"/jobs/([0-9a-f-]+)/", page.url)[1])
    assert (again["retry_of"], again["gpu_request"]) == (job["id"], card["uuid"])
    expect(page.locator("[data-part=head]")).to_contain_text("retry of breaks")


def test_a_form_from_error_to_job(open_page: OpenPage, system: System) -> None:
    page = open_page("/new/")
    page.get_by_role("link", name="Rehearsal").click()
    page.get_by_label("Steps", exact=True).fill("-3")
    page.get_by_label("Name of the job").fill("typed by hand")
    page.get_by_role("button", name="Queue the job").click()
    field = page.locator(".field", has=page.get_by_label("Steps", exact=True))
    expect(field).to_contain_text("greater than or equal to 0")
    expect(page.get_by_label("Steps", exact=True)).to_have_value("-3")
    expect(page.get_by_label("Name of the job")).to_have_value("typed by hand")
    page.get_by_label("Steps", exact=True).fill("4")
    card = system.cards()[1]
    page.locator(f'input[name=gpu][value="{card["uuid"]}"]').check()
    page.get_by_role("button", name="Queue the job").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f-]+/$"))
    job = system.wait(re.search(r"/jobs/([0-9a-f-]+)/", page.url)[1])
    assert (job["name"], job["gpu_request"], job["gpu_uuid"]) == ("typed by hand", card["uuid"], card["uuid"])


def test_cards_say_at_once_what_no_longer_fits(open_page: OpenPage, system: System) -> None:
    page = open_page("/new/rehearsal/")
    small, big = system.cards()[0]["uuid"], system.cards()[2]["uuid"]
    expect(page.locator(f'input[name=gpu][value="{small}"]')).to_be_enabled()
    page.get_by_label("Estimate mib").fill(str(40 * 1024))
    page.get_by_label("Estimate mib").blur()
    expect(page.locator(f'input[name=gpu][value="{small}"]')).to_be_disabled()
    expect(page.locator(f'input[name=gpu][value="{big}"]')).to_be_enabled()
    expect(page.locator("label", has=page.locator(f'input[value="{small}"]'))).to_contain_text(
        "this card can give"
    )


def test_a_second_site_can_be_named(open_page: OpenPage) -> None:
    page = open_page("/new/activation_extraction/")
    page.get_by_label("Block", exact=True).fill("4")
    page.get_by_role("button", name="another site").click()
    expect(page.get_by_label("Block", exact=True)).to_have_count(2)


def test_sign_out_is_one_button(browser: object, open_page: OpenPage, system: System) -> None:
    from tests.browser.conftest import sign_in

    context = browser.new_context(storage_state=sign_in(browser, system))  # type: ignore[attr-defined]
    page = context.new_page()
    page.goto(system.url)
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(re.compile("/signin/"))
    page.goto(system.url + "/jobs/")
    expect(page).to_have_url(re.compile("/signin/"))
    context.close()

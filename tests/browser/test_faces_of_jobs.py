"""Every state of a job has a face: what its page says then, in words, and a picture of it. One laboratory for all:
three cards of a stand-in driver, a real training that has ended and one that runs, and jobs that came to every end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.browser.past import live_through
from tests.stubs.driver import StandIn, StandInCard
from tests.stubs.load import Load
from tests.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
OpenPage = Callable[..., Page]
CONTEXT_MIB = 620  # what CUDA takes for itself in the process of a job


@dataclass
class Laboratory:
    system: System
    driver: StandIn
    jobs: dict[str, str] = field(default_factory=dict)  # by what has become of them

    def submit(self, state: str, kind: str = "rehearsal", **body: Any) -> str:
        self.jobs[state] = self.system.submit(kind, **body)["id"]
        return self.jobs[state]

    def holds(self, card: int, pid: int, mib: int) -> None:
        self.driver.cards[card].processes = [("compute", pid, mib)]

    def run(self, state: str, card: int, mib: int, kind: str = "rehearsal", **body: Any) -> None:
        """Running, and listed by the driver on its card."""
        job = self.system.wait(self.submit(state, kind, gpu=card, **body), "running")
        self.holds(card, job["attempts"][-1]["work_pid"], CONTEXT_MIB + mib)


@pytest.fixture(scope="module")
def laboratory(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    large = StandInCard(name="NVIDIA H100 80GB HBM3", total=81559, power=(70_000, 700_000))
    cards = [StandInCard(), StandInCard(), large]
    for card, bus in zip(cards, ("01", "41", "81"), strict=True):
        card.bus = f"00000000:{bus}:00.0"
    driver = StandIn(tmp_path_factory.mktemp("standin"), driver_library, cards)
    stranger = subprocess.Popen(["sleep", "3600"])
    try:
        with (
            Load(driver, [0.93, 0.4, 0.0]),
            System(tmp_path_factory.mktemp("laboratory"), driver=driver, time_scale=0.2) as system,
        ):
            lab = Laboratory(system, driver)
            fill(lab, stranger.pid)
            yield lab
    finally:
        stranger.kill()
        stranger.wait()


def fill(lab: Laboratory, stranger: int) -> None:
    kinds = {kind["name"]: kind["example"] for kind in lab.system.get("job-kinds/")}
    for state, kind, name in (
        ("fetched", "model_download", "SmolLM2"),
        ("extracted", "activation_extraction", "block 4, residual stream"),
        ("trained", "sae_training", "block 4 topk 16"),
    ):
        job = lab.submit(state, kind, name=name, gpu=2, **kinds[kind])
        assert lab.system.wait(job, timeout=180)["status"] == "succeeded"
    lab.holds(1, stranger, 20 * 1024)
    lab.system.wait(
        lab.submit("failed", name="probe of block 9", gpu=2, steps=40, seconds_per_step=0, fail_at=23)
    )
    lab.system.wait(lab.submit("refused", name="wide readout", gpu=1, estimate_mib=8 * 1024), "refused")
    lab.submit("held", name="when the others are done", gpu="auto", hold=True, estimate_mib=3 * 1024)
    cancelled = lab.submit("cancelled", name="not this one", gpu=2, steps=9000)
    lab.system.wait(cancelled, "running")
    lab.system.call("POST", f"jobs/{cancelled}/cancel")
    lab.system.wait(cancelled)
    longer = kinds["sae_training"] | {"tokens": 3_000_000, "d_sae": 2048}
    lab.run("running", 0, 5200, "sae_training", name="block 4 topk 16, longer", **longer)
    lab.submit("waiting", name="its features", gpu=0, estimate_mib=6 * 1024)


@pytest.fixture(scope="module")
def system(laboratory: Laboratory) -> System:
    return laboratory.system


def test_the_monitor_with_three_cards(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    live_through(laboratory.system, 30, [0.93, 0.4, 0.0])
    page = open_page("/")
    busy = page.locator("[data-card]").first
    expect(busy.get_by_role("link", name="block 4 topk 16, longer")).to_be_visible()
    expect(busy).to_contain_text(re.compile(r"\d+ % · .* left"))
    expect(page.locator("[data-part=queue]")).to_contain_text("after block 4 topk 16, longer")
    expect(page.locator("[data-part=processes]")).to_contain_text("outside miStudio")
    expect(page.locator("[data-card]").nth(1)).to_contain_text("fits beside the 20.0 GiB of others")
    page.wait_for_timeout(5000)
    shoot(page, "monitor-cards")
    page.get_by_role("button", name="Aggregated").click()
    expect(page.locator("#aggregated [data-hottest]")).to_have_text(re.compile(r"card \d"))
    shoot(page, "monitor-aggregated")


def test_the_list(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page("/jobs/")
    for state in ("running", "held", "failed", "refused", "cancelled", "succeeded"):
        expect(page.locator("#rows .badge", has_text=state).first).to_be_visible()
    waiting = page.locator(f"#job-{laboratory.jobs['waiting']}")
    expect(waiting).to_contain_text("after block 4 topk 16, longer")
    shoot(page, "jobs")


def test_a_running_training(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['running']}/")
    expect(page.locator("[data-lead]")).to_contain_text(re.compile(r"\d+ % · .* left"))
    expect(page.locator("#curves canvas").nth(3)).to_be_visible()
    expect(page.locator("[data-part=lead]")).to_contain_text("heartbeat")
    shoot(page, "job-running")
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog")).to_contain_text("checkpoint")
    shoot(page, "job-cancel", whole=False)


def test_a_waiting_job(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['waiting']}/")
    expect(page.locator("[data-part=why]")).to_contain_text("Why")
    expect(page.locator(".verdicts tr", has_text="asked for")).to_contain_text(
        "after block 4 topk 16, longer"
    )
    shoot(page, "job-waiting")


def test_a_held_job(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['held']}/")
    expect(page.locator("[data-part=said]")).to_contain_text("until somebody releases it")
    expect(page.get_by_role("button", name="Release")).to_be_visible()
    shoot(page, "job-held")


def test_a_failed_job(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['failed']}/")
    expect(page.locator(".sentence")).to_contain_text("told to fail at step 23")
    shoot(page, "job-failed")
    page.locator("[data-part=said]").get_by_role("button", name="Retry…").click()
    expect(page.get_by_role("dialog").get_by_label("On")).to_be_visible()
    shoot(page, "job-retry", whole=False)


def test_a_refused_job(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['refused']}/")
    expect(page.locator(".sentence")).to_contain_text(
        re.compile(r"needs 8\.\d GiB beside a reserve of 0\.5 GiB")
    )
    expect(page.locator(".sentence")).to_contain_text("used outside miStudio by sleep")
    expect(page.locator("[data-part=said]")).to_contain_text("It would fit on card 0, 2")
    shoot(page, "job-refused")


def test_a_trained_sae(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{laboratory.jobs['trained']}/")
    expect(page.locator("[data-lead]")).to_contain_text("done in")
    expect(page.locator("[data-part=result]")).to_contain_text("FVU")
    expect(page.locator("#curves canvas").nth(3)).to_be_visible()
    expect(page.locator("[data-part=made]")).to_contain_text("topk")
    shoot(page, "job-trained")


def test_the_form(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page("/new/")
    expect(page.locator(".kinds a").nth(2)).to_be_visible()
    shoot(page, "form-kinds")
    page = open_page("/new/sae_training/")
    page.locator("[name=activations]").select_option(index=1)
    page.locator("[name=d_sae]").fill("0")
    page.get_by_role("button", name="Queue the job").click()
    expect(page.locator(".field .error").first).to_be_visible()
    picker = page.locator(".picker label")
    expect(picker.nth(1)).to_contain_text("after block 4 topk 16, longer")
    expect(picker.nth(3)).to_contain_text("now")
    shoot(page, "form-error")


def test_what_fits_never_is_said_at_the_card(
    open_page: OpenPage, laboratory: Laboratory, shoot: Shoot
) -> None:
    page = open_page("/new/rehearsal/")
    page.get_by_label("Estimate mib").fill(str(30 * 1024))
    page.get_by_label("Estimate mib").blur()
    picker = page.locator(".picker label")
    expect(picker.nth(1).locator("em")).to_have_class(re.compile("never"))
    expect(picker.nth(3)).to_contain_text("now")
    shoot(page, "form-fit")


def test_the_shelf(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page("/artifacts/")
    expect(page.locator("#rows tr")).to_have_count(3)
    shoot(page, "artifacts")
    page.locator("#rows tr", has_text="sae").get_by_role("link").first.click()
    expect(page.locator(".kv").first).to_contain_text("topk")
    shoot(page, "artifact")


def test_tokens(open_page: OpenPage, laboratory: Laboratory, shoot: Shoot) -> None:
    page = open_page("/tokens/")
    page.get_by_label("Name").fill("notebook")
    page.get_by_role("button", name="Make the token").click()
    expect(page.get_by_role("status")).to_contain_text("shown this once")
    shoot(page, "tokens")

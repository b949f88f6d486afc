"""The page of a job that trains several SAEs: their curves share charts, their numbers a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.chaos.test_training import sources
from tests.system import System

pytestmark = pytest.mark.slow
OpenPage = Callable[..., Page]
VARIANTS = [
    {"k": 4},
    {"architecture": "jumprelu", "l0": 0.5, "name": "jump"},
    {"k": 2, "seed": 3, "d_sae": 64},
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    root = sources(tmp_path_factory.mktemp("import"))
    (root / "one.txt").write_text("a single document " * 40)
    with System(
        tmp_path_factory.mktemp("together"), time_scale=0.2, MISTUDIO_IMPORT_ROOTS=str(root)
    ) as running:
        done = running.wait(running.submit("model_download", source=str(root / "LL"))["id"])
        assert done["status"] == "succeeded", done["error"]
        yield running


def asked(system: System, text: str = "text.txt", **more: object) -> str:
    root = system.env["MISTUDIO_IMPORT_ROOTS"]
    body = {"model": "ll", "corpus": f"{root}/{text}", "site": {"block": 1}, "context_size": 16, "d_sae": 128}
    body |= {"tokens": 64_000, "batch_size": 128, "lr": 3e-3, "target_l0": 4, "variants": VARIANTS}
    return system.submit("sae_training", gpu=1, **(body | more))["id"]


def test_curves_share_charts_and_numbers_a_table(system: System, open_page: OpenPage, shoot: Shoot) -> None:
    job = system.wait(asked(system, name="three on block 1"), timeout=240)
    assert job["status"] == "succeeded", job["error"]
    page = open_page(f"/jobs/{job['id']}/")
    charts = page.locator("#curves figure")
    expect(charts).to_have_count(6)  # loss, FVU, L0, dead, speed, rate: not one for each SAE
    expect(charts.first.locator(".legend")).to_contain_text("jump")
    table = page.locator("section[aria-label=SAEs]")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table).to_contain_text("CE recovered")
    expect(page.locator("[data-figure] .legend")).to_contain_text("jump")
    page.wait_for_timeout(1000)
    shoot(page, "saes-together")


def test_a_training_that_was_refused_says_why(system: System, open_page: OpenPage, shoot: Shoot) -> None:
    job = system.wait(asked(system, "one.txt", name="one document"), timeout=120)
    assert (job["status"], job["failure_reason"]) == ("refused", "rejected")
    page = open_page(f"/jobs/{job['id']}/")
    expect(page.locator("[data-part=said]")).to_contain_text("too little text")
    shoot(page, "saes-refused")

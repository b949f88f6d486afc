"""The pages of artifacts in a browser: upload, share, rename, delete, find."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect
from safetensors.numpy import save_file

from tests.browser.camera import Shoot
from tests.system import System

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def sae_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sae")
    metadata = {"hook_name": "blocks.4.hook_resid_post", "model_name": "gpt2"}
    config = {"architecture": "topk", "d_in": 8, "d_sae": 32, "k": 4, "metadata": metadata}
    (folder / "cfg.json").write_text(json.dumps(config))
    shapes = {"W_enc": (8, 32), "b_enc": (32,), "W_dec": (32, 8), "b_dec": (8,)}
    weights = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    save_file(weights, folder / "sae_weights.safetensors")
    return [folder / "cfg.json", folder / "sae_weights.safetensors"]


def upload(page: Page, type: str, name: str, files: list[Path]) -> None:
    page.get_by_text("Upload a corpus or an SAE…").click()
    send(page, type, name, files)


def send(page: Page, type: str, name: str, files: list[Path]) -> None:
    page.locator("#u-type").select_option(type)
    page.locator("#u-name").fill(name)
    page.locator("#u-file").set_input_files(files)
    page.get_by_role("button", name="Upload").click()


def artifact_of(page: Page) -> str:
    return re.search(r"/artifacts/([0-9a-f-]+)/", page.url)[1]


def test_an_sae_is_uploaded_shared_renamed_and_deleted(
    open_page: OpenPage, system: System, sae_files: list[Path]
) -> None:
    page = open_page("/")
    page.get_by_role("link", name="Artifacts").click()
    upload(page, "sae", "brought-along", sae_files)
    page.wait_for_url(re.compile(r"/artifacts/[0-9a-f-]+/$"))
    made = artifact_of(page)
    expect(page.locator(".kv").first).to_contain_text("blocks.4.hook_resid_post")
    expect(page.locator("#open")).to_contain_text(f'artifacts/sae/{made}")')
    page.get_by_role("switch").click()
    expect(page.get_by_role("switch")).to_be_checked()
    assert system.get(f"artifacts/{made}/")["shared"] is True
    page.get_by_role("button", name="Rename…").click()
    page.get_by_role("dialog").get_by_label("Name").fill("called-anew")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", name="called-anew", exact=True)).to_be_visible()
    page.get_by_role("button", name="Delete…").click()
    expect(page.get_by_role("dialog")).to_contain_text("removed from the disk at once")
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("status")).to_contain_text("called-anew is deleted.")
    assert system.call("GET", f"artifacts/{made}/")[0] == 404


def test_a_refused_upload_says_why_at_the_field(open_page: OpenPage, tmp_path: Path, shoot: Shoot) -> None:
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    bad.write_bytes("café".encode("latin-1"))
    good.write_text("First.\n\nSecond.\n")
    page = open_page("/artifacts/")
    upload(page, "corpus", "words", [bad])
    field = page.locator(".field", has=page.locator("#u-file"))
    expect(field).to_contain_text("The file is not UTF-8 text.")
    expect(page.locator("#u-name")).to_have_value("words")
    shoot(page, "upload-refused")
    send(page, "corpus", "words", [good])
    expect(page.get_by_role("heading", name="words", exact=True)).to_be_visible()
    expect(page.locator(".kv").first).to_contain_text("documents")
    with page.expect_download() as download:
        page.get_by_role("link", name="corpus.txt").click()
    assert Path(download.value.path()).read_text() == "First.\n\nSecond.\n"


def test_the_list_is_searched_as_one_types(open_page: OpenPage, system: System) -> None:
    job = system.submit("rehearsal", name="maker of things", steps=7)
    system.wait(job["id"])
    page = open_page("/artifacts/")
    row = page.locator("tr", has_text="rehearsal 7")
    expect(row.get_by_role("link", name="maker of things")).to_be_visible()
    page.get_by_label("Name contains").press_sequentially("no such thing")
    expect(page.get_by_text("No artifact is like that.")).to_be_visible()
    expect(page).to_have_url(re.compile("q=no"))
    page.get_by_label("Name contains").fill("")
    page.get_by_label("Name contains").press_sequentially("rehearsal 7")
    page.get_by_label("Type").first.select_option("capture")
    expect(row).to_be_visible()
    row.get_by_role("link", name="rehearsal 7").click()
    expect(page.get_by_role("link", name="steps.txt")).to_be_visible()
    page.get_by_role("link", name="maker of things").click()
    page.locator("[data-part=made]").get_by_role("link", name="rehearsal 7").click()
    expect(page.get_by_role("heading", name="rehearsal 7", exact=True)).to_be_visible()


def test_a_long_name_fits_everywhere(
    open_page: OpenPage, system: System, sae_files: list[Path], shoot: Shoot
) -> None:
    name = "an-sae-with-a-name-that-is-much-longer-than-most-of-the-names-that-people-give"
    page = open_page("/artifacts/")
    page.get_by_text("Upload a corpus or an SAE…").click()
    shoot(page, "upload")
    send(page, "sae", name, sae_files)
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    page.get_by_text("How it was made").click()
    shoot(page, "artifact-long")
    page.get_by_role("button", name="Delete…").click()
    shoot(page, "artifact-delete", whole=False)
    page.goto(f"{system.url}/artifacts/")
    expect(page.get_by_role("link", name=name)).to_be_visible()
    shoot(page, "artifacts-long")

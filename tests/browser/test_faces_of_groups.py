"""Pictures of sweeps, chains and the morning after: real trainings of one small model, and a chain that breaks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.camera import Shoot
from tests.system import ROOT, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OpenPage = Callable[..., Page]
#: Runs in a process of the system's own environment: everybody was here last nine hours ago.
GO_HOME = """
import django
django.setup()
from datetime import timedelta
from django.utils import timezone
from gpus.models import Gpu, GpuEvent
from monitor.models import Visit
Visit.objects.update(seen_at=timezone.now() - timedelta(hours=9))
card = Gpu.objects.select_related("host").order_by("index").last()
at = timezone.now() - timedelta(hours=3)
GpuEvent.objects.create(host=card.host, uuid=card.uuid, event="lost", detail="GPU is lost", at=at)
"""


@dataclass
class Night:
    system: System
    group: dict[str, Any]
    chain: dict[str, str]


def go_home(system: System) -> None:
    env = system.env | {"DJANGO_SETTINGS_MODULE": "mistudio.settings"}
    subprocess.run([sys.executable, "-c", GO_HOME], cwd=ROOT, env=env, check=True)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("night"), time_scale=0.2) as system:
        yield system


@pytest.fixture(scope="module")
def night(system: System) -> Night:
    kinds = {kind["name"]: kind["example"] for kind in system.get("job-kinds/")}
    for kind in ("model_download", "activation_extraction"):
        job = system.submit(kind, gpu=2, **kinds[kind])
        assert system.wait(job["id"], timeout=180)["status"] == "succeeded"
    sweep = kinds["sae_training"] | {"k": [8, 16, 32], "lr": [0.002, 0.0005], "tokens": 30_000}
    chain = {"broken": system.submit("rehearsal", name="layer 9 features", steps=9, fail_at=2)["id"]}
    chain["held"] = system.submit("rehearsal", name="its labels", source=f"job:{chain['broken']}")["id"]
    chain["later"] = system.submit("rehearsal", name="report", after=[chain["held"]])["id"]
    system.wait(chain["held"], "held", timeout=120)
    group = system.submit("sae_training", name="block 4, small", **sweep)
    for job in group["jobs"]:
        system.wait(job["id"], timeout=240)
    return Night(system, group, chain)


def test_a_group_of_trainings(open_page: OpenPage, night: Night, shoot: Shoot) -> None:
    page = open_page(f"/groups/{night.group['group_id']}/")
    expect(page.locator("#legend button")).to_have_count(6)
    expect(page.locator(".star").first).to_be_visible()
    page.get_by_label("Metric").select_option("fvu")
    page.wait_for_timeout(2500)
    page.locator("#overlaid .plot").hover()
    shoot(page, "group")
    page.get_by_label("Metric").select_option("loss")
    page.wait_for_timeout(2500)
    shoot(page, "group-loss", whole=False)


def test_the_list_after_a_night(open_page: OpenPage, night: Night, shoot: Shoot) -> None:
    open_page("/")
    go_home(night.system)
    page = open_page("/jobs/")
    told = page.get_by_label("Since you left")
    expect(told).to_contain_text("9 h 0 min ago")
    expect(told).to_contain_text("8 succeeded")
    expect(told.locator("li", has_text="1 failed")).to_contain_text("told to fail at step 2")
    expect(told.locator("li", has_text="1 held")).to_contain_text("which ended failed")
    expect(told).to_contain_text("it is back")
    page.locator("#rows tr.group button").first.click()
    expect(page.locator("#rows tr.member")).to_have_count(6)
    shoot(page, "since")
    told.get_by_role("button").click()
    expect(page.get_by_label("Since you left")).to_have_count(0)


def test_a_chain_that_broke(open_page: OpenPage, night: Night, shoot: Shoot) -> None:
    page = open_page(f"/jobs/{night.chain['held']}/")
    expect(page.locator(".sentence")).to_contain_text("which ended failed")
    expect(page.locator("[data-part=said]")).to_contain_text("Retry that job")
    expect(page.locator("[data-part=links]")).to_contain_text("report")
    shoot(page, "job-held-by-a-link")


def test_a_form_with_several_values(open_page: OpenPage, night: Night, shoot: Shoot) -> None:
    page = open_page(f"/new/sae_training/?again={night.group['jobs'][0]['id']}")
    expect(page.locator("[name=activations]")).not_to_have_value("")
    page.locator("[name=k]").fill("8, 16, 32")
    page.locator("[name=lr]").fill("0.002, 5e-4")
    page.locator("[name=lr]").blur()
    expect(page.locator("#place .sweep")).to_contain_text("This makes 6 jobs")
    expect(page.locator(".field.changed")).to_have_count(2)
    shoot(page, "form-sweep")
    page.locator("[name=k]").fill(", ".join(str(n) for n in range(1, 120)))
    page.locator("[name=k]").blur()
    expect(page.locator("#place .notice")).to_contain_text("a group has at most 200")
    shoot(page, "form-sweep-too-many", whole=False)


def test_toasts(open_page: OpenPage, night: Night, shoot: Shoot) -> None:
    page = open_page("/artifacts/")
    expect(page.locator(".live")).to_have_attribute("data-state", "live")
    good = night.system.submit("rehearsal", name="a good one", steps=1)
    bad = night.system.submit("rehearsal", name="a bad one", steps=2, fail_at=1)
    for job in (good, bad):
        expect(page.locator(".toast", has=page.locator(f"[href='/jobs/{job['id']}/']"))).to_be_visible()
        page.locator(".toast").last.hover()
    assert re.search("failed: error|succeeded", page.locator(".toasts").inner_text())
    shoot(page, "toasts", whole=False)

"""Every kind's example, in the order of the stages, on a fresh data folder: a real language model and a real SAE."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.system import System

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the first home: the second need not fetch and convert the model again."""
    return tmp_path_factory.mktemp("fetched")


def run_examples(system: System, gpu: int) -> dict[str, dict[str, Any]]:
    done = {}
    for kind in system.get("job-kinds/"):
        if kind["name"] == "rehearsal":
            continue
        job = system.submit(kind["name"], gpu=gpu, **kind["example"])
        done[kind["name"]] = system.wait(job["id"], timeout=120)
        assert done[kind["name"]]["status"] == "succeeded", done[kind["name"]]["error"]
    return done


def check_cards(system: System, done: dict[str, dict[str, Any]], gpu: int) -> None:
    """Where a card is needed: asked for, granted and seen by the work are one. Where none is: no card at all."""
    uuid = system.cards()[gpu]["uuid"]
    for name, job in done.items():
        assert job["gpu_request"] == uuid
        _, fit = system.call("POST", "system/gpu-fit", {"kind": name, "params": job["params"]})
        reported = system.get(f"jobs/{job['id']}/attempts/")[-1]["reported_gpu_uuids"]
        if not fit["needs_card"]:
            assert (job["gpu_uuid"], reported) == (None, None)
        else:
            assert (job["gpu_uuid"], reported) == (uuid, [uuid])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, fetched: Path) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("three"), time_scale=0.2) as system:
        yield system


@pytest.fixture(scope="module")
def ended(three: System, fetched: Path) -> dict[str, dict[str, Any]]:
    done = run_examples(three, 1)
    shutil.copytree(three.home / "cache", fetched / "cache")
    return done


def test_it_runs_every_example_on_the_second_of_three_cards(three: System, ended: dict[str, Any]) -> None:
    check_cards(three, ended, 1)


def test_the_log_tells_what_ran_where_and_how_it_ended(three: System, ended: dict[str, Any]) -> None:
    card = three.cards()[1]
    for name, job in ended.items():
        log = three.get(f"jobs/{job['id']}/log")["text"]
        assert f"{name}, attempt 1, on {card['name'] if job['gpu_uuid'] else 'no card'}" in log
        for part in ("parameters {", "torch 2.", "done in "):
            assert part in log, (name, log)
        assert job["progress"]["fraction"] == 1
        assert job["progress"]["eta_seconds"] is None
    training = three.get(f"jobs/{ended['sae_training']['id']}/log")["text"]
    assert re.search(r"train: \d+ of \d+ steps .*; loss [\d.]+", training), training
    assert "checkpoint after step" in training
    assert re.search(r"done in [\d.]+ s; .*fvu 0\.\d+", training)


def test_it_estimates_no_less_than_it_takes(three: System, ended: dict[str, Any]) -> None:
    for name, ended_job in ended.items():
        job = three.job(ended_job["id"])  # the keeper writes the peak after the end
        assert job["estimate"]["memory_bytes"] >= job["peak_memory_bytes"], name


def test_it_leaves_an_sae_in_the_layout_of_saelens(three: System, ended: dict[str, Any]) -> None:
    [made] = ended["sae_training"]["artifacts"]
    folder = three.home / "artifacts" / "sae" / made["id"]
    assert {"cfg.json", "sae_weights.safetensors", "manifest.json"} <= {p.name for p in folder.iterdir()}
    with safe_open(folder / "sae_weights.safetensors", "np") as weights:
        assert set(weights.keys()) == {"W_enc", "W_dec", "b_enc", "b_dec"}
    result = ended["sae_training"]["result"]
    assert result["l0"] <= 16
    assert 0 < result["fvu"] < 0.6
    assert result["ce_recovered"] > 0.5


def test_it_says_how_each_result_was_made_without_paths_or_secrets(
    three: System, ended: dict[str, Any]
) -> None:
    manifests = list((three.home / "artifacts").glob("*/*/manifest.json"))
    assert len(manifests) == 3
    for path in manifests:
        text = path.read_text()
        assert str(three.home) not in text
        assert three.token not in text


def test_it_goes_on_with_the_training_of_a_killed_work(three: System, ended: dict[str, Any]) -> None:
    """A real training, killed: from its checkpoint it comes to the same result, bit for bit."""
    import os
    import signal
    import time

    example = next(k for k in three.get("job-kinds/") if k["name"] == "sae_training")["example"]
    job = three.submit("sae_training", gpu=1, **example)
    deadline = time.monotonic() + 60
    while not list((three.home / "jobs" / job["id"] / "checkpoints").glob("[!.]*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(three.get(f"jobs/{job['id']}/attempts/")[-1]["work_pid"], signal.SIGKILL)
    done = three.wait(job["id"], timeout=90)
    assert [a["outcome"] for a in done["attempts"]] == ["lost", "ended"]
    same = ("fvu", "l0", "loss", "ce_recovered")
    assert {k: done["result"][k] for k in same} == {k: ended["sae_training"]["result"][k] for k in same}


@pytest.mark.slow
def test_it_runs_every_example_on_the_only_card(tmp_path: Path, ended: dict[str, Any], fetched: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(fetched, home)
    with System(home, cards="24GiB", time_scale=0.2) as system:
        check_cards(system, run_examples(system, 0), 0)

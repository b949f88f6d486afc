"""Downloads as users meet them: a whole miStudio, a hub of our own, cut lines, killed works, pauses and tokens."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.interp import models
from tests.hub_server import SIGNATURE, Hub, Repository, Sent, sha256
from tests.interp.conftest import language_model
from tests.system import System

pytestmark = pytest.mark.slow
MB = 10**6
TOKEN = "hf_theSecretOfTheOwner"
#: Bytes that a killed process had in its sockets and not yet in its file.
ON_THE_WAY = 16 * MB


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


@pytest.fixture(scope="module")
def rig(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    home = tmp_path_factory.mktemp("fetching")
    network = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home / "hf")}
    with System(home / "home", time_scale=1.0, **network, HF_TOKEN="hf_ofTheHost") as running:
        yield running


def publish(hub: Hub, folder: Path, name: str, size: int = 0, **how: Any) -> Repository:
    """The tiny model under this name; with `size`, beside it so many bytes of a tensor that nothing loads."""
    tiny = language_model("LL")
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    if size:
        write_tensor(folder / "model.safetensors", size)
    commit = f"{len(hub.repositories):x}" * 40
    repository = Repository(name, {path.name: path for path in folder.iterdir()}, commit=commit, **how)
    hub.repositories.append(repository)
    hub.sent.clear()
    return repository


def write_tensor(path: Path, size: int) -> None:
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    draw = random.Random(size)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, size, MB):
            file.write(draw.randbytes(min(MB, size - begin)))


def weights(hub: Hub) -> list[Sent]:
    return [sent for sent in hub.sent if sent.name == "model.safetensors"]


def wait_until(holds: Callable[[], Any], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fetched(rig: System, job: dict[str, Any]) -> Path:
    done = rig.wait(job["id"], timeout=120)
    assert done["status"] == "succeeded", (done["error"], rig.get(f"jobs/{job['id']}/log/"))
    return rig.home / "artifacts" / "model" / done["artifacts"][0]["id"]


def test_half_a_gigabyte_survives_four_cuts_and_a_kill(rig: System, hub: Hub, tmp_path: Path) -> None:
    """No byte that had arrived is asked for again: each request begins where the file ended."""
    repository = publish(hub, tmp_path, "owner/Big", 500 * MB)
    source = repository.files["model.safetensors"]
    hub.cuts, hub.bytes_per_second = [1, 40 * MB, 77_777_777, 10**12, 130 * MB], 200 * MB
    job = rig.submit("model_download", source="owner/Big")
    wait_until(lambda: hub.served("model.safetensors") > 250 * MB)
    work = rig.get(f"jobs/{job['id']}/attempts/")[-1]["work_pid"]
    os.kill(work, signal.SIGKILL)
    [partial] = rig.home.parent.glob("hf/hub/*/blobs/*.incomplete")
    wait_until(lambda: not Path(f"/proc/{work}").exists())
    arrived = partial.stat().st_size
    artifact = fetched(rig, job)
    assert (artifact / "model.safetensors").read_bytes() == source.read_bytes()
    requests = weights(hub)
    assert len(requests) == 6
    killed = next(n for n, sent in enumerate(requests) if sent.start == arrived)
    for number, (before, after) in enumerate(itertools.pairwise(requests), 1):
        assert number == killed or after.start == before.start + before.count
    assert 0 <= requests[killed - 1].start + requests[killed - 1].count - arrived < ON_THE_WAY
    ratio = hub.served("model.safetensors") / source.stat().st_size
    print(f"served {ratio:.4f} times its size in {len(requests)} requests")
    assert rig.job(job["id"])["attempt"] == 2 and ratio < 1 + ON_THE_WAY / (500 * MB)


def test_a_gated_model_is_fetched_with_its_owners_token_which_is_nowhere_else(
    rig: System, hub: Hub, tmp_path: Path
) -> None:
    hub.bytes_per_second = float("inf")
    repository = publish(hub, tmp_path, "owner/Gated", gated={TOKEN})
    refused = rig.wait(rig.submit("model_download", source="owner/Gated")["id"])
    assert (refused["status"], "is gated: open" in refused["error"]) == ("refused", True)
    assert rig.call("PUT", "hub-token/", {"token": TOKEN})[0] == 200
    hub.held = hub_held = threading.Event()
    job = rig.submit("model_download", source="owner/Gated")
    wait_until(lambda: weights(hub))
    told = [
        Path(f"/proc/{pid}/{name}").read_bytes() for pid, _ in rig.ours() for name in ("environ", "cmdline")
    ]
    hub_held.set()
    hub.held = None
    artifact = fetched(rig, job)
    tokens = torch.tensor([[1, 5, 9, 12, 7]])
    assert torch.equal(models.load(artifact).model(tokens).logits, language_model("LL").model(tokens).logits)
    assert json.loads((artifact / "manifest.json").read_text())["revision"] == repository.commit
    assert told and not [text for text in told if TOKEN.encode() in text]
    assert holders(rig.home.parent, TOKEN) == [] and holders(rig.home.parent, SIGNATURE) == []
    assert not [authorization for _, _, authorization in hub.asked if authorization == "Bearer hf_ofTheHost"]
    assert rig.call("DELETE", "hub-token/")[0] == 204


def holders(folder: Path, secret: str) -> list[Path]:
    """Files of ours that hold the secret: database, logs, parameters, manifests, the cache."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 100 * MB]
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_a_pause_is_heard_while_the_hub_is_silent_and_nothing_is_lost(
    rig: System, hub: Hub, tmp_path: Path
) -> None:
    publish(hub, tmp_path, "owner/Slow", 30 * MB)
    hub.held = held = threading.Event()
    job = rig.submit("model_download", source="owner/Slow")
    wait_until(lambda: hub.served("model.safetensors") >= 15 * MB)
    time.sleep(0.3)
    began = time.monotonic()
    assert rig.call("POST", f"jobs/{job['id']}/pause/")[0] == 202
    rig.wait(job["id"], "paused")
    took = time.monotonic() - began
    held.set()
    hub.held = None
    before = hub.served("model.safetensors")
    progress = rig.job(job["id"])["progress"]
    assert rig.call("POST", f"jobs/{job['id']}/resume/")[0] == 202
    artifact = fetched(rig, job)
    print(f"paused in {took:.2f} s at {progress['done']} bytes")
    assert took < 2.0
    assert weights(hub)[-1].start >= 15 * MB and weights(hub)[-1].start <= before
    source = hub.repositories[-1].files["model.safetensors"]
    assert (artifact / "model.safetensors").read_bytes() == source.read_bytes()


def test_two_jobs_at_once_fetch_a_repository_once(rig: System, hub: Hub, tmp_path: Path) -> None:
    repository = publish(hub, tmp_path, "owner/Both", 40 * MB)
    hub.bytes_per_second = 20 * MB
    jobs = [rig.submit("model_download", source="owner/Both") for _ in range(2)]
    folders = [fetched(rig, job) for job in jobs]
    source = repository.files["model.safetensors"]
    assert folders[0] != folders[1]
    assert [(folder / "model.safetensors").read_bytes() == source.read_bytes() for folder in folders] == [
        True
    ] * 2
    assert hub.served("model.safetensors") == source.stat().st_size
    [blob] = rig.home.parent.glob(f"hf/hub/models--owner--Both/blobs/{sha256(source)}")
    assert blob.stat().st_nlink == 3

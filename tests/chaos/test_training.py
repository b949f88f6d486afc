"""A real training, killed and paused at random moments, gives the same SAE to the last bit; and survives upgrades."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.test_kills import attempt_of, wait_until
from tests.interp.conftest import LETTERS, language_model
from tests.system import FINAL, ROOT, System

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
TRAINING = {"d_sae": 256, "k": 8, "batch_size": 256, "lr": 2e-3, "ce_tokens": 500, "checkpoint_every": 100}
STEPS = 9000


def sources(folder: Path) -> Path:
    """A tiny random model and a text of pseudo-words."""
    lm = language_model("LL")
    lm.model.save_pretrained(folder / "LL")
    lm.tokenizer.save_pretrained(folder / "LL")
    letters = torch.randint(0, len(LETTERS), (200, 60), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text("\n\n".join("x" + "".join(LETTERS[i] for i in row) for row in letters))
    return folder


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    root = sources(tmp_path_factory.mktemp("import"))
    home = tmp_path_factory.mktemp("training")
    with System(home, time_scale=0.1, MISTUDIO_IMPORT_ROOTS=str(root)) as running:
        for kind, body in {
            "model_download": {"source": str(root / "LL")},
            "activation_extraction": {
                "model": "ll", "corpus": str(root / "text.txt"), "sites": [{"block": 1}], "context_size": 16,
                "max_tokens": 8000, "dtype": "float32",
            },
        }.items():  # fmt: skip
            done = running.wait(running.submit(kind, **body)["id"])
            assert done["status"] == "succeeded", done["error"]
        yield running


def train(rig: System, **fields: Any) -> str:
    body = TRAINING | {"activations": "ll-text-b1", "tokens": STEPS * TRAINING["batch_size"]} | fields
    return rig.submit("sae_training", gpu=1, **body)["id"]


def weights(rig: System, job_id: str) -> str:
    """SHA-256 of the exported weights."""
    done = rig.wait(job_id, timeout=120)
    assert done["status"] == "succeeded", done["error"]
    [made] = done["artifacts"]
    file = rig.home / "artifacts" / "sae" / made["id"] / "sae_weights.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def newest(rig: System, job_id: str) -> str:
    folder = rig.home / "jobs" / job_id / "checkpoints"
    return max((p.name for p in folder.glob("step_*")), default="")


def interrupted(rig: System, job_id: str, draw: random.Random) -> str:
    """Kill the work or its keeper, or pause and resume, some moment after it has come further; what was done."""
    wait_until(lambda: rig.job(job_id)["status"] in ("running", *FINAL), "never ran again", timeout=60)
    row, before = rig.job(job_id), newest(rig, job_id)
    assert row["status"] == "running", f"it ended {row['status']} too soon: {row['error']}"
    wait_until(lambda: newest(rig, job_id) > before, "came no further", timeout=30)
    time.sleep(draw.random() * 0.3)
    act = draw.choice(("work", "work", "keeper", "pause"))
    if act == "pause":
        assert rig.call("POST", f"jobs/{job_id}/pause/")[0] == 202
        rig.wait(job_id, "paused", timeout=60)
        assert rig.call("POST", f"jobs/{job_id}/resume/")[0] == 202
    else:
        attempt = attempt_of(rig, job_id)
        os.kill(attempt[f"{act}_pid"], signal.SIGKILL)
        wait_until(lambda: rig.job(job_id)["attempt"] > row["attempt"], "not started again", timeout=60)
    return act


def test_twenty_interruptions_change_no_bit_of_the_sae(rig: System) -> None:
    seed = int(os.environ.get("SEED", time.time()))
    print(f"seed {seed}")
    draw = random.Random(seed)
    straight = train(rig)
    expected, began = weights(rig, straight), time.monotonic()
    job_id = train(rig)
    acts = [interrupted(rig, job_id, draw) for _ in range(20)]
    found = weights(rig, job_id)
    print(f"{acts}: {time.monotonic() - began:.0f} s")
    one, other = (rig.job(i) for i in (straight, job_id))
    assert found == expected
    assert one["result"] | {"artifact": None} == other["result"] | {"artifact": None}
    assert other["attempt"] == 21
    assert {a["outcome"] for a in other["attempts"]} == {"ended", "lost"}


def test_a_training_that_was_cancelled_is_finalized(rig: System) -> None:
    job_id = train(rig)
    wait_until(lambda: bool(newest(rig, job_id)), "no checkpoint", timeout=60)
    rig.call("POST", f"jobs/{job_id}/cancel/")
    rig.wait(job_id)
    status, made = rig.call("POST", f"jobs/{job_id}/finalize/")
    assert status == 202, made
    done = rig.wait(made["id"])
    assert (done["status"], done["gpu_uuid"]) == ("succeeded", None), done["error"]
    result = done["result"]
    assert 0 < result["ended_at_step"] < result["steps_total"] == STEPS
    assert result["ended_at_step"] == int(newest(rig, job_id).removeprefix("step_"))
    assert result["ce_recovered"] is not None
    [artifact] = done["artifacts"]
    assert (rig.home / "artifacts" / "sae" / artifact["id"] / "cfg.json").exists()


def test_a_running_job_outlives_every_service_and_an_upgrade(rig: System) -> None:
    """The worker stopped in order, killed, and all of miStudio stopped, migrated and started: one work, one end."""
    job = rig.submit("rehearsal", gpu=0, steps=700)
    rig.wait(job["id"], "running")
    work = attempt_of(rig, job["id"])["work_pid"]

    def same() -> bool:
        return rig.job(job["id"])["status"] == "running" and attempt_of(rig, job["id"])["work_pid"] == work

    for number in (signal.SIGTERM, signal.SIGKILL):
        before = rig.kill("worker", number)
        wait_until(lambda before=before: rig.pid("worker") != before, "no new worker", timeout=60)
        assert same()
    rig.stop()
    assert Path(f"/proc/{work}").exists()
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=ROOT, env=rig.env, check=True)
    rig.start()
    assert same()
    done = rig.wait(job["id"])
    assert (done["status"], done["attempt"], len(done["artifacts"])) == ("succeeded", 1, 1)
    assert rig.wait(rig.submit("rehearsal", steps=1)["id"])["status"] == "succeeded"

"""A kind for the engine's tests: real processes, real memory, real checkpoints, no mathematics.

It writes a journal that the system under test cannot fake: one line per start, step and end, fsynced.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rest_framework import serializers

from jobs.exceptions import JobRejected, JobStopped
from jobs.fields import ArtifactField
from jobs.kind import Context, Estimate, Input, JobKind, Values


class Kind(JobKind):
    label = "Rehearsal"
    stage = "steering"
    description = "Counts steps on a card."
    needs_gpu = "by_params"
    makes = ("capture",)
    sweep = ("steps", "seconds_per_step", "estimate_mib")
    example = {"steps": 2, "seconds_per_step": 0.05}

    class Params(serializers.Serializer):
        steps = serializers.IntegerField(min_value=0, max_value=100_000, default=3)
        seconds_per_step = serializers.FloatField(min_value=0, max_value=60, default=0.05)
        memory_mib = serializers.IntegerField(min_value=0, max_value=100_000, default=0)
        card_mib = serializers.IntegerField(min_value=0, default=0)  # on a real card, by CUDA
        estimate_mib = serializers.IntegerField(min_value=0, max_value=10_000_000, default=1)
        checkpoint_every = serializers.IntegerField(min_value=0, default=0)
        on_card = serializers.BooleanField(default=True)
        fail_at = serializers.IntegerField(default=-1)
        reject = serializers.BooleanField(default=False)
        children = serializers.IntegerField(default=0, max_value=5)
        journal = serializers.CharField(required=False)
        source = ArtifactField("capture", required=False)  # not read: to be a link of a chain
        deaf = serializers.BooleanField(default=False)
        hand_over_at = serializers.IntegerField(min_value=0, default=0)  # steps without a card before it
        card_stage_mib = serializers.IntegerField(
            min_value=0, default=1
        )  # the estimate of the stage on the card
        sleep_at = serializers.IntegerField(default=-1)
        sleep_seconds = serializers.FloatField(default=0)

    def needs_card(self, params: Values) -> bool:
        return bool(params.get("on_card", True)) and not params.get("hand_over_at")

    def card_stages(self, params: Values) -> tuple[str, ...]:
        return ("card",) if params.get("hand_over_at") else ()

    def estimate_stage(self, stage: str, params: Values, inputs: Mapping[str, Input]) -> Estimate:
        return Estimate.of({"on the card": params.get("card_stage_mib", 1) * 2**20})

    def estimate(self, params: Values, inputs: Mapping[str, Input]) -> Estimate:
        return Estimate.of({"buffers": params.get("estimate_mib", 1) * 2**20})

    def run(self, context: Context, params: Values) -> dict[str, Any]:
        if params["reject"]:
            raise JobRejected("The rehearsal was told to say no.")
        first = newest_step(context.checkpoints)
        note(params, "start", context, step=first)
        ballast = bytearray(params["memory_mib"] * 2**20)
        ballast[::4096] = b"x" * len(ballast[::4096])
        held = on_the_card(context.device, params["card_mib"])  # noqa: F841 (held until the end)
        spawn_children(params["children"])
        for step in range(first, params["steps"]):
            if params["hand_over_at"] and not context.stage and step >= params["hand_over_at"]:
                save(context, step)
                note(params, "hand_over", context, step=step)
                context.hand_over("card")
            one_step(context, params, step)
        return self.finished(context, params, first)

    def finalize(self, context: Context, params: Values) -> dict[str, Any]:
        return self.finished(context, params, newest_step(context.checkpoints)) | {"ended_early": True}

    def finished(self, context: Context, params: Values, first: int) -> dict[str, Any]:
        note(params, "end", context, step=params["steps"])
        (context.artifact("capture", f"rehearsal {params['steps']}", {}) / "steps.txt").write_text(
            str(params["steps"])
        )
        (context.out / "words.txt").write_text("done\n")
        return {"steps": params["steps"], "first": first, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}


def on_the_card(device: str, mib: int) -> Any:
    if not mib or not device.startswith("cuda"):
        return None
    import torch

    return torch.ones(mib * 2**20, dtype=torch.uint8, device=device)


def one_step(context: Context, params: Values, step: int) -> None:
    if step == params["fail_at"]:
        raise RuntimeError(f"told to fail at step {step}")
    if context.should_stop() and not params["deaf"]:
        save(context, step)
        raise JobStopped
    time.sleep(params["sleep_seconds"] if step == params["sleep_at"] else params["seconds_per_step"])
    context.metric(step, loss=1.0 / (step + 1))
    context.report(step + 1, params["steps"], "steps", stage="counting")
    note(params, "step", context, step=step)
    if params["checkpoint_every"] and (step + 1) % params["checkpoint_every"] == 0:
        save(context, step + 1)


def spawn_children(count: int) -> None:
    """Orphans in sessions of their own: they outlive the work unless somebody ends them."""
    for _ in range(count):
        subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True)


def save(context: Context, step: int) -> None:
    (context.checkpoints / f"step-{step:09d}").mkdir(exist_ok=True)


def newest_step(folder: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in folder.iterdir()), default=0)


def note(params: Values, event: str, context: Any, **fields: Any) -> None:
    if not params.get("journal"):
        return
    line = {"event": event, "job": str(context.job.pk), "attempt": context.job.attempt, "pid": os.getpid()}
    line |= {"at": time.time(), "cards": context.job.gpu_uuids} | fields
    with open(params["journal"], "a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())

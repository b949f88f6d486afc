"""A context for kinds without the engine: folders, a list of what was reported, artifacts by name."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from django.core.exceptions import ObjectDoesNotExist

from jobs.exceptions import HandedOver
from jobs.kind import Input, JobKind


class Shelf:
    """Artifacts of all jobs of a test, as `jobs.artifacts` would keep them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.items: dict[str, Input] = {}

    def named(self, name: str) -> Input:
        return next(item for item in reversed(self.items.values()) if item.name == name)


class FakeContext:
    """What `run` is given; everything said is kept in lists."""

    def __init__(self, shelf: Shelf, job: str, inputs: Mapping[str, Input]) -> None:
        self.device = "cpu"
        self.stage = ""
        self.shelf, self.inputs = shelf, inputs
        self.out = shelf.folder / job / "out"
        self.checkpoints = shelf.folder / job / "checkpoints"
        self.out.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.reports: list[tuple[int, int, str, str]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.stop_after: int | None = None

    def input(self, parameter: str) -> Input:
        return self.inputs[parameter]

    def hub_token(self) -> str | bool:
        return False

    def artifact_path(self, artifact_id: str) -> Path:
        if artifact_id not in self.shelf.items:
            raise ObjectDoesNotExist
        return self.shelf.items[artifact_id].path

    def report(self, done: int, total: int, unit: str = "", *, stage: str = "", message: str = "") -> None:
        self.reports.append((done, total, unit, stage))

    def metric(self, step: int, **values: float) -> None:
        self.metrics.append((step, values))

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.reports) >= self.stop_after

    def hand_over(self, stage: str) -> NoReturn:
        raise HandedOver(stage)

    def artifact(self, type: str, name: str, manifest: Mapping[str, Any]) -> Path:
        identity = str(uuid.uuid4())
        folder = self.shelf.folder / "artifacts" / type / identity
        folder.mkdir(parents=True)
        self.shelf.items[identity] = Input(identity, type, name, folder, manifest)
        return folder


def run(
    kind: JobKind,
    shelf: Shelf,
    *,
    job: str = "job",
    stop_after: int | None = None,
    finalize: bool = False,
    stage: str = "",
    **params: Any,
) -> Any:
    """Validate, check, estimate and run (or finalize, or go on at a stage) as the engine would; returns
    (result, context, estimate)."""
    from jobs.artifacts import named

    serializer = kind.Params(data=params)
    serializer.is_valid(raise_exception=True)
    given = serializer.validated_data
    inputs = {name: shelf.named(given[name]) for name in named(kind, given)}
    kind.check(given, inputs)
    later = "finalize" if finalize else stage
    estimate = kind.estimate_stage(later, given, inputs) if later else kind.estimate(given, inputs)
    context = FakeContext(shelf, job, inputs)
    context.stage = stage
    context.stop_after = stop_after
    act = kind.finalize if finalize else kind.run
    return act(context, given), context, estimate

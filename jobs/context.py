"""What a kind is given while it runs: the real `jobs.kind.Context`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings

from jobs import hub_token, paths, registry
from jobs.artifacts import as_input
from jobs.endings import End
from jobs.exceptions import HandedOver
from jobs.journal import Journal
from jobs.kind import Input
from jobs.models import Artifact, Attempt, Job, Status, uuid7
from jobs.patience import patiently


class WorkContext:
    """Folders, inputs, progress and results of one attempt."""

    def __init__(self, job: Job, attempt: Attempt, device: str, stop: object) -> None:
        self.job, self.attempt, self.device, self.stop = job, attempt, device, stop
        self.stage = job.stage
        self.inputs = patiently(self._read_inputs)
        self.journal = Journal(job)
        self.staging = paths.staging(job, job.attempt)
        self.out = self._folder(self.staging / "out")
        self.checkpoints = self._folder(paths.checkpoints(job))
        self.made: list[dict[str, Any]] = []

    @staticmethod
    def _folder(path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _read_inputs(self) -> dict[str, Input]:
        """Once, at the start: an artifact that is read is held by the job's row."""
        rows = self.job.inputs.select_related("artifact")
        return {row.parameter: as_input(row.artifact) for row in rows if row.artifact is not None}

    def input(self, parameter: str) -> Input:
        return self.inputs[parameter]

    def hub_token(self) -> str | bool:
        """Read when asked for, and kept nowhere: it is in no environment, parameter or log."""
        own = patiently(lambda: hub_token.of(self.job.owner_id))
        return own or settings.MISTUDIO_SHARE_HF_TOKEN

    def artifact_path(self, artifact_id: str) -> Path:
        """Folder of an artifact that an input's manifest names."""
        return paths.artifact_folder(patiently(lambda: Artifact.objects.get(pk=artifact_id)))

    def hand_over(self, stage: str) -> NoReturn:
        """Everything kept so far is on the disk before anybody hears of the next stage."""
        if self.job.needs_card or stage not in registry.get(self.job.kind).card_stages(self.job.params):
            raise ValueError(f"“{stage}” is not a stage that this job hands over to.")
        paths.sync_tree(self.checkpoints)
        raise HandedOver(stage)

    def report(self, done: int, total: int, unit: str = "", *, stage: str = "", message: str = "") -> None:
        self.journal.report(done, total, unit, stage, message)

    def metric(self, step: int, **values: float) -> None:
        self.journal.metric(step, values)

    def should_stop(self) -> bool:
        return bool(self.stop)

    def artifact(self, type: str, name: str, manifest: Mapping[str, Any]) -> Path:
        """A folder in staging. `manifest` may be filled until `run` returns: it is kept by reference."""
        identity = uuid7()
        self.made.append({"id": str(identity), "type": type, "name": name, "manifest": manifest})
        return self._folder(self.staging / "artifacts" / type / str(identity))

    def end(self, result: dict[str, Any], provenance: Mapping[str, Any]) -> End:
        """The successful end: manifests written beside the results, every move named."""
        return End(
            status=Status.SUCCEEDED,
            result=result,
            moves=[*self._artifact_moves(provenance), *self._out_moves()],
            artifacts=[made | {"size_bytes": paths.size_of(self._staged(made))} for made in self.made],
        )

    def _staged(self, made: Mapping[str, Any]) -> Path:
        return self.staging / "artifacts" / made["type"] / made["id"]

    def _artifact_moves(self, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
        moves = []
        for made in self.made:
            made["manifest"] = dict(provenance) | dict(made["manifest"])
            paths.write_json(self._staged(made) / "manifest.json", made["manifest"])
            target = f"artifacts/{made['type']}/{made['id']}"
            moves.append((f".staging/{self.staging.name}/{target}", target))
        return moves

    def _out_moves(self) -> list[tuple[str, str]]:
        if not any(self.out.iterdir()):
            return []
        return [(f".staging/{self.staging.name}/out", f"jobs/{self.job.pk}/out")]

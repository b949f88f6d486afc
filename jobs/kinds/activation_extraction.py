"""Run a model over a corpus and keep what passes chosen places in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rest_framework import serializers

from jobs import estimates, extras, texts
from jobs.fields import ArtifactField, CorpusField, SiteField, is_path
from jobs.kind import Context, Estimate, Input, JobKind, halved
from jobs.language_models import context_errors, facts_of, missing_words

#: Activations of one token besides the vector itself: norm, id, document, row, position, 4 bytes each.
BYTES_BESIDE = 20


class ActivationExtractionParams(serializers.Serializer):
    model = ArtifactField("model", help_text="The model to run.")
    corpus = CorpusField(
        help_text="`english` (built in), an uploaded corpus, a data set of the Hub (`hf:owner/name`), or the path of a "
        "file or folder under MISTUDIO_IMPORT_ROOTS: UTF-8 text whose paragraphs are documents, JSON Lines, Parquet, a "
        "saved data set, or rows of tokens in safetensors.",
    )
    sites = SiteField(
        many=True,
        allow_empty=False,
        max_length=64,  # type: ignore[call-arg]  # the list's
        help_text="Where to read: blocks and places, all in one pass.",
    )
    context_size = serializers.IntegerField(
        min_value=2,
        max_value=131_072,
        default=128,
        help_text="Longest row in tokens; longer documents are split.",
    )
    max_tokens = serializers.IntegerField(
        min_value=256, max_value=10**11, default=1_000_000, help_text="Tokens to read, at most."
    )
    dtype = serializers.ChoiceField(
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help_text="Type of the stored vectors.",
    )
    packing = serializers.BooleanField(
        default=False,
        help_text="Join documents end to end into full rows, BOS between them; otherwise a row holds one document.",
    )
    batch_size = serializers.IntegerField(
        min_value=1,
        max_value=4096,
        default=16,
        help_text="Rows per forward pass; halved by itself where memory is short.",
    )
    field = serializers.CharField(
        max_length=200,
        default="text",
        help_text="Field or column that holds the document: text, token ids (`input_ids`), or chat `messages`.",
    )
    split = serializers.CharField(
        max_length=100, default="train", help_text="Part of a data set, where its files name parts."
    )
    exclude_special = serializers.BooleanField(
        default=True, help_text="Leave out vectors at special tokens (BOS, EOS, padding), by their ids."
    )
    prepend_bos = serializers.BooleanField(
        default=True,
        help_text="Begin each row with BOS where the tokenizer has one; its huge vector is left out then.",
    )

    def validate_sites(self, sites: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if len({(site["block"], site["site"]) for site in sites}) < len(sites):
            raise serializers.ValidationError("A site is named twice.")
        return sites

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if is_path(data["corpus"]):
            texts.files_at(data["corpus"], data["split"])
        return data


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
        model = inputs.get("model")
        errors = texts.errors(params, inputs, model)
        if model is not None:
            extras.require_for(model.manifest)
            errors |= site_errors(params["sites"], model.manifest)
            errors |= context_errors(params["context_size"], model)
        if errors:
            raise serializers.ValidationError(errors)

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        from jobs.interp import sizes

        manifest, on_cpu = inputs["model"].manifest, estimates.runs_on_cpu()
        width, sites, dtype = manifest["d_model"], len(params["sites"]), params["dtype"]
        tokens = min(params["batch_size"] * params["context_size"], params["max_tokens"])
        model = {"model": sizes.model_bytes(manifest, on_cpu=on_cpu)}
        forward = sizes.forward_bytes(manifest, tokens, on_cpu=on_cpu)
        forward += sizes.captured_bytes(manifest, tokens, sites, on_cpu=on_cpu)
        if on_cpu:  # shards and the text lie in the same memory
            room = sizes.shard_tokens(width, sites, dtype) + params["context_size"]
            running = {
                "forward": forward,
                "shard": sizes.shard_bytes(width, sites, room, params["max_tokens"], dtype),
                "text": texts.memory_bytes(params["corpus"]),
            }
            loading = {"file": sizes.file_bytes(manifest, on_cpu=True), "tokenizer": sizes.TOKENIZER_BYTES}
            parts = {**model, **sizes.widest(loading, running)}
        else:
            parts = model | {"forward": forward, "cuda": sizes.CUDA_BYTES}
        stored = width * sizes.WIDTHS[dtype] + BYTES_BESIDE
        work = float(params["max_tokens"] * manifest["parameters"])
        return Estimate.of(parts, disk_bytes=params["max_tokens"] * (sites * stored + 9), work=work)

    def suggest(self, reason: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Batches halve by themselves: where a single row does not fit, shorter rows are what is left."""
        if reason == "out_of_memory":
            return halved(self.Params(), params, "context_size")
        return super().suggest(reason, params)

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        from jobs.interp import activations, files, models, sizes
        from jobs.interp.site import Site

        source = context.input("model")
        corpus = texts.opened(params, context)
        model = models.load(
            source.path,
            device=context.device,
            dtype=models.compute_dtype(source.manifest["dtype"], context.device),
            name=source.name,
        )
        model.require_context(params["context_size"])
        rows = rows_of(corpus, model, params)
        sites, dtype = tuple(Site(**site) for site in params["sites"]), params["dtype"]
        room = sizes.shard_tokens(model.d_model, len(sites), dtype)
        recipe = activations.Recipe(sites, dtype, params["exclude_special"], room)
        recipe.require_places(model)
        context.report(0, params["max_tokens"], "tokens", stage="extract")
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
            "corpus": {"name": corpus.name, "sha256": rows.sha256, "documents": rows.documents},
            "corpus_artifact": context.inputs["corpus"].id if "corpus" in context.inputs else None,
            "documents_split": rows.split,
            "packing": params["packing"],
            "prepend_bos": bool(rows.start),
            "pad": model.pad.source,
            "batch_size": params["batch_size"],
        }
        files.bring(
            work, context.artifact("activations", name_of(source.name, corpus.name, recipe.sites), manifest)
        )
        files.remove(work)
        return manifest


# What is refused before anything is queued ---------------------------------------------------------------
def site_errors(sites: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    """Blocks beyond the last, and places that the architecture does not have where the manifest says so."""
    for site in sites:
        if words := missing_words(site["block"], site["site"], manifest):
            return {"sites": [words]}
    return {}


# What is made and told ----------------------------------------------------------------------------------
def rows_of(corpus: Any, model: Any, params: Mapping[str, Any]) -> Any:
    """The corpus as rows of tokens, made while they are read; conversations that the model has no template for are
    refused at once."""
    from jobs.interp import tokens
    from jobs.interp.documents import is_conversation

    if is_conversation(next(iter(corpus.documents))):
        tokens.require_template(model.tokenizer)
    return tokens.RowStream(
        corpus.documents,
        model.tokenizer,
        params["context_size"],
        max_tokens=params["max_tokens"],
        bos_id=model.bos_id if params["prepend_bos"] else None,
        packing=params["packing"],
        d_vocab=model.d_vocab,
    )


def progress(context: Context) -> Any:
    def report(done: int, total: int, metrics: Mapping[str, float]) -> None:
        context.report(done, total, "tokens", stage="extract")
        context.metric(done, **metrics)

    return report


def name_of(model: str, corpus: str, sites: Sequence[Any]) -> str:
    """`smollm2-135m-instruct-english-b4`; places other than resid_post are spelled out. Jobs can refer to it as it
    stands (`fields.REFERENCE`), whatever the corpus is called."""
    from jobs.interp.names import slug

    places = [f"b{site.block}" + ("" if site.site == "resid_post" else f".{site.site}") for site in sites[:4]]
    return slug(slug("-".join([model.rpartition("/")[2], Path(corpus).stem, *places]))[:120])

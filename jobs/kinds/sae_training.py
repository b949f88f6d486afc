"""Train a sparse autoencoder on stored activations and measure it on text it never saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_framework import serializers

from jobs.exceptions import JobRejected
from jobs.fields import ArtifactField, SiteField
from jobs.kind import Context, Estimate, Input, JobKind

if TYPE_CHECKING:
    from jobs.interp import reading
    from jobs.interp.sae import assess, metrics, train

#: Rows per forward pass while the loss on held-out text is measured: scores over a vocabulary are wide.
CE_ROWS = 8


class SaeTrainingParams(serializers.Serializer):
    activations = ArtifactField("activations", help_text="What to train on.")
    site = SiteField(required=False, help_text="Which site, where the activations hold several.")
    architecture = serializers.ChoiceField(
        choices=("topk",), default="topk", help_text="Form of the autoencoder."
    )
    d_sae = serializers.IntegerField(
        min_value=2, max_value=2**22, help_text="Latents; usually 4 to 64 times the width of the model."
    )
    k = serializers.IntegerField(
        min_value=1, max_value=4096, default=32, help_text="Live latents per token (L0)."
    )
    lr = serializers.FloatField(
        min_value=1e-7, max_value=1.0, default=5e-4, help_text="Peak learning rate of Adam."
    )
    tokens = serializers.IntegerField(
        min_value=1,
        max_value=10**12,
        default=10_000_000,
        help_text="Tokens to train on; passes over the data repeat.",
    )
    batch_size = serializers.IntegerField(
        min_value=16, max_value=2**20, default=4096, help_text="Tokens per step."
    )
    seed = serializers.IntegerField(
        min_value=0, max_value=2**31 - 1, default=0, help_text="Seed of every draw."
    )
    aux_k = serializers.IntegerField(
        min_value=0,
        max_value=2**16,
        allow_null=True,
        default=None,
        help_text="Dead latents per token in the auxiliary loss; empty: half the model's width, 0: none.",
    )
    aux_coefficient = serializers.FloatField(
        min_value=0, max_value=10, default=1 / 32, help_text="Weight of the auxiliary loss."
    )
    dead_after_tokens = serializers.IntegerField(
        min_value=1,
        max_value=10**12,
        allow_null=True,
        default=None,
        help_text="A latent silent for so many tokens is dead; empty: a tenth of the run, at most 10 M.",
    )
    outlier_ratio = serializers.FloatField(
        min_value=1,
        max_value=1e9,
        allow_null=True,
        default=10.0,
        help_text="Leave out vectors longer than so many medians (attention sinks); empty keeps all.",
    )
    heldout_fraction = serializers.FloatField(
        min_value=0.001, max_value=0.5, default=0.05, help_text="Share of documents kept away from training."
    )
    ce_tokens = serializers.IntegerField(
        min_value=0,
        max_value=10**7,
        default=4096,
        help_text="Held-out tokens on which the model's loss through the SAE is measured; 0: none.",
    )
    checkpoint_every = serializers.IntegerField(
        min_value=1,
        max_value=10**6,
        default=500,
        help_text="Steps between checkpoints; the last two are kept.",
    )

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if data["k"] > data["d_sae"]:
            raise serializers.ValidationError(
                {"k": [f"k is {data['k']}, but there are only {data['d_sae']} latents."]}
            )
        if data["tokens"] < data["batch_size"]:
            raise serializers.ValidationError(
                {"tokens": [f"{data['tokens']} tokens are less than one batch of {data['batch_size']}."]}
            )
        return data


class Kind(JobKind):
    label = "Train SAE"
    stage = "saes"
    description = "Train a TopK sparse autoencoder with auxiliary loss, and export it in SAELens' layout."
    makes = ("sae",)
    sweep = (
        "site",
        "architecture",
        "d_sae",
        "k",
        "lr",
        "tokens",
        "batch_size",
        "seed",
        "aux_k",
        "aux_coefficient",
    )
    example = {
        "activations": "smollm2-135m-instruct-english-b4",
        "d_sae": 1024,
        "k": 16,
        "lr": 0.002,
        "tokens": 60_000,
        "batch_size": 512,
        "ce_tokens": 1024,
        "checkpoint_every": 50,
    }
    Params = SaeTrainingParams

    def check(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> None:
        if "activations" in inputs:
            find_site(params, inputs["activations"].manifest)

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        from jobs.interp import sizes

        manifest, on_cpu = inputs["activations"].manifest, runs_on_cpu()
        width = manifest["d_model"]
        parts = sizes.topk_bytes(width, params["d_sae"])
        disk = 7 * parts["sae"]  # two checkpoints of weights and both moments, and the result
        parts |= {} if on_cpu else {"cuda": sizes.CUDA_BYTES}
        batch = sizes.batch_bytes(width, params["d_sae"], params["k"], params["batch_size"])
        training = {"batch": batch} | ({"buffer": sizes.buffer_bytes(manifest)} if on_cpu else {})
        parts |= sizes.widest(training, *self.measuring(params, manifest, on_cpu))
        work = float(params["tokens"] * width * params["d_sae"])
        return Estimate.of(parts, disk_bytes=disk, work=work)

    def estimate_stage(self, stage: str, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        """Of a finalizing, in the host's memory: the checkpoint, and the widest of the measurements."""
        from jobs.interp import sizes

        manifest = inputs["activations"].manifest
        width = manifest["d_model"]
        held = sizes.topk_bytes(width, params["d_sae"])
        batch = sizes.batch_bytes(width, params["d_sae"], params["k"], 0)
        parts = {"sae": held["sae"], "adam": held["adam"]}
        parts |= sizes.widest({"batch": batch}, *self.measuring(params, manifest, on_cpu=True))
        return Estimate.of(parts, disk_bytes=held["sae"])

    def measuring(
        self, params: Mapping[str, Any], manifest: Mapping[str, Any], on_cpu: bool
    ) -> list[dict[str, int]]:
        """What the two phases after the training take that measure the loss through the SAE, in bytes."""
        from jobs.interp import sizes

        if not params["ce_tokens"]:
            return []
        tokens, facts = CE_ROWS * manifest["context_size"], manifest["model"]
        model = {"model": sizes.model_bytes(facts, on_cpu=on_cpu)}
        model |= {"tokenizer": sizes.TOKENIZER_BYTES} if on_cpu else {}
        forward = sizes.forward_bytes(facts, tokens, on_cpu=on_cpu, logits=True)
        return [model | {"file": sizes.file_bytes(facts, on_cpu=on_cpu)}, model | {"forward": forward}]

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        data, model = opened(context, params)
        return published(context, params, data, model, trained(context, params, data))

    def finalize(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        data, model = opened(context, params)
        training = as_far_as_it_came(context, params)
        steps = {"ended_at_step": training.step, "steps_total": training.settings.steps}
        return published(context, params, data, model, training, steps)


def opened(context: Context, params: Mapping[str, Any]) -> tuple[Data, Path | None]:
    """The data, and the folder of the model where the loss through the SAE is to be measured."""
    data = Data.open(context.input("activations"), params)
    return data, model_folder(context, data.source) if params["ce_tokens"] else None


def published(
    context: Context,
    params: Mapping[str, Any],
    data: Data,
    model: Path | None,
    training: train.Training,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the SAE, write it down as an artifact, and say what came of it."""
    from jobs.interp.sae import assess

    report = assess.assess(training, data.split)
    if model is not None:
        report = report.with_cross_entropy(measured_loss(context, params, data, model, training))
    name = f"{data.source.name.rpartition('/')[2]}-topk-{params['d_sae']}-k{params['k']}"
    result = facts_of(data, training) | dict(facts or {}) | report.numbers()
    manifest = result | {key: data.source.manifest[key] for key in ("model_artifact", "model")}
    export(context.artifact("sae", name, manifest), data, training, report, facts or {})
    write_histogram(context.out, report)
    return result | {"artifact": name}


@dataclass(frozen=True)
class Data:
    """What a training works on: the activations, the site among them, and their two parts."""

    source: Input
    site: Mapping[str, Any]
    split: reading.Split

    @classmethod
    def open(cls, source: Input, params: Mapping[str, Any]) -> Data:
        from jobs.interp import reading

        site = find_site(params, source.manifest)
        store = reading.Store(source.path / site["folder"])
        split = reading.split(
            store, heldout_fraction=params["heldout_fraction"], outlier_ratio=params["outlier_ratio"]
        )
        return cls(source, site, split)


def find_site(params: Mapping[str, Any], manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the site to train on; a `ValidationError` that lists what there is."""
    sites, wanted = manifest["sites"], params.get("site")
    if wanted is None and len(sites) == 1:
        return sites[0]
    for site in sites:
        if wanted and (site["block"], site["site"]) == (wanted["block"], wanted["site"]):
            return site
    there = ", ".join(f"block {site['block']} {site['site']}" for site in sites)
    raise serializers.ValidationError({"site": [f"The activations hold {there}; name one of them."]})


def model_folder(context: Context, source: Input) -> Path:
    """The folder of the model that gave the activations; refused before the training, not after it."""
    from django.core.exceptions import ObjectDoesNotExist

    try:
        return context.artifact_path(source.manifest["model_artifact"])
    except ObjectDoesNotExist as error:
        raise JobRejected(
            f"The model of these activations, {source.manifest['model']['name']}, was deleted, so the loss "
            "through the SAE cannot be measured.",
            hint="Set ce_tokens to 0 to train without that measurement.",
        ) from error


def trained(context: Context, params: Mapping[str, Any], data: Data) -> train.Training:
    """The training at its last step, begun here or gone on with from a checkpoint."""
    from jobs.interp import shuffling
    from jobs.interp.sae import train

    settings = settings_of(params)
    stream = shuffling.Shuffled(data.split.train, settings.batch_size, settings.seed)
    mean_norm = data.split.train.mean_norm()
    training = train.begin_or_resume(settings, stream, mean_norm, context.checkpoints, device=context.device)

    def progress(step: int, total: int, metrics: Mapping[str, float]) -> None:
        context.report(step, total, "steps", stage="train", message=f"FVU {metrics['fvu']:.3f}")
        context.metric(step, **metrics)

    training.run(stream, context.checkpoints, on_progress=progress, should_stop=context.should_stop)
    return training


def as_far_as_it_came(context: Context, params: Mapping[str, Any]) -> train.Training:
    """The training as its newest checkpoint has it."""
    from jobs.interp.sae import train

    training = train.Training.resume(
        train.saved(context.checkpoints)[-1], settings_of(params), device=context.device
    )
    if training.step == 0:
        raise JobRejected("The training ended before its first step, so there is no SAE to keep.")
    return training


def settings_of(params: Mapping[str, Any]) -> train.Settings:
    from jobs.interp.sae import train

    return train.Settings(**{name: params[name] for name in train.Settings.names() if name in params})


def measured_loss(
    context: Context, params: Mapping[str, Any], data: Data, folder: Path, training: train.Training
) -> metrics.CrossEntropy:
    """The model's loss on held-out text as it is, through the SAE, and without the site."""
    from jobs.interp import models
    from jobs.interp.reading import heldout_text
    from jobs.interp.sae.metrics import cross_entropy
    from jobs.interp.site import Site

    facts = data.source.manifest["model"]
    dtype = models.compute_dtype(facts["dtype"], context.device)
    model = models.load(folder, device=context.device, dtype=dtype, name=facts["name"])
    text = heldout_text(data.source.path, data.split.documents, params["ce_tokens"])
    total = text.tokens

    def progress(tokens: int) -> None:
        context.report(tokens, total, "tokens", stage="loss on held-out text")

    return cross_entropy(
        model,
        Site(data.site["block"], data.site["site"]),
        training.sae.folded(training.scale),
        text.batches(CE_ROWS, model.pad.id),
        excluded_ids=model.special_ids if data.source.manifest["exclude_special"] else (),
        norm_limit=data.split.norm_limit,
        on_batch=progress,
        should_stop=context.should_stop,
    )


def facts_of(data: Data, training: train.Training) -> dict[str, Any]:
    sae = training.sae
    return {
        "architecture": sae.architecture,
        "site": data.site["hook_name"],
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "k": sae.k,
        "scale_folded": training.scale,
    }


def export(
    folder: Path, data: Data, training: train.Training, report: assess.Report, facts: Mapping[str, Any]
) -> None:
    """The SAE in SAELens' layout, its recipe beside the weights."""
    from jobs.interp.sae.files import Metadata, save_sae

    source = data.source.manifest
    metadata = Metadata(
        model_name=source["model"]["repository"],
        hook_name=data.site["hook_name"],
        hf_hook_name=data.site["module"],
        context_size=source["context_size"],
        prepend_bos=source["prepend_bos"],
        exclude_special_tokens=source["exclude_special"],
        dataset_path=source["corpus"]["name"],
    )
    # The weights themselves by their digest: a copy may be named after the repository that it is a copy of.
    recipe = {
        "model": source["model"],
        "settings": asdict(training.settings),
        "scale_folded": training.scale,
        **facts,
        **report.numbers(),
    }
    frequencies = report.log10_frequencies
    save_sae(folder, training.finished(), metadata, log10_frequencies=frequencies, extra=recipe)


def write_histogram(folder: Path, report: assess.Report) -> None:
    """Data of the results page's figure."""
    from jobs.interp.files import write_json
    from jobs.interp.sae.metrics import histogram

    write_json(folder / "firing_histogram.json", histogram(report.log10_frequencies))


def runs_on_cpu() -> bool:
    """Whether the mathematics runs on the CPU whatever the card, so that its memory is the host's."""
    from django.conf import settings

    return settings.MISTUDIO_GPU_BACKEND == "simulated" or settings.MISTUDIO_TORCH_DEVICE == "cpu"

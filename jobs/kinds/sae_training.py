"""Train a sparse autoencoder on stored activations and measure it on text it never saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_framework import serializers

from jobs.fields import ArtifactField, SiteField
from jobs.kind import Context, Estimate, Input, JobKind

if TYPE_CHECKING:
    from jobs.interp import activations
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
    example = {
        "activations": "smollm2-135m-instruct-english-b4",
        "d_sae": 1024,
        "k": 16,
        "lr": 0.002,
        "tokens": 100_000,
        "batch_size": 1024,
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
        parts = sizes.topk_bytes(width, params["d_sae"], params["k"], params["batch_size"])
        disk = 7 * parts["sae"]  # two checkpoints of weights and both moments, and the result
        parts |= {"buffer": sizes.buffer_bytes(manifest)} if on_cpu else {"cuda": sizes.CUDA_BYTES}
        if params["ce_tokens"]:
            tokens = CE_ROWS * manifest["context_size"]
            parts["model"] = sizes.model_bytes(manifest["model"], on_cpu=on_cpu)
            parts["forward"] = sizes.forward_bytes(manifest["model"], tokens, on_cpu=on_cpu, logits=True)
        return Estimate.of(parts, disk_bytes=disk)

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        from jobs.interp import activations
        from jobs.interp.sae import assess

        source = context.input("activations")
        site = find_site(params, source.manifest)
        split = activations.split(
            activations.Store(source.path / site["folder"]),
            heldout_fraction=params["heldout_fraction"],
            outlier_ratio=params["outlier_ratio"],
        )
        training = trained(context, params, split)
        report = assess.assess(training, split)
        if params["ce_tokens"]:
            report = report.with_cross_entropy(measured_loss(context, params, source, site, training, split))
        name = f"{source.name.rpartition('/')[2]}-{params['architecture']}-{params['d_sae']}-k{params['k']}"
        facts = {"architecture": params["architecture"], "site": site["hook_name"], "k": params["k"]}
        facts |= {"d_in": training.sae.d_in, "d_sae": params["d_sae"], "scale_folded": training.scale}
        manifest = (
            facts | report.numbers() | {key: source.manifest[key] for key in ("model_artifact", "model")}
        )
        export(context.artifact("sae", name, manifest), training, report, source.manifest, site)
        write_histogram(context.out, report)
        return facts | report.numbers() | {"artifact": name}


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


def trained(context: Context, params: Mapping[str, Any], split: activations.Split) -> train.Training:
    """The training at its last step, begun here or gone on with from a checkpoint."""
    from jobs.interp import activations
    from jobs.interp.sae import train

    settings = train.Settings(**{name: params[name] for name in train.Settings.names() if name in params})
    stream = activations.Shuffled(split.train, settings.batch_size, settings.seed)
    mean_norm = split.train.mean_norm()
    training = train.begin_or_resume(settings, stream, mean_norm, context.checkpoints, device=context.device)

    def progress(step: int, total: int, metrics: Mapping[str, float]) -> None:
        context.report(step, total, "steps", stage="train", message=f"FVU {metrics['fvu']:.3f}")
        context.metric(step, **metrics)

    training.run(stream, context.checkpoints, on_progress=progress, should_stop=context.should_stop)
    return training


def measured_loss(
    context: Context,
    params: Mapping[str, Any],
    source: Input,
    site: Mapping[str, Any],
    training: train.Training,
    split: activations.Split,
) -> metrics.CrossEntropy:
    """The model's loss on held-out text as it is, through the SAE, and without the site."""
    from jobs.interp import models
    from jobs.interp.activations import heldout_text
    from jobs.interp.sae.metrics import cross_entropy
    from jobs.interp.site import Site

    facts = source.manifest["model"]
    dtype = models.compute_dtype(facts["dtype"], context.device)
    folder = context.artifact_path(source.manifest["model_artifact"])
    model = models.load(folder, device=context.device, dtype=dtype, name=facts["name"])
    text = heldout_text(source.path, split.documents, params["ce_tokens"])
    total = text.tokens

    def progress(tokens: int) -> None:
        context.report(tokens, total, "tokens", stage="loss on held-out text")

    return cross_entropy(
        model,
        Site(site["block"], site["site"]),
        training.sae.folded(training.scale),
        text.batches(CE_ROWS, model.pad.id),
        excluded_ids=model.special_ids if source.manifest["exclude_special"] else (),
        norm_limit=split.norm_limit,
        on_batch=progress,
        should_stop=context.should_stop,
    )


def export(
    folder: Path,
    training: train.Training,
    report: assess.Report,
    source: Mapping[str, Any],
    site: Mapping[str, Any],
) -> None:
    """The SAE in SAELens' layout, its recipe beside the weights."""
    from dataclasses import asdict

    from jobs.interp.sae.files import Metadata, save_sae

    metadata = Metadata(
        model_name=source["model"]["repository"],
        hook_name=site["hook_name"],
        hf_hook_name=site["module"],
        context_size=source["context_size"],
        prepend_bos=source["prepend_bos"],
        exclude_special_tokens=source["exclude_special"],
        dataset_path=source["corpus"]["name"],
    )
    extra = {"settings": asdict(training.settings), "scale_folded": training.scale, **report.numbers()}
    save_sae(folder, training.finished(), metadata, log10_frequencies=report.log10_frequencies, extra=extra)


def write_histogram(folder: Path, report: assess.Report) -> None:
    """Data of the results page's figure."""
    from jobs.interp.files import write_json
    from jobs.interp.sae.metrics import histogram

    write_json(folder / "firing_histogram.json", histogram(report.log10_frequencies))


def runs_on_cpu() -> bool:
    """Whether the mathematics runs on the CPU whatever the card, so that its memory is the host's."""
    from django.conf import settings

    return settings.MISTUDIO_GPU_BACKEND == "simulated" or settings.MISTUDIO_TORCH_DEVICE == "cpu"

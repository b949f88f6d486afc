"""Train sparse autoencoders and transcoders, on stored activations or straight from a model, and measure them on text
they never saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_framework import serializers

from jobs import estimates, extras, texts
from jobs.exceptions import JobRejected
from jobs.fields import ArtifactField, CorpusField, SiteField, is_path
from jobs.kind import Context, Estimate, Input, JobKind, halved
from jobs.language_models import context_errors, facts_of, missing_words

if TYPE_CHECKING:
    from jobs.interp.models import LanguageModel
    from jobs.interp.sae.grounds import Ground
    from jobs.interp.sae.sources import Source, Standing
    from jobs.interp.sae.splice import CrossEntropy
    from jobs.interp.sae.together import All, Together

#: Rows per forward pass while the loss on held-out text is measured: scores over a vocabulary are wide.
CE_ROWS = 8
#: As `jobs.interp.sae.options.NAMES` has them (a test compares).
ARCHITECTURES = (
    "topk",
    "batchtopk",
    "matryoshka_batchtopk",
    "standard",
    "jumprelu",
    "gated",
    "transcoder",
    "skip_transcoder",
)
MOST_VARIANTS = 16
MOST_LATENTS = 2**22
#: Held-out tokens that a loss is measured on, at least: of one or two, nothing may be left to predict.
FEWEST_CE_TOKENS = 16
#: Parameters of the text that a model is run over; stored activations have theirs.
OF_TEXT = (
    "corpus",
    "field",
    "split",
    "context_size",
    "max_tokens",
    "model_batch_size",
    "exclude_special",
    "prepend_bos",
)


def optional(**options: Any) -> dict[str, Any]:
    return {"required": False, "allow_null": True, "default": None} | options


class SaeVariant(serializers.Serializer):
    """What one of several SAEs has of its own; the rest is the job's."""

    name = serializers.RegexField(
        r"^[\w.,=-][\w .,=-]{0,23}$",
        required=False,
        help_text="In curves and tables; else what it has of its own.",
    )
    site = SiteField(required=False, help_text="Where it reads.")
    architecture = serializers.ChoiceField(choices=ARCHITECTURES, required=False)
    d_sae = serializers.IntegerField(min_value=2, max_value=MOST_LATENTS, required=False)
    k = serializers.IntegerField(min_value=1, max_value=4096, required=False)
    l1 = serializers.FloatField(min_value=1e-9, max_value=1e6, required=False)
    l0 = serializers.FloatField(min_value=1e-9, max_value=1e6, required=False)
    lr = serializers.FloatField(min_value=1e-7, max_value=1.0, required=False)
    seed = serializers.IntegerField(min_value=0, max_value=2**31 - 1, required=False)

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := sorted(set(data) - set(self.fields))):
            sentence = f"{', '.join(unknown)}: an SAE can have of its own {', '.join(self.fields)}."
            raise serializers.ValidationError({unknown[0]: [sentence]})
        return super().to_internal_value(data)


class SaeTrainingParams(serializers.Serializer):
    activations = ArtifactField(
        "activations", **optional(), help_text="What to train on; or name a model instead."
    )
    site = SiteField(
        required=False, help_text="Which site; of activations that hold one, that. Of a transcoder, mlp_in."
    )
    architecture = serializers.ChoiceField(
        choices=ARCHITECTURES, default="topk", help_text="Form of the autoencoder or transcoder."
    )
    d_sae = serializers.IntegerField(
        min_value=2,
        max_value=MOST_LATENTS,
        help_text="Latents; usually 4 to 64 times the width of the model.",
    )
    k = serializers.IntegerField(
        min_value=1,
        max_value=4096,
        **optional(),
        help_text="Live latents per token of the TopK kinds; empty: 32.",
    )
    lr = serializers.FloatField(
        min_value=1e-7,
        max_value=1.0,
        **optional(),
        help_text="Peak learning rate of Adam; empty: by latents and steps, 0.004 at most.",
    )
    tokens = serializers.IntegerField(
        min_value=1,
        max_value=10**12,
        default=10_000_000,
        help_text="Tokens to train on; passes over the data repeat.",
    )
    l1 = serializers.FloatField(
        min_value=1e-9,
        max_value=1e6,
        **optional(),
        help_text="Weight of the L1 penalty of standard, gated and the transcoders; empty: 5.",
    )
    l0 = serializers.FloatField(
        min_value=1e-9,
        max_value=1e6,
        **optional(),
        help_text="Weight of JumpReLU's penalty on live latents per token; empty: 1.",
    )
    batch_size = serializers.IntegerField(
        min_value=16, max_value=2**20, default=4096, help_text="Tokens per step."
    )
    seed = serializers.IntegerField(
        min_value=0, max_value=2**31 - 1, default=0, help_text="Seed of every draw."
    )
    variants = SaeVariant(
        many=True,
        required=False,
        allow_empty=False,
        max_length=MOST_VARIANTS,  # type: ignore[call-arg]  # the list's
        help_text="Several SAEs from one reading of the data: what each has of its own, "
        'such as `[{"k": 16}, {"k": 32}]`.',
    )
    model = ArtifactField(
        "model", **optional(), help_text="Train straight from this model, without stored activations."
    )
    corpus = CorpusField(help_text="With a model: what an extraction takes as its `corpus`.")
    field = serializers.CharField(
        max_length=200, default="text", help_text="With a model: field or column that holds the document."
    )
    split = serializers.CharField(
        max_length=100,
        default="train",
        help_text="With a model: part of a data set, where its files name parts.",
    )
    context_size = serializers.IntegerField(
        min_value=2, max_value=131_072, default=128, help_text="With a model: longest row in tokens."
    )
    max_tokens = serializers.IntegerField(
        min_value=256,
        max_value=10**11,
        **optional(),
        help_text="With a model: tokens of the corpus to read, at most; empty: as many as the training takes.",
    )
    model_batch_size = serializers.IntegerField(
        min_value=1, max_value=4096, default=16, help_text="With a model: rows per forward pass."
    )
    exclude_special = serializers.BooleanField(
        default=True, help_text="With a model: leave out vectors at special tokens, by their ids."
    )
    prepend_bos = serializers.BooleanField(
        default=True, help_text="With a model: begin each row with BOS where the tokenizer has one."
    )
    order_seed = serializers.IntegerField(
        min_value=0,
        max_value=2**31 - 1,
        **optional(),
        help_text="Seed of the order of the data alone; empty: `seed`.",
    )
    warmup_fraction = serializers.FloatField(
        min_value=0, max_value=1, default=0.05, help_text="Share of the run in which the learning rate rises."
    )
    decay_fraction = serializers.FloatField(
        min_value=0, max_value=1, default=0.2, help_text="Share of the run in which it falls to 0."
    )
    sparsity_warmup_fraction = serializers.FloatField(
        min_value=0,
        max_value=1,
        **optional(),
        help_text="Share of the run in which the weight of a sparsity penalty rises; empty: 0.05.",
    )
    clip_norm = serializers.FloatField(
        min_value=1e-6, max_value=1e6, **optional(), help_text="Longest gradient; empty: any."
    )
    adam_beta1 = serializers.FloatField(
        min_value=0, max_value=0.9999, **optional(), help_text="Empty: 0.9, of JumpReLU 0."
    )
    adam_beta2 = serializers.FloatField(
        min_value=0, max_value=0.999999, **optional(), help_text="Empty: 0.999."
    )
    target_l0 = serializers.FloatField(
        min_value=0.1,
        max_value=2**22,
        **optional(),
        help_text="Live latents per token that JumpReLU's thresholds begin with; empty: 64.",
    )
    widths = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MOST_LATENTS),
        **optional(),
        max_length=16,
        help_text="Prefixes of a Matryoshka SAE, rising; empty: a sixteenth, an eighth, a quarter, a half and all.",
    )
    bandwidth = serializers.FloatField(
        min_value=1e-6,
        max_value=10,
        **optional(),
        help_text="Width of the window in which JumpReLU's thresholds learn.",
    )
    aux_k = serializers.IntegerField(
        min_value=0,
        max_value=2**16,
        **optional(),
        help_text="Dead latents per token in the auxiliary loss; empty: half the model's width, 0: none.",
    )
    aux_coefficient = serializers.FloatField(
        min_value=0, max_value=10, **optional(), help_text="Weight of the auxiliary loss; empty: 1/32."
    )
    dead_after_tokens = serializers.IntegerField(
        min_value=1,
        max_value=10**12,
        **optional(),
        help_text="A latent silent for so many tokens is dead; empty: a tenth of the run, at most 10 M.",
    )
    resample_every = serializers.IntegerField(
        min_value=1,
        max_value=10**9,
        **optional(),
        help_text="Steps after which dead latents of the L1 kinds get new directions, in the first 70 % of the run.",
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
        from jobs.interp.sae import choices

        errors = choices.errors(data)
        if bool(data["activations"]) == bool(data["model"]):
            words = "Name either the activations to train on or a model to take them from"
            errors["activations"] = [f"{words}, not both." if data["model"] else f"{words}."]
        elif data["activations"]:
            for name in OF_TEXT:
                if data[name] != self.fields[name].default:
                    errors[name] = [
                        f"{name} is for trainings straight from a model; the activations have theirs."
                    ]
        if data["tokens"] < data["batch_size"]:
            errors["tokens"] = [f"{data['tokens']} tokens are less than one batch of {data['batch_size']}."]
        if 0 < data["ce_tokens"] < FEWEST_CE_TOKENS:
            words = f"A loss on {data['ce_tokens']} tokens says nothing"
            errors["ce_tokens"] = [f"{words}; measure on {FEWEST_CE_TOKENS} or more, or on 0: not at all."]
        if errors:
            raise serializers.ValidationError(errors)
        if data["model"] and is_path(data["corpus"]):
            texts.files_at(data["corpus"], data["split"])
        return data


class Kind(JobKind):
    label = "Train SAE"
    stage = "saes"
    description = (
        "Train sparse autoencoders or transcoders, one or several on one reading of the data, measure them on held-out "
        "text and export them in SAELens' layout."
    )
    makes = ("sae",)
    sweep = (
        "site",
        "architecture",
        "d_sae",
        "k",
        "l1",
        "l0",
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
        from jobs.interp.sae import choices

        if "activations" in inputs:
            manifest = inputs["activations"].manifest
            found = manifest["sites"]
            refuse(
                [m for m in choices.members(params) if not choices.places(m, found)],
                params,
                held_words(found),
            )
            extras.require_for(manifest["model"] if params["ce_tokens"] else {})
        elif "model" in inputs:
            extras.require_for(inputs["model"].manifest)
            check_model(params, inputs)

    def estimate(self, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        from jobs.interp.sae.estimates import training

        on_cpu = estimates.runs_on_cpu()
        return Estimate.of(**training(params, manifests(inputs), CE_ROWS, on_cpu=on_cpu))

    def estimate_stage(self, stage: str, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> Estimate:
        """Of a finalizing, in the host's memory: the checkpoint, and the widest of the measurements."""
        from jobs.interp.sae.estimates import finalizing

        return Estimate.of(**finalizing(params, manifests(inputs), CE_ROWS))

    def suggest(self, reason: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Of a loss that is not a number, half of each learning rate, also of those that nobody gave."""
        return slower(params) if reason == "non_finite" else super().suggest(reason, params)

    def run(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        ground, source, model = opened(context, params)
        return published(context, params, ground, source, model, trained(context, params, ground, source))

    def finalize(self, context: Context, params: Mapping[str, Any]) -> dict[str, Any]:
        ground, source, model = opened(context, params)
        return published(context, params, ground, source, model, as_far_as_it_came(context, params, ground))


# At submit ----------------------------------------------------------------------------------------------
def refuse(members: Sequence[Mapping[str, Any]], params: Mapping[str, Any], words: str) -> None:
    """A `ValidationError` for members that cannot be trained, at the parameter that asked for them."""
    if members and params.get("variants"):
        raise serializers.ValidationError({"variants": [f"{member['name']}: {words}" for member in members]})
    if members:
        raise serializers.ValidationError({"site": [words]})


def held_words(sites: Sequence[Mapping[str, Any]]) -> str:
    there = ", ".join(f"block {site['block']} {site['site']}" for site in sites)
    return f"The activations hold {there}; name one of them. A transcoder takes mlp_in and mlp_out of a block together."


def check_model(params: Mapping[str, Any], inputs: Mapping[str, Input]) -> None:
    """Sites, text and context against a model that is to be run."""
    from jobs.interp.sae import choices

    model, members = inputs["model"], choices.members(params)
    refuse([m for m in members if not m.get("site")], params, "Name the site: a model has many.")
    for member in members:
        for place in choices.reads(member):
            if words := missing_words(member["site"]["block"], place, model.manifest):
                refuse([member], params, words)
    errors = texts.errors(params, inputs, model) | context_errors(params["context_size"], model)
    if errors:
        raise serializers.ValidationError(errors)


def manifests(inputs: Mapping[str, Input]) -> dict[str, Mapping[str, Any]]:
    return {name: given.manifest for name, given in inputs.items()}


def slower(params: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the learning rate, and of those that variants have of their own; no less than the kind takes."""
    from jobs.interp.sae import choices

    fields, variants = SaeTrainingParams(), params.get("variants") or [{}]
    found: dict[str, Any] = {}
    if any(variant.get("lr") is None for variant in variants):
        rate = params.get("lr")
        if rate is None:
            members = zip(choices.members(params), variants, strict=True)
            rate = min(member["lr"] for member, variant in members if variant.get("lr") is None)
            rate = float(f"{rate:.3g}")
        found = halved(fields, {"lr": rate}, "lr")
    halves = [variant | halved(fields, variant, "lr") for variant in variants]
    return found | ({"variants": halves} if halves != variants else {})


# In the work --------------------------------------------------------------------------------------------
def opened(
    context: Context, params: Mapping[str, Any]
) -> tuple[Ground, Source, Callable[[], LanguageModel] | None]:
    """What the SAEs are trained on, and how to come by the model that the loss through them is measured with."""
    if "activations" in context.inputs:
        return on_activations(context, params)
    return on_model(context, params)


def on_activations(
    context: Context, params: Mapping[str, Any]
) -> tuple[Ground, Source, Callable[[], LanguageModel] | None]:
    from jobs.interp.sae.grounds import Ground
    from jobs.interp.sae.sources import Stored
    from jobs.interp.sizes import MEASURED_ROWS

    given = context.input("activations")
    folder = model_folder(context, given) if params["ce_tokens"] else None
    ground = Ground.stored(params, given.name, given.manifest)
    source = Stored(
        given.path,
        {site: entry["folder"] for site, entry in ground.places.items()},
        ground.views,
        batch_size=params["batch_size"],
        seed=ground.order_seed,
        rows=MEASURED_ROWS,
        heldout_fraction=params["heldout_fraction"],
        outlier_ratio=params["outlier_ratio"],
    )
    loading = partial(loaded, context, folder, given.manifest["model"]) if folder else None
    return ground, source, loading


def on_model(
    context: Context, params: Mapping[str, Any]
) -> tuple[Ground, Source, Callable[[], LanguageModel] | None]:
    from jobs.interp import tokens
    from jobs.interp.sae.estimates import needed_tokens
    from jobs.interp.sae.grounds import Ground
    from jobs.interp.sae.sources import Running, held

    given, corpus = context.input("model"), texts.opened(params, context)
    model = loaded(context, given.path, facts_of(given))
    model.require_context(params["context_size"])
    bos = model.bos_id if params["prepend_bos"] else None
    rows = tokens.RowStream(
        corpus.documents,
        model.tokenizer,
        params["context_size"],
        max_tokens=needed_tokens(params),
        bos_id=bos,
        d_vocab=model.d_vocab,
    )
    ground = Ground.live(params, model, given.id, facts_of(given), corpus.name, bos is not None)
    read = 0

    def on_tokens(count: int, standing: Standing) -> None:
        nonlocal read
        read += count
        done, total, unit, stage = standing
        context.report(done, total, unit, stage=stage, message=f"{read} tokens read by the model")

    source = Running(
        model,
        held(rows, context.should_stop),
        model.special_ids if params["exclude_special"] else (),
        ground.views,
        context.checkpoints / ".measured.json",  # hidden: it is no checkpoint that a retry could go on from
        batch_size=params["batch_size"],
        seed=ground.order_seed,
        rows_per_pass=params["model_batch_size"],
        heldout_fraction=params["heldout_fraction"],
        outlier_ratio=params["outlier_ratio"],
        on_tokens=on_tokens,
        should_stop=context.should_stop,
    )
    return ground, source, (lambda: model) if params["ce_tokens"] else None


def loaded(context: Context, folder: Path, facts: Mapping[str, Any]) -> LanguageModel:
    from jobs.interp import models

    dtype = models.compute_dtype(facts["dtype"], context.device)
    return models.load(folder, device=context.device, dtype=dtype, name=facts["name"])


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


def trained(context: Context, params: Mapping[str, Any], ground: Ground, source: Source) -> Together:
    """The trainings at their last step, begun here or gone on with from a checkpoint."""
    from jobs.interp.sae import together

    streams = [source.stream(view) for view in ground.views]
    norms = [source.mean_norms(view) for view in ground.views]
    run = together.begin_or_resume(
        ground.settings(), streams, norms, context.checkpoints, device=context.device
    )

    def progress(step: int, total: int, found: All, speed: float) -> None:
        source.stands(step, total, "steps", "train")
        context.report(step, total, "steps", stage="train", message=words_of(found, source.epoch(step - 1)))
        context.metric(step, **ground.named(found), tokens_per_s=speed)

    run.run(
        dict(enumerate(streams)),
        context.checkpoints,
        checkpoint_every=params["checkpoint_every"],
        on_progress=progress,
        should_stop=context.should_stop,
    )
    return run


def words_of(found: All, epoch: int) -> str:
    values = sorted(metrics["fvu"] for metrics in found.values())
    said = f"FVU {values[0]:.3f}" + (f" to {values[-1]:.3f}" if len(values) > 1 else "")
    return f"{said} · pass {epoch + 1}" if epoch else said


def as_far_as_it_came(context: Context, params: Mapping[str, Any], ground: Ground) -> Together:
    """The trainings as their newest checkpoint has them."""
    from jobs.interp.sae.together import Together, saved

    found = Together.resume(saved(context.checkpoints)[-1], ground.settings(), device=context.device)
    if found.step == 0:
        raise JobRejected("The training ended before its first step, so there is no SAE to keep.")
    return found


def published(
    context: Context,
    params: Mapping[str, Any],
    ground: Ground,
    source: Source,
    model: Callable[[], LanguageModel] | None,
    run: Together,
) -> dict[str, Any]:
    """Measure the SAEs, write them down as artifacts, and say what came of them."""
    from jobs.interp.sae import assess, results

    source.stands(0, 0, "", "measure")
    context.report(0, 0, stage="measure")
    source.release()
    reports = assess.assess(
        run.trainings, dict(enumerate(ground.views)), source, should_stop=context.should_stop
    )
    if model is not None:
        losses = measured_loss(context, params, ground, source, model(), run)
        reports = {number: report.with_cross_entropy(losses[number]) for number, report in reports.items()}
    found = results.of(ground, run, reports)
    for number, report in reports.items():
        folder = context.artifact("sae", found[number]["artifact"], results.manifest(ground, found[number]))
        results.export(folder, ground, number, run.trainings[number], report, found[number])
    results.write_histogram(context.out, ground, reports)
    return results.together(ground, found)


def measured_loss(
    context: Context,
    params: Mapping[str, Any],
    ground: Ground,
    source: Source,
    model: LanguageModel,
    run: Together,
) -> dict[int, CrossEntropy]:
    """The model's loss on held-out text as it is, through each SAE, and without its site."""
    from jobs.interp.sae.splice import Splice, cross_entropies

    text = source.heldout_text(params["ce_tokens"])
    splices = {
        number: Splice(ground.views[number][0], ground.views[number][-1], training.folded())
        for number, training in run.trainings.items()
    }

    def progress(tokens: int) -> None:
        context.report(tokens, text.tokens, "tokens", stage="loss on held-out text")

    found = cross_entropies(
        model,
        list(splices.values()),
        text.batches(CE_ROWS, model.pad.id),
        excluded_ids=model.special_ids if ground.exclude_special else (),
        limits=source.limits(),
        on_batch=progress,
        should_stop=context.should_stop,
    )
    return dict(zip(splices, found, strict=True))

"""What a kind refuses, field by field, before anything runs; and that saying so needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rest_framework.exceptions import ValidationError

from jobs import registry
from jobs.estimates import formula
from jobs.kind import Input

MODEL = {
    "n_layers": 3,
    "d_model": 16,
    "d_vocab": 64,
    "max_positions": 32,
    "parameters": 10_000,
    "bytes": 40_000,
    "dtype": "float32",
}
ACTIVATIONS = {
    "sites": [
        {"block": 1, "site": "resid_post", "folder": "a"},
        {"block": 2, "site": "resid_post", "folder": "b"},
    ],
    "d_model": 16,
    "tokens": 2000,
    "dtype": "float32",
    "context_size": 32,
    "model": MODEL,
}
TRAINING = {"activations": "a", "d_sae": 64, "k": 4, "site": {"block": 1}}


def refused(kind: str, inputs: dict[str, Input] | None = None, **params: Any) -> dict[str, str]:
    """Field errors of validation and check, as text."""
    found = registry.get(kind)
    serializer = found.Params(data=params)
    try:
        serializer.is_valid(raise_exception=True)
        found.check(serializer.validated_data, inputs or {})
    except ValidationError as error:
        return {field: str(value) for field, value in error.detail.items()}
    return {}


def given(parameter: str, manifest: dict[str, Any]) -> dict[str, Input]:
    return {parameter: Input("id", "type", "tiny", Path("/nowhere"), manifest)}


@pytest.mark.parametrize(
    "source",
    [
        "https://example.org/model",
        "file:///etc/passwd",
        "just-a-name",
        "a/b/c",
        "../up",
        "owner/na me",
        "",
        "-a/b",
    ],
)
def test_a_source_that_is_none_is_refused(source: str) -> None:
    assert "source" in refused("model_download", source=source)


@pytest.mark.parametrize("source", ["demo", "openai-community/gpt2", "a/b.c_d-e"])
def test_a_source_that_is_one_is_taken(source: str) -> None:
    assert refused("model_download", source=source) == {}


@pytest.mark.parametrize("path", ["/etc", "~/.ssh", "{root}/../secret", "{root}/missing", "{root}/link"])
def test_only_import_folders_are_read(import_root: Path, path: str) -> None:
    (import_root.parent / "secret").mkdir()
    (import_root / "link").symlink_to(import_root.parent / "secret")
    assert "source" in refused("model_download", source=path.format(root=import_root))
    corpus = path.format(root=import_root)
    assert "corpus" in refused("activation_extraction", model="m", sites=[{"block": 0}], corpus=corpus)


def test_a_folder_that_is_no_model_is_refused(import_root: Path) -> None:
    (import_root / "empty").mkdir()
    assert "config.json" in refused("model_download", source=str(import_root / "empty"))["source"]


def test_a_context_over_the_limit_is_refused_at_submit_f09() -> None:
    params = {"model": "m", "sites": [{"block": 0}], "context_size": 40}
    error = refused("activation_extraction", given("model", MODEL), **params)["context_size"]
    assert "40" in error
    assert "32" in error
    assert "tiny" in error


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([{"block": 3}], "blocks 0 to 2"),
        ([], "empty"),
        ([{"block": -1}], "greater than or equal to 0"),
        ([{"block": 1, "site": "head_out"}], "not a valid choice"),
        ([{"block": 1}, {"block": 1}], "twice"),
        ("all", "list"),
    ],
)
def test_sites_that_cannot_be_read_are_refused(sites: Any, words: str) -> None:
    errors = refused("activation_extraction", given("model", MODEL), model="m", sites=sites)
    assert words in errors["sites"]


#: What is for trainings straight from a model, and nothing that stored activations could follow.
TEXT = {
    "corpus": "hf:owner/name",
    "field": "body",
    "split": "test",
    "context_size": 16,
    "max_tokens": 1000,
    "model_batch_size": 4,
    "exclude_special": False,
    "prepend_bos": False,
}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"k": 65}, "k"),
        ({"k": 0}, "k"),
        ({"d_sae": 1}, "d_sae"),
        ({"lr": 0}, "lr"),
        ({"ce_tokens": 1}, "ce_tokens"),
        ({"ce_tokens": 15}, "ce_tokens"),
        ({"lr": float("nan")}, "lr"),
        ({"tokens": 100, "batch_size": 4096}, "tokens"),
        ({"architecture": "magic"}, "architecture"),
        ({"site": {"block": 0}}, "site"),
        ({"site": None}, "site"),
        ({"activations": "../a"}, "activations"),
        *[({name: value}, name) for name, value in TEXT.items()],
    ],
)
def test_training_parameters_are_checked_by_field(params: dict[str, Any], field: str) -> None:
    assert list(refused("sae_training", given("activations", ACTIVATIONS), **(TRAINING | params))) == [field]


def test_the_site_must_be_named_where_there_are_several() -> None:
    params = {key: value for key, value in TRAINING.items() if key != "site"}
    error = refused("sae_training", given("activations", ACTIVATIONS), **params)["site"]
    assert "block 1 resid_post, block 2 resid_post" in error
    assert refused("sae_training", given("activations", ACTIVATIONS), **TRAINING) == {}


def test_activations_of_one_site_are_not_taken_for_another_f02() -> None:
    """They hold the stream after blocks 1 and 2; the MLP's output there is something else."""
    asked = TRAINING | {"site": {"block": 1, "site": "mlp_out"}}
    error = refused("sae_training", given("activations", ACTIVATIONS), **asked)["site"]
    assert "block 1 resid_post, block 2 resid_post" in error


PAIRED = ACTIVATIONS | {
    "sites": [{"block": 1, "site": site, "folder": site} for site in ("mlp_in", "mlp_out", "resid_post")]
}
TRANSCODER = {"architecture": "transcoder", "k": None, "site": {"block": 1, "site": "mlp_in"}}
OF_MODEL = {"model": "m", "d_sae": 64, "site": {"block": 1}, "context_size": 16}


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        (
            {"context_size": 16},
            "context_size",
            "context_size is for trainings straight from a model; the activations have theirs.",
        ),
        ({"l1": 1.0}, "l1", "topk does not take l1; standard, gated, transcoder, skip_transcoder do"),
        ({"architecture": "jumprelu"}, "k", "jumprelu does not take k; topk, batchtopk"),
        ({"architecture": "jumprelu", "k": None}, "target_l0", "64; of 64 latents"),
        ({"architecture": "gated", "k": None, "aux_k": 3}, "aux_k", "gated does not take aux_k"),
        ({"resample_every": 5}, "resample_every", "topk does not take resample_every"),
        (
            {"architecture": "transcoder", "k": None},
            "site",
            "mlp_out of a block; name one of them, not resid_post",
        ),
        (
            {"architecture": "transcoder", "k": None, "site": {"block": 1, "site": "mlp_in"}},
            "site",
            "mlp_in and mlp_out",
        ),
        ({"architecture": "matryoshka_batchtopk", "widths": [32, 16]}, "widths", "rise"),
        ({"architecture": "matryoshka_batchtopk", "widths": [32, 65]}, "widths", "at most at 64"),
        ({"model": "m"}, "activations", "not both"),
        ({"variants": []}, "variants", "empty"),
        ({"variants": [{"k": 4}, {"k": 4}]}, "variants", "same name"),
        ({"variants": [{"k": 4}, {"k": 65}]}, "variants", "k 65: k is 65, but there are only 64"),
        (
            {"variants": [{"k": 4}, {"tokens": 5}]},
            "variants",
            "tokens: an SAE can have of its own name, site",
        ),
        ({"variants": [{"architecture": "jumprelu", "k": 3}]}, "variants", "jumprelu does not take k"),
        ({"variants": [{"site": {"block": 0}}]}, "variants", "b0: The activations hold block 1 resid_post"),
        ({"variants": [{"name": "a[b]"}]}, "variants", "valid"),
        ({"l0": 1.0, "variants": [{"k": 4}, {"k": 5}]}, "l0", "topk does not take l0; jumprelu does"),
    ],
)
def test_what_an_architecture_does_not_take_is_refused_in_words(
    params: dict[str, Any], field: str, words: str
) -> None:
    errors = refused("sae_training", given("activations", ACTIVATIONS), **(TRAINING | params))
    assert words in errors[field], errors


def test_values_for_all_are_for_those_that_take_them() -> None:
    """k stands for the TopK kinds among several; a penalised one beside them leaves it out."""
    from jobs.interp.sae import choices

    variants = [{"k": 8}, {"architecture": "jumprelu", "l0": 2.0}, {"architecture": "standard"}, {"lr": 1e-3}]
    asked = TRAINING | {"variants": variants, "target_l0": 8}
    assert refused("sae_training", given("activations", ACTIVATIONS), **asked) == {}
    serializer = registry.get("sae_training").Params(data=asked)
    serializer.is_valid(raise_exception=True)
    found = choices.members(serializer.validated_data)
    assert [(m["name"], m["k"], m["l0"], m["l1"]) for m in found] == [
        ("k 8", 8, None, None),
        ("jumprelu, l0 2", None, 2.0, None),
        ("standard", None, None, 5.0),
        ("lr 0.001", 4, None, None),
    ]


def test_the_learning_rate_is_by_latents_and_steps_where_none_is_given() -> None:
    from jobs.interp.sae.choices import default_lr

    assert default_lr(2**14, 5000) == default_lr(2**14, 10**6) == pytest.approx(2e-4)
    assert default_lr(2**16, 10**6) == pytest.approx(1e-4)
    assert default_lr(2304, 293) == pytest.approx(2e-4 * (16384 / 2304) ** 0.5 * (5000 / 293) ** 0.5)
    assert default_lr(64, 1) == 4e-3


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ({"lr": 0.01}, {"lr": 0.005}),
        ({}, {"lr": 0.002}),  # the highest that no short run exceeds by itself is 0.004
        ({"lr": 1e-7}, {}),
        (
            {"variants": [{"k": 2}, {"k": 4, "lr": 0.01}]},
            {"lr": 0.002, "variants": [{"k": 2}, {"k": 4, "lr": 0.005}]},
        ),
        (
            {"lr": 0.1, "variants": [{"lr": 0.02}, {"lr": 0.01}]},
            {"variants": [{"lr": 0.01}, {"lr": 0.005}]},
        ),
        # That of the widest, which is the lowest: 2e-4·√(2¹⁴/2²⁰)·√(5000/10).
        ({"variants": [{"d_sae": 2**20}, {"k": 2}]}, {"lr": 0.0002795}),
    ],
)
def test_after_a_loss_that_is_no_number_half_the_rate_that_was_used_is_tried(
    asked: dict[str, Any], suggested: dict[str, Any]
) -> None:
    kind = registry.get("sae_training")
    serializer = kind.Params(data=TRAINING | {"tokens": 40_960} | asked)
    serializer.is_valid(raise_exception=True)
    assert kind.suggest("non_finite", serializer.validated_data) == suggested
    assert kind.suggest("host_out_of_memory", serializer.validated_data) == {"batch_size": 2048}


def test_a_transcoder_takes_the_pair_of_a_block() -> None:
    asked = {"activations": "a", "architecture": "transcoder", "d_sae": 64}
    assert refused("sae_training", given("activations", PAIRED), **asked) == {}
    both = asked | {"variants": [{}, {"architecture": "topk", "site": {"block": 1}}]}
    assert "SAE 1" in refused("sae_training", given("activations", ACTIVATIONS), **both)["variants"]
    assert refused("sae_training", given("activations", PAIRED), **both) == {}


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"site": {"block": 3}}, "site", "blocks 0 to 2"),
        ({"context_size": 40}, "context_size", "limit of 32 that tiny"),
        ({"corpus": "/etc/passwd"}, "corpus", "MISTUDIO_IMPORT_ROOTS"),
        ({"model": None}, "activations", "Name either the activations to train on or a model"),
    ],
)
def test_a_training_straight_from_a_model_is_checked_against_it(
    params: dict[str, Any], field: str, words: str
) -> None:
    errors = refused("sae_training", given("model", MODEL), **(OF_MODEL | params))
    assert words in errors[field], errors


def test_an_sae_says_the_same_of_its_model_whether_activations_were_stored_or_not() -> None:
    from jobs.kinds import activation_extraction, sae_training

    [model] = given("model", MODEL | {"quantization": {"scheme": "nf4"}}).values()
    assert sae_training.facts_of(model) == activation_extraction.facts_of(model)
    assert sae_training.facts_of(model)["quantization"] == {"scheme": "nf4"}


def test_a_model_has_many_sites() -> None:
    params = {key: value for key, value in OF_MODEL.items() if key != "site"}
    assert "Name the site" in refused("sae_training", given("model", MODEL), **params)["site"]
    assert refused("sae_training", given("model", MODEL), **OF_MODEL) == {}


def test_the_architectures_are_those_of_the_mathematics() -> None:
    from jobs.interp.sae.options import NAMES
    from jobs.kinds.sae_training import ARCHITECTURES

    assert set(ARCHITECTURES) == set(NAMES)


def test_saes_that_are_trained_together_add_up() -> None:
    kind = registry.get("sae_training")

    def need(**params: Any) -> Any:
        serializer = kind.Params(data=TRAINING | {"ce_tokens": 0} | params)
        serializer.is_valid(raise_exception=True)
        return kind.estimate(serializer.validated_data, given("activations", ACTIVATIONS))

    one, other = need(), need(d_sae=128)
    both = need(variants=[{}, {"d_sae": 128}])
    for part in ("sae", "adam"):
        assert both.breakdown[part] == one.breakdown[part] + other.breakdown[part]
    assert both.breakdown["batch"] == other.breakdown["batch"]  # their steps come one after another
    assert both.disk_bytes == one.disk_bytes + other.disk_bytes
    assert both.work == one.work + other.work


def test_estimates_grow_with_what_they_are_about() -> None:
    kind = registry.get("sae_training")

    def need(**params: Any) -> tuple[int, int]:
        serializer = kind.Params(data=TRAINING | params)
        serializer.is_valid(raise_exception=True)
        found = kind.estimate(serializer.validated_data, given("activations", ACTIVATIONS))
        assert found.memory_bytes == sum(found.breakdown.values())
        return found.memory_bytes, found.disk_bytes or 0

    assert need(d_sae=128) > need(d_sae=64)
    assert need(batch_size=8192, ce_tokens=0) > need(batch_size=4096, ce_tokens=0)
    assert need(ce_tokens=4096) > need(ce_tokens=0)  # the model is loaded then
    weights = 4 * (2 * 16 * 64 + 64 + 16)
    assert need()[1] == 7 * weights


SMOLLM2 = MODEL | {"n_layers": 30, "d_model": 576, "d_vocab": 49152, "max_positions": 8192}
SMOLLM2 |= {"parameters": 134_515_008, "bytes": 269_030_016, "dtype": "bfloat16"}
STORED = ACTIVATIONS | {
    "sites": ACTIVATIONS["sites"][:1],
    "d_model": 576,
    "tokens": 16_000,
    "dtype": "bfloat16",
}
STORED |= {"context_size": 128, "model": SMOLLM2}
READING: dict[str, Any] = {"model": "m", "sites": [{"block": 8}], "context_size": 128}
WIDE: dict[str, Any] = {"activations": "a", "d_sae": 2304, "batch_size": 2048}
WIDER = WIDE | {"d_sae": 4608, "batch_size": 4096}


@pytest.mark.parametrize(
    ("kind", "params", "peak_megabytes"),
    [
        ("activation_extraction", READING | {"batch_size": 8}, 883),
        ("activation_extraction", READING | {"batch_size": 16}, 963),
        ("activation_extraction", READING | {"batch_size": 128}, 1234),
        ("sae_training", WIDE, 1458),
        ("sae_training", WIDE | {"ce_tokens": 0}, 348),
        ("sae_training", WIDER, 1163),
        ("sae_training", WIDER | {"ce_tokens": 0}, 437),
    ],
)
def test_an_estimate_is_not_below_what_was_measured(
    kind: str, params: dict[str, Any], peak_megabytes: int
) -> None:
    """Peaks of SmolLM2-135M on a CPU by `bench.estimates`; the reserve is for what those runs did not have, as
    many dead latents."""
    found = registry.get(kind)
    serializer = found.Params(data=params)
    serializer.is_valid(raise_exception=True)
    inputs = given("model", SMOLLM2) | given("activations", STORED)
    need = formula(found, serializer.validated_data, inputs).memory_bytes
    assert need is not None
    assert 1.0 < need / 1e6 / peak_megabytes < 1.45


def test_kinds_are_listed_checked_and_estimated_without_torch() -> None:
    program = """
import sys, django
django.setup()
from pathlib import Path
from jobs import registry
from jobs.kind import Input
from tests.kinds.test_params import MODEL, ACTIVATIONS, TRAINING
given = {"model_download": {"source": "demo"}, "sae_training": TRAINING,
         "activation_extraction": {"model": "m", "sites": [{"block": 0}], "context_size": 8}}
inputs = {name: Input("1", name, name, Path("."), manifest)
          for name, manifest in {"model": MODEL, "activations": ACTIVATIONS}.items()}
for name, params in given.items():
    kind = registry.get(name)
    serializer = kind.Params(data=params)
    serializer.is_valid(raise_exception=True)
    kind.check(serializer.validated_data, inputs)
    kind.estimate(serializer.validated_data, inputs)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    environment_program = "import tests.environment\n" + program
    found = subprocess.run(
        [sys.executable, "-c", environment_program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"

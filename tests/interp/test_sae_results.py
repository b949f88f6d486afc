"""What a training of several SAEs says when a weight does nothing, and what they are called."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from jobs.fields import ArtifactField
from jobs.interp.models import LanguageModel
from jobs.interp.sae import results
from jobs.interp.sae.grounds import Ground
from jobs.interp.sae.options import Options
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.train import Training
from tests.interp.conftest import quality

PARAMS = {
    "architecture": "jumprelu",
    "d_sae": 24,
    "tokens": 6400,
    "batch_size": 32,
    "seed": 0,
    "order_seed": None,
}
SITES = [
    {"block": 1, "site": "resid_post", "hook_name": "blocks.1.hook_resid_post", "module": "m", "folder": "a"}
]
MANIFEST = {"sites": SITES, "model": {}, "model_artifact": "1", "corpus": {"name": "c"}, "context_size": 8}
MANIFEST |= {"prepend_bos": True, "exclude_special": True}


def ground(*variants: dict[str, Any], **params: Any) -> Ground:
    return Ground.stored(PARAMS | {"variants": list(variants)} | params, "alice/acts", MANIFEST)


def trained(weight: float, x: torch.Tensor) -> dict[str, Any]:
    """L0 after 200 steps on X32 at a weight."""
    options = Options(architecture="jumprelu", l0=weight, target_l0=8)
    settings = Settings(24, options, tokens=200 * 32, batch_size=32, lr=1e-3)
    training = Training.begin(settings, x, [x.norm(dim=1).mean().item()])
    for _ in range(200):
        training.advance(x)
    return {"fvu": 0.5, "l0": quality(training.finished(), [x]).l0}


def test_a_weight_that_does_nothing_any_more_is_told_f26(X32: torch.Tensor) -> None:
    """Weights 0.1, 1 and 10: what L0 each gives is reported; where ten times the weight moves it less than 2 %, so."""
    weights = (0.1, 1.0, 10.0)
    found = [trained(weight, X32) for weight in weights]
    place = ground(*[{"l0": weight} for weight in weights])
    l0 = [facts["l0"] for facts in found]
    assert l0[0] > l0[1]
    moved = {(a, b): abs(l0[a] - l0[b]) / max(l0[a], l0[b], 1e-12) for a, b in ((0, 1), (0, 2), (1, 2))}
    words = results.saturated(place, found)
    for (one, other), share in moved.items():
        assert (f"between the weights {weights[one]:g} and {weights[other]:g} of jumprelu" in words) == (
            share < 0.02
        )


def test_only_weights_that_are_tenfold_apart_are_compared() -> None:
    same = {"fvu": 0.5, "l0": 7.0}
    words = results.saturated(ground({"l0": 1.0}, {"l0": 10.0}), [same, same | {"l0": 7.1}])
    assert words.startswith(
        "L0 moved by 1.4 % between the weights 1 and 10 of jumprelu: the penalty is saturated."
    )
    assert results.saturated(ground({"l0": 1.0}, {"l0": 9.0}), [same, same]) == ""
    assert results.saturated(ground({"l0": 1.0}, {"l0": 10.0}), [same, same | {"l0": 6.0}]) == ""
    assert results.saturated(ground({"l0": 1.0, "lr": 0.1}, {"l0": 10.0}), [same, same]) == ""
    counted = ground({"k": 1}, {"k": 10}, architecture="topk")
    assert results.saturated(counted, [same, same]) == ""


def test_artifacts_of_one_job_have_names_of_their_own() -> None:
    names = ground(
        {"l0": 1.0}, {"l0": 2.0}, {"l0": 2.0, "seed": 3}, {"architecture": "topk", "k": 4}
    ).artifact_names()
    assert names == [
        "acts-jumprelu-24-l0-1",
        "acts-jumprelu-24-l0-2-l0-2",
        "acts-jumprelu-24-l0-2-l0-2-seed-3",
        "acts-topk-24-k4",
    ]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("corpus", "told"),
    [
        ("owner/stories@0123456789ab", "stories"),
        ("my corpus.jsonl.gz", "my-corpus.jsonl"),
        ("a..b ü.txt", "a.b"),
        ("english", "english"),
    ],
)
def test_saes_have_names_that_parameters_take(LL: LanguageModel, corpus: str, told: str) -> None:
    """Of a data set of the Hub, whose name has `/` and `@`, and of files that people name as they like."""
    asked = PARAMS | {"l0": 1.0, "site": {"block": 1, "site": "resid_post"}, "context_size": 8}
    live = Ground.live(asked | {"exclude_special": True}, LL, "1", {"name": "alice/ll"}, corpus, True)
    stored = Ground.stored(asked, f"alice/ll-{corpus}-b1", MANIFEST)
    assert live.artifact_names() == [f"ll-{told}-b1-jumprelu-24-l0-1"]
    for [name] in (live.artifact_names(), stored.artifact_names()):
        assert ArtifactField("sae").to_internal_value(name) == name


def test_the_order_of_the_data_is_the_jobs(X32: torch.Tensor) -> None:
    assert ground({"seed": 5}, {"seed": 6}).order_seed == 0
    assert ground({"seed": 5}, {"seed": 6}, order_seed=9).order_seed == 9
    settings = ground({"seed": 5}, {"seed": 6}).settings()
    assert [each.seed for each in settings] == [5, 6]
    assert dataclasses.replace(settings[0], seed=6) == settings[1]


def test_metrics_bear_the_name_of_their_sae() -> None:
    several = ground({"l0": 1.0}, {"name": "other"})
    assert several.named({0: {"fvu": 1.0}, 1: {"fvu": 2.0}}) == {"fvu[l0 1]": 1.0, "fvu[other]": 2.0}
    assert Ground.stored(PARAMS, "acts", MANIFEST).named({0: {"fvu": 1.0}}) == {"fvu": 1.0}

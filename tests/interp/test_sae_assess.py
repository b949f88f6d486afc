"""The report on finished trainings: which vectors, and in which units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jobs.interp.errors import Stopped
from jobs.interp.sae.assess import Report, assess
from jobs.interp.sae.options import Options
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.sources import Stored
from jobs.interp.sae.splice import CrossEntropy
from jobs.interp.sae.together import Together
from jobs.interp.sae.train import Training, sampled
from jobs.interp.site import Site
from tests.interp.conftest import quality

VIEW = (Site(1),)


@pytest.fixture
def source(tmp_path: Path) -> Stored:
    """640 vectors of 20 documents, seven long and off centre, so that a scale forgotten anywhere shows."""
    draw = torch.Generator().manual_seed(0)
    acts = 7 * (torch.randn(640, 8, generator=draw) + 0.5)
    acts[:, 0] *= torch.arange(640) % 20 / 10  # documents differ, so parts do
    document = torch.arange(640, dtype=torch.int32) % 20
    tensors = {"acts": acts, "norms": acts.norm(dim=1), "document": document}
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "shard_00000.safetensors")
    return Stored(
        tmp_path,
        {Site(1): "a"},
        [VIEW],
        batch_size=32,
        seed=0,
        rows=64,
        heldout_fraction=0.2,
        outlier_ratio=10.0,
    )


@pytest.fixture
def run(source: Stored) -> Together:
    """Two SAEs on the same vectors."""
    settings = Settings(d_sae=24, options=Options(k=4), tokens=30 * 32, batch_size=32, lr=1e-2)
    trainings = {
        number: Training.begin(each, *sampled([source.stream(VIEW)], each), source.mean_norms(VIEW))
        for number, each in enumerate([settings, Settings(16, Options(k=2), 30 * 32, batch_size=32)])
    }
    together = Together(trainings)
    together.run(dict.fromkeys(trainings, source.stream(VIEW)))
    source.release()
    return together


@pytest.fixture
def training(run: Together) -> Training:
    return run.trainings[0]


@pytest.fixture
def report(run: Together, source: Stored) -> Report:
    return assess(run.trainings, {0: VIEW, 1: VIEW}, source)[0]


def test_it_measures_what_is_exported_on_held_out_vectors(
    report: Report, training: Training, source: Stored
) -> None:
    parts = source.splits[VIEW]
    found = quality(training.finished(), parts.heldout.batches(64))
    assert training.scales[0] < 0.3
    assert (report.heldout.fvu, report.heldout.l0) == pytest.approx((found.fvu, found.l0), rel=1e-5)
    assert (report.heldout.cosine, report.heldout.norm_ratio) == pytest.approx(
        (found.cosine, found.norm_ratio), rel=1e-5
    )
    other = quality(training.finished(), parts.train.batches(64))
    assert report.heldout.fvu != pytest.approx(other.fvu, rel=1e-2)
    assert (report.heldout.tokens, report.facts["train_tokens"]) == (len(parts.heldout), len(parts.train))


def test_each_is_measured_as_it_is_alone(run: Together, source: Stored) -> None:
    views = {0: VIEW, 1: VIEW}
    both = assess(run.trainings, views, source)
    for number, training in run.trainings.items():
        alone = assess({number: training}, views, source)[number]
        assert alone.numbers() == both[number].numbers()
    assert both[0].numbers() != both[1].numbers()


def test_copies_are_measured_when_the_moments_are_gone(run: Together, source: Stored) -> None:
    """Both at once would be more than the estimate has: two moments and a copy beside the weights."""
    held: list[int] = []

    def looked() -> bool:
        held.append(sum(len(training.adam.state) for training in run.trainings.values()))
        return False

    assert all(training.adam.state for training in run.trainings.values())
    assess(run.trainings, {0: VIEW, 1: VIEW}, source, should_stop=looked)
    assert held and not any(held)


def test_a_loss_on_no_token_is_none(report: Report) -> None:
    none = report.with_cross_entropy(CrossEntropy(0, 0, 0, 0, tokens=0)).numbers()
    assert (none["ce_clean"], none["ce_recovered"], none["kl"], none["ce_tokens"]) == (None, None, None, 0)
    even = report.with_cross_entropy(CrossEntropy(2, 2, 2, 0, tokens=1)).numbers()
    assert (even["ce_clean"], even["ce_recovered"], even["ce_tokens"]) == (2, None, 1)


def test_it_stops_between_batches(run: Together, source: Stored) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Stopped, match="measured"):
        assess(run.trainings, {0: VIEW, 1: VIEW}, source, should_stop=lambda: next(asked))


def test_the_loss_is_in_the_units_of_the_training(report: Report, training: Training, source: Stored) -> None:
    x = torch.cat(list(source.splits[VIEW].heldout.batches(64))) * training.scales[0]
    with torch.no_grad():
        expected = (training.sae(x) - x).square().sum(1).mean().item()
    assert report.loss == pytest.approx(expected, rel=1e-5)


def test_firing_is_counted_on_training_vectors(report: Report, training: Training, source: Stored) -> None:
    x = torch.cat(list(source.splits[VIEW].train.batches(64)))
    with torch.no_grad():
        fired = (training.finished().encode(x) > 0).sum(0)
    assert torch.equal(report.usage.firings, fired)
    assert report.dead_fraction == (fired == 0).double().mean().item()
    assert 10 ** report.log10_frequencies.max().item() == pytest.approx(fired.max().item() / len(x), rel=1e-4)

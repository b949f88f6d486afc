"""The report on a finished training: which vectors, and in which units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jobs.interp.reading import Split, Store, split
from jobs.interp.sae.assess import Report, assess
from jobs.interp.sae.metrics import quality
from jobs.interp.sae.train import Settings, Training
from jobs.interp.shuffling import Shuffled


@pytest.fixture
def parts(tmp_path: Path) -> Split:
    """640 vectors of 20 documents, seven long and off centre, so that a scale forgotten anywhere shows."""
    draw = torch.Generator().manual_seed(0)
    acts = 7 * (torch.randn(640, 8, generator=draw) + 0.5)
    acts[:, 0] *= torch.arange(640) % 20 / 10  # documents differ, so parts do
    document = torch.arange(640, dtype=torch.int32) % 20
    tensors = {"acts": acts, "norms": acts.norm(dim=1), "document": document}
    save_file(tensors, tmp_path / "shard_00000.safetensors")
    return split(Store(tmp_path), heldout_fraction=0.2)


@pytest.fixture
def training(parts: Split) -> Training:
    settings = Settings(d_sae=24, k=4, tokens=30 * 32, batch_size=32, lr=1e-2)
    stream = Shuffled(parts.train, 32, seed=0)
    training = Training.begin(settings, stream, parts.train.mean_norm())
    training.run(stream)
    return training


@pytest.fixture
def report(training: Training, parts: Split) -> Report:
    return assess(training, parts)


def test_it_measures_what_is_exported_on_held_out_vectors(
    report: Report, training: Training, parts: Split
) -> None:
    found = quality(training.finished(), parts.heldout.batches(64))
    assert training.scale < 0.3
    assert (report.heldout.fvu, report.heldout.l0) == pytest.approx((found.fvu, found.l0), rel=1e-5)
    other = quality(training.finished(), parts.train.batches(64))
    assert report.heldout.fvu != pytest.approx(other.fvu, rel=1e-2)
    assert (report.heldout.tokens, report.train_tokens) == (len(parts.heldout), len(parts.train))


def test_the_loss_is_in_the_units_of_the_training(report: Report, training: Training, parts: Split) -> None:
    x = torch.cat(list(parts.heldout.batches(64))) * training.scale
    with torch.no_grad():
        expected = (training.sae(x) - x).square().sum(1).mean().item()
    assert report.loss == pytest.approx(expected, rel=1e-5)


def test_firing_is_counted_on_training_vectors(report: Report, training: Training, parts: Split) -> None:
    x = torch.cat(list(parts.train.batches(64)))
    with torch.no_grad():
        fired = (training.finished().encode(x) > 0).sum(0)
    assert torch.equal(report.usage.firings, fired)
    assert report.dead_fraction == (fired == 0).double().mean().item()
    assert 10 ** report.log10_frequencies.max().item() == pytest.approx(fired.max().item() / len(x), rel=1e-4)

"""Training: it learns, it is repeatable to the bit, and it stops in order."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.sae.metrics import quality
from jobs.interp.sae.train import Settings, Training, begin_or_resume, saved

SETTINGS = Settings(
    d_sae=24,
    k=4,
    tokens=40 * 32,
    lr=3e-3,
    batch_size=32,
    dead_after_tokens=256,
    checkpoint_every=10,
    log_every=5,
)


class Sparse:
    """Data that 12 directions in 8 dimensions explain, two at a time, seven long and off centre."""

    def __init__(self, size: int = 32) -> None:
        self.size = size
        draw = torch.Generator().manual_seed(0)
        self.directions = torch.nn.functional.normalize(torch.randn(12, 8, generator=draw), dim=1)

    def batch(self, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        which = torch.stack([torch.randperm(12, generator=draw)[:2] for _ in range(self.size)])
        strength = 1 + torch.rand(self.size, 2, 1, generator=draw)
        return 7 * ((strength * self.directions[which]).sum(1) + 0.3)

    def mean_norm(self) -> float:
        return torch.cat([self.batch(step) for step in range(20)]).norm(dim=1).mean().item()


STREAM = Sparse()
MEAN_NORM = STREAM.mean_norm()


def begin(settings: Settings = SETTINGS) -> Training:
    return Training.begin(settings, STREAM, MEAN_NORM)


def equal(one: Training, other: Training) -> bool:
    ours, theirs = one._tensors(), other._tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_learns_what_the_data_are_made_of() -> None:
    settings = dataclasses.replace(SETTINGS, k=2, tokens=600 * 32, lr=1e-2)
    training = begin(settings)
    before = quality(training.finished(), [STREAM.batch(9999)]).fvu
    training.run(STREAM)
    found = quality(training.finished(), [STREAM.batch(9999)])
    assert found.fvu < 0.1 < before
    assert found.l0 == pytest.approx(2, abs=0.05)
    torch.testing.assert_close(training.sae.W_dec.norm(dim=1), torch.ones(24), atol=1e-5, rtol=0)


def test_two_runs_end_with_the_same_bits() -> None:
    one, other = begin(), begin()
    one.run(STREAM)
    other.run(STREAM)
    assert equal(one, other)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one_f25(tmp_path: Path) -> None:
    straight, halted = begin(), begin()
    for training in (straight, halted):
        with torch.no_grad():
            training.sae.b_enc[3] = -1e6  # a latent whose counter matters: dead from the eighth step on
    straight.run(STREAM)
    with pytest.raises(Stopped):
        halted.run(STREAM, tmp_path, should_stop=lambda: halted.step == 20)
    steps: list[int] = []
    again = begin_or_resume(SETTINGS, STREAM, MEAN_NORM, tmp_path)
    assert again.step == 20
    assert equal(again, halted)  # counters and moments included, before anything could hide a difference
    assert again.tokens_since_fired[3] == 20 * 32
    again.run(STREAM, tmp_path, on_progress=lambda step, total, metrics: steps.append(step))
    assert equal(again, straight)
    assert steps == [25, 30, 35, 40]  # goes on at 50 %, not at 0


def test_a_stop_between_checkpoints_loses_nothing(tmp_path: Path) -> None:
    straight, halted = begin(), begin()
    straight.run(STREAM)
    with pytest.raises(Stopped, match="step 18 of 40"):
        halted.run(STREAM, tmp_path, should_stop=lambda: halted.step == 17)
    again = begin_or_resume(SETTINGS, STREAM, MEAN_NORM, tmp_path)
    again.run(STREAM)
    assert again.step == 40
    assert equal(again, straight)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    begin().run(STREAM, tmp_path)
    assert [path.name for path in saved(tmp_path)] == ["step_000000030", "step_000000040"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_000000030", "step_000000040"}


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / ".tmp-abc").mkdir(parents=True)
    assert saved(tmp_path) == []
    assert begin_or_resume(SETTINGS, STREAM, MEAN_NORM, tmp_path).step == 0


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    begin().run(STREAM, tmp_path)
    with pytest.raises(Unusable, match="another k, lr"):
        begin_or_resume(dataclasses.replace(SETTINGS, k=3, lr=1.0), STREAM, MEAN_NORM, tmp_path)


def test_a_loss_that_is_no_number_stops_with_its_step(tmp_path: Path) -> None:
    class Broken(Sparse):
        def batch(self, step: int) -> torch.Tensor:
            return super().batch(step) * (float("nan") if step == 12 else 1.0)

    training = begin()
    with pytest.raises(NonFinite, match="step 13;"):
        training.run(Broken(), tmp_path)
    assert saved(tmp_path)[-1].name == "step_000000010"  # nothing broken was kept


@pytest.mark.parametrize("step", [5, 40])
def test_a_checkpoint_exports_what_training_sees_f18(tmp_path: Path, step: int) -> None:
    """On raw data any saved step reconstructs what its unfolded weights do; training goes on unfolded."""
    x, training = STREAM.batch(77), begin()
    with contextlib.suppress(Stopped):
        training.run(STREAM, tmp_path, should_stop=lambda: training.step == step)
    seen = training.sae(x * training.scale) / training.scale
    torch.testing.assert_close(training.finished()(x), seen, atol=1e-5, rtol=1e-5)
    again = Training.resume(saved(tmp_path)[-1], SETTINGS)
    torch.testing.assert_close(again.finished()(x), seen, atol=1e-5, rtol=1e-5)
    assert again.step == step


def test_data_are_scaled_to_length_sqrt_of_d() -> None:
    training = begin()
    x = torch.cat([STREAM.batch(step) for step in range(20)]) * training.scale
    assert x.norm(dim=1).mean().item() == pytest.approx(8**0.5, rel=1e-5)
    assert (training.sae.b_dec - x.mean(0)).abs().max() < 0.2


def test_adam_sees_only_what_turns_a_direction() -> None:
    """Its first moment after a step is a tenth of the gradient: nothing along the rows as they were."""
    training = begin()
    before = training.sae.W_dec.detach().clone()
    training._advance(STREAM.batch(0))
    moment = training.adam.state[training.sae.W_dec]["exp_avg"]
    assert (moment * before).sum(1).abs().max() < 1e-6
    assert moment.abs().max() > 1e-3


def test_a_latent_is_dead_after_exactly_so_many_tokens() -> None:
    """F24 for one rank: a latent that never fires is dead after 64 tokens, in steps of 32: two."""
    training = begin(dataclasses.replace(SETTINGS, dead_after_tokens=64))
    with torch.no_grad():
        training.sae.b_enc[3] = -1e6
    training._advance(STREAM.batch(0))
    assert not training.dead[3]
    training._advance(STREAM.batch(1))
    assert training.dead[3]
    assert training.tokens_since_fired[3] == 64
    assert training.tokens_since_fired.min() == 0


def test_the_auxiliary_loss_brings_dead_latents_back() -> None:
    def dead_at_end(coefficient: float) -> float:
        training = begin(dataclasses.replace(SETTINGS, tokens=400 * 32, aux_coefficient=coefficient, lr=1e-2))
        with torch.no_grad():
            training.sae.b_enc[:8] = -2.0
        training.run(STREAM)
        return training.dead.double().mean().item()

    assert dead_at_end(1.0) < dead_at_end(0.0)


def test_the_learning_rate_rises_holds_and_falls() -> None:
    settings = Settings(d_sae=24, k=4, tokens=100, batch_size=1, lr=1.0)
    rates = [settings.lr_at(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[5:80]) == {1.0}
    assert rates[-20:] == pytest.approx([step / 20 for step in range(20, 0, -1)])


def test_metrics_are_read_at_intervals_and_at_both_ends() -> None:
    steps: list[int] = []
    last: dict[str, float] = {}

    def note(step: int, total: int, metrics: dict[str, float]) -> None:
        steps.append(step)
        last.update(metrics)
        assert total == 40

    begin().run(STREAM, on_progress=note)
    assert steps == [1, 5, 10, 15, 20, 25, 30, 35, 40]
    assert set(last) == {"loss", "fvu", "l0", "dead_fraction", "lr", "tokens_per_s"}
    assert 0 < last["fvu"] < 1
    assert last["l0"] <= 4

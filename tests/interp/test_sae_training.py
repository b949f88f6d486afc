"""Training: it learns, it is repeatable to the bit, and it stops in order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.files import write_json
from jobs.interp.sae.options import NAMES, TRANSCODERS, Options
from jobs.interp.sae.resample import resample, unit
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.together import Together, begin_or_resume, saved
from jobs.interp.sae.train import Stream, Training, _sides, sampled
from tests.interp.conftest import quality

SETTINGS = Settings(
    d_sae=24, options=Options(k=4), tokens=40 * 32, lr=3e-3, batch_size=32, dead_after_tokens=256
)
EVERY = 10


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

    def mean_norms(self) -> tuple[float, ...]:
        x = torch.cat([self.batch(step) for step in range(20)])
        return tuple(side.norm(dim=1).mean().item() for side in x.split(8, dim=1))


class Pairs(Sparse):
    """The same as input, and what a small network makes of it, a hundred times as long."""

    def batch(self, step: int) -> torch.Tensor:
        x = super().batch(step)
        return torch.cat([x, 100 * (x @ self.directions[:8].T).relu()], dim=1)


class Broken(Sparse):
    """Not a number from some step on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def batch(self, step: int) -> torch.Tensor:
        return super().batch(step) * (float("nan") if step >= self.at else 1.0)


STREAM = Sparse()
NORMS = STREAM.mean_norms()


def options_of(architecture: str) -> Options:
    return Options(architecture=architecture, k=4, l1=0.3, l0=0.1, target_l0=4, widths=(6, 12, 24))


def stream_of(settings: Settings) -> Sparse:
    return Pairs() if settings.options.architecture in TRANSCODERS else STREAM


def begin(settings: Settings = SETTINGS) -> Training:
    stream = stream_of(settings)
    return Training.begin(settings, *sampled([stream], settings), stream.mean_norms())


def run(training: Training, checkpoints: Path | None = None, **options: Any) -> None:
    """The training alone, as a job runs it."""
    stream = options.pop("stream", None) or stream_of(training.settings)
    together = Together({0: training}, log_every=5)
    together.run({0: stream}, checkpoints, **{"checkpoint_every": EVERY} | options)


def begin_or_go_on(settings: Settings, checkpoints: Path) -> Training:
    stream = stream_of(settings)
    return begin_or_resume([settings], [stream], [stream.mean_norms()], checkpoints).trainings[0]


def equal(one: Training, other: Training) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_learns_what_the_data_are_made_of() -> None:
    settings = dataclasses.replace(SETTINGS, options=Options(k=2), tokens=600 * 32, lr=1e-2)
    training = begin(settings)
    before = quality(training.finished(), [STREAM.batch(9999)]).fvu
    run(training)
    found = quality(training.finished(), [STREAM.batch(9999)])
    assert found.fvu < 0.1 < before
    assert found.l0 == pytest.approx(2, abs=0.05)
    torch.testing.assert_close(training.sae.W_dec.norm(dim=1), torch.ones(24), atol=1e-5, rtol=0)


class OnCard(torch.Tensor):
    """Refuses to be mixed with tensors of the CPU, as tensors on a card do, until it is brought there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return found.as_subclass(torch.Tensor)
        if any(type(value) is not cls and value.ndim for value in args if isinstance(value, torch.Tensor)):
            raise RuntimeError("Expected all tensors to be on the same device")
        return found


@pytest.mark.parametrize("architecture", NAMES)
def test_a_sample_may_lie_on_a_card(architecture: str) -> None:
    settings = dataclasses.replace(SETTINGS, options=options_of(architecture))
    stream = stream_of(settings)
    [sample] = sampled([stream], settings)
    norms = stream.mean_norms()
    there = Training.begin(settings, sample.as_subclass(OnCard), norms)
    assert equal(there, Training.begin(settings, sample, norms))


def test_two_runs_end_with_the_same_bits() -> None:
    one, other = begin(), begin()
    run(one)
    run(other)
    assert equal(one, other)


def resumed(settings: Settings, folder: Path, at: int) -> tuple[Training, Training, list[int]]:
    """A training that ran through, one that was stopped at a step and went on, and the steps that this one reported."""
    straight, halted = begin(settings), begin(settings)
    for training in (straight, halted):
        with torch.no_grad():  # a latent whose counter matters: dead from the eighth step on
            for name, weight in training.sae.named_parameters():
                if name in ("b_enc", "b_gate", "b_mag"):
                    weight[3] = -1e6
    run(straight)
    with pytest.raises(Stopped, match=f"step {at + 1} of 40"):
        run(halted, folder, should_stop=lambda: halted.step == at)
    steps: list[int] = []
    again = begin_or_go_on(settings, folder)
    assert again.step == at
    assert equal(again, halted)  # counters and moments included, before anything could hide a difference
    assert again.tokens_since_fired[3] == at * 32 or settings.resample_every
    run(again, folder, on_progress=lambda step, *_: steps.append(step))
    return straight, again, steps


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one_f25(tmp_path: Path) -> None:
    straight, again, steps = resumed(SETTINGS, tmp_path, at=20)
    assert equal(again, straight)
    assert again.settings.lr_at(again.step - 1) == straight.settings.lr_at(straight.step - 1)
    assert steps == [25, 30, 35, 40]  # goes on at 50 %, not at 0


def test_a_stop_between_checkpoints_loses_nothing(tmp_path: Path) -> None:
    straight, again, _ = resumed(SETTINGS, tmp_path, at=17)
    assert equal(again, straight)


def quick_first(quick: str) -> list[Any]:
    """All architectures but TopK; one on every run, the others with the slow tests."""
    slow = [name for name in NAMES if name not in ("topk", quick)]
    return [quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.parametrize("architecture", quick_first("jumprelu"))
def test_every_architecture_resumes_to_the_bit_f25(architecture: str, tmp_path: Path) -> None:
    resampling = (
        {"resample_every": 7} if options_of(architecture).sparsity and architecture != "jumprelu" else {}
    )
    settings = dataclasses.replace(SETTINGS, options=options_of(architecture), clip_norm=1.0, **resampling)
    straight, again, _ = resumed(settings, tmp_path, at=17)
    assert equal(again, straight)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run(begin(), tmp_path)
    assert [path.name for path in saved(tmp_path)] == ["step_000000030", "step_000000040"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_000000030", "step_000000040"}


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / ".tmp-abc").mkdir(parents=True)
    assert saved(tmp_path) == []
    assert begin_or_go_on(SETTINGS, tmp_path).step == 0


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(begin(), tmp_path)
    with pytest.raises(Unusable, match="another lr, options"):
        begin_or_go_on(dataclasses.replace(SETTINGS, options=Options(k=3), lr=1.0), tmp_path)
    with pytest.raises(Unusable, match="holds 1 SAEs, not 2"):
        Together.resume(saved(tmp_path)[-1], [SETTINGS, SETTINGS])


def test_a_checkpoint_of_an_earlier_version_is_refused_in_words(tmp_path: Path) -> None:
    write_json(tmp_path / "step_000000010" / "state.json", {"step": 10, "settings": SETTINGS.as_dict()})
    with pytest.raises(Unusable, match=r"earlier version of miStudio.*retry from the start"):
        begin_or_go_on(SETTINGS, tmp_path)


def test_a_loss_that_is_no_number_stops_with_its_step(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match="step 13;"):
        run(begin(), tmp_path, stream=Broken(12))
    assert saved(tmp_path)[-1].name == "step_000000010"  # nothing broken was kept


def test_a_loss_that_jumps_ends_nothing() -> None:
    class Jumps(Sparse):
        def batch(self, step: int) -> torch.Tensor:
            return super().batch(step) * (1e4 if step == 12 else 1.0)

    losses: list[float] = []
    training = begin()
    run(
        training,
        stream=Jumps(),
        on_progress=lambda step, total, found, speed: losses.append(found[0]["loss"]),
    )
    assert training.step == 40
    assert max(losses) > 1e4 * min(losses)


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("step", [5, 10])
def test_a_checkpoint_exports_what_training_sees_f18(tmp_path: Path, step: int, architecture: str) -> None:
    """On raw data any saved step reconstructs what its unfolded weights do; training goes on unfolded."""
    settings = dataclasses.replace(SETTINGS, options=options_of(architecture))
    training = begin(settings)
    x, *_ = stream_of(settings).batch(77).split(8, dim=1)
    with contextlib.suppress(Stopped):
        run(training, tmp_path, should_stop=lambda: training.step == step)
    seen = training.sae.exported()(x * training.scales[0]) / training.scales[-1]
    tolerance = {"atol": 1e-5 * seen.abs().max().item(), "rtol": 1e-5}
    torch.testing.assert_close(training.finished()(x), seen, **tolerance)
    again = Together.resume(saved(tmp_path)[-1], [settings]).trainings[0]
    torch.testing.assert_close(again.finished()(x), seen, **tolerance)
    assert again.step == step
    assert equal(again, training)


def test_data_are_scaled_to_length_sqrt_of_d() -> None:
    training = begin()
    x = torch.cat([STREAM.batch(step) for step in range(20)]) * training.scales[0]
    assert x.norm(dim=1).mean().item() == pytest.approx(8**0.5, rel=1e-5)
    assert (training.sae.b_dec - x.mean(0)).abs().max() < 0.2


def test_a_target_has_a_scale_of_its_own() -> None:
    settings = dataclasses.replace(SETTINGS, options=options_of("transcoder"))
    training, pairs = begin(settings), Pairs()
    rows = torch.cat([pairs.batch(step) for step in range(20)])
    x, target = _sides(rows, training.scales)
    for side in (x, target):
        assert side.norm(dim=1).mean().item() == pytest.approx(8**0.5, rel=1e-5)
    torch.testing.assert_close(
        target * (training.scales[0] / training.scales[1]), rows[:, 8:] * training.scales[0]
    )
    assert training.scales[0] > 10 * training.scales[1]


def test_adam_sees_only_what_turns_a_direction() -> None:
    """Its first moment after a step is a tenth of the gradient: nothing along the rows as they were."""
    training = begin()
    before = training.sae.W_dec.detach().clone()
    training.advance(STREAM.batch(0))
    moment = training.adam.state[training.sae.W_dec]["exp_avg"]
    assert (moment * before).sum(1).abs().max() < 1e-6
    assert moment.abs().max() > 1e-3


def test_a_latent_is_dead_after_exactly_so_many_tokens() -> None:
    """F24 for one rank: a latent that never fires is dead after 64 tokens, in steps of 32: two."""
    training = begin(dataclasses.replace(SETTINGS, dead_after_tokens=64))
    with torch.no_grad():
        training.sae.b_enc[3] = -1e6
    training.advance(STREAM.batch(0))
    assert not training.dead[3]
    training.advance(STREAM.batch(1))
    assert training.dead[3]
    assert training.tokens_since_fired[3] == 64
    assert training.tokens_since_fired.min() == 0


def test_the_auxiliary_loss_brings_dead_latents_back() -> None:
    def dead_at_end(coefficient: float) -> float:
        training = begin(dataclasses.replace(SETTINGS, tokens=400 * 32, aux_coefficient=coefficient, lr=1e-2))
        with torch.no_grad():
            training.sae.b_enc[:8] = -2.0
        run(training)
        return training.dead.double().mean().item()

    assert dead_at_end(1.0) < dead_at_end(0.0)


def test_the_learning_rate_rises_holds_and_falls() -> None:
    settings = Settings(d_sae=24, options=Options(k=4), tokens=100, batch_size=1, lr=1.0)
    rates = [settings.lr_at(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[5:80]) == {1.0}
    assert rates[-20:] == pytest.approx([step / 20 for step in range(20, 0, -1)])


def test_the_sparsity_weight_rises_to_the_full_one() -> None:
    options = Options(architecture="standard", l1=3.0)
    settings = Settings(d_sae=24, options=options, tokens=100, batch_size=1, sparsity_warmup_fraction=0.1)
    found = [settings.sparsity_at(step) for step in range(100)]
    assert found[:10] == pytest.approx([0.3 * n for n in range(1, 11)])
    assert set(found[9:]) == {3.0}
    assert dataclasses.replace(settings, options=Options(k=4)).sparsity_at(50) == 0


def test_adam_begins_with_what_the_architecture_needs() -> None:
    assert begin().adam.defaults["betas"] == (0.9, 0.999)
    jumps = dataclasses.replace(SETTINGS, options=Options(architecture="jumprelu"))
    assert jumps.betas == (0.0, 0.999)
    assert dataclasses.replace(jumps, adam_beta1=0.5).betas == (0.5, 0.999)


def test_a_gradient_is_cut_to_its_longest() -> None:
    lengths: list[float] = []

    def note(training: Training) -> float:
        moments = [state["exp_avg"] for state in training.adam.state.values()]
        return (
            10 * torch.cat([moment.flatten() for moment in moments]).norm().item()
        )  # a tenth of the gradient

    for clip in (None, 1e-3):
        training = begin(dataclasses.replace(SETTINGS, clip_norm=clip))
        training.advance(STREAM.batch(0))
        lengths.append(note(training))
    assert lengths[1] == pytest.approx(1e-3, rel=1e-3) != lengths[0]


def test_metrics_are_read_at_intervals_and_at_both_ends() -> None:
    steps: list[int] = []
    last: dict[str, float] = {}

    def note(step: int, total: int, found: Mapping[int, Mapping[str, float]], speed: float) -> None:
        steps.append(step)
        last.update(found[0])
        assert total == 40
        assert speed > 0

    run(begin(), on_progress=note)
    assert steps == [1, 5, 10, 15, 20, 25, 30, 35, 40]
    assert set(last) == {"loss", "fvu", "l0", "dead_fraction", "lr"}
    assert 0 < last["fvu"] < 1
    assert last["l0"] <= 4


# Several together -------------------------------------------------------------------------------------
SEVERAL = [
    SETTINGS,
    dataclasses.replace(SETTINGS, options=Options(k=2), d_sae=16, lr=1e-3),
    dataclasses.replace(SETTINGS, options=options_of("transcoder"), seed=5),
]


def together(several: list[Settings] = SEVERAL) -> tuple[Together, dict[int, Stream]]:
    trainings = {number: begin(settings) for number, settings in enumerate(several)}
    return Together(trainings, log_every=5), {n: stream_of(settings) for n, settings in enumerate(several)}


def test_each_ends_with_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    found, streams = together()
    with pytest.raises(Stopped):
        found.run(streams, tmp_path, checkpoint_every=EVERY, should_stop=lambda: found.step == 17)
    again = Together.resume(saved(tmp_path)[-1], SEVERAL)
    again.run(streams, tmp_path, checkpoint_every=EVERY)
    for number, settings in enumerate(SEVERAL):
        alone = begin(settings)
        run(alone)
        assert equal(again.trainings[number], alone)


def test_one_that_diverges_is_taken_back_and_holds_up_no_other(tmp_path: Path) -> None:
    found, streams = together()
    streams[1] = Broken(22)
    reported: list[tuple[int, set[int]]] = []
    found.run(
        streams,
        tmp_path,
        checkpoint_every=EVERY,
        on_progress=lambda step, total, metrics, speed: reported.append((step, set(metrics))),
    )
    assert found.lost == {1: "The loss became NaN or infinite at step 23; lower the learning rate."}
    assert dict(reported)[20] == {0, 1, 2} and dict(reported)[25] == {0, 2}
    assert [found.trainings[number].step for number in range(3)] == [40, 20, 40]
    expected = begin(SEVERAL[1])
    with contextlib.suppress(Stopped):
        run(expected, should_stop=lambda: expected.step == 20)
    again = Together.resume(saved(tmp_path)[-1], SEVERAL)
    assert (again.lost, again.step, set(again.going)) == (found.lost, 40, {0, 2})
    assert equal(again.trainings[1], expected)


def test_one_that_diverges_before_its_first_checkpoint_is_gone(tmp_path: Path) -> None:
    found, streams = together()
    streams[1] = Broken(2)
    found.run(streams, tmp_path, checkpoint_every=EVERY)
    again = Together.resume(saved(tmp_path)[-1], SEVERAL)
    assert set(again.trainings) == {0, 2} == set(found.trainings)
    assert "step 3;" in again.lost[1]


def test_where_all_diverge_the_training_ends(tmp_path: Path) -> None:
    found, _ = together(SEVERAL[:2])
    with pytest.raises(NonFinite, match=r"step (13|19);"):
        found.run({0: Broken(18), 1: Broken(12)}, tmp_path, checkpoint_every=EVERY)
    assert saved(tmp_path)[-1].name == "step_000000010"


def test_dead_latents_take_directions_of_what_is_badly_explained() -> None:
    """Standard: new rows out of the batch, a fifth as long as the live ones, forgotten by Adam, a draw of the step."""
    options = options_of("standard")
    settings = dataclasses.replace(SETTINGS, options=options, resample_every=9, dead_after_tokens=64)
    results = []
    for _ in range(2):
        training = begin(settings)
        with torch.no_grad():
            training.sae.b_enc[:3] = -1e6
        for step in range(9):
            training.advance(STREAM.batch(step))
        assert training.dead[:3].all()
        training.advance(STREAM.batch(9))  # resamples, then a step
        assert training.window.resampled >= 3
        assert training.tokens_since_fired[:3].max() <= 32
        assert training.sae.b_enc[:3].abs().max() < 0.1
        results.append(training)
    assert equal(*results)


def test_a_resampled_latent_has_everything_anew_and_no_other_changes() -> None:
    """Of a transcoder, whose two directions are of the same vector's input and target."""
    settings = dataclasses.replace(SETTINGS, options=options_of("transcoder"), dead_after_tokens=64)
    training, pairs = begin(settings), Pairs()
    with torch.no_grad():
        training.sae.b_enc[:3] = -1e6
    for step in range(4):
        training.advance(pairs.batch(step))
    for state in training.adam.state.values():  # those of latents that never fired are still zero
        state["exp_avg"] += 1
        state["exp_avg_sq"] += 1
    dead, live = training.dead, ~training.dead
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    x, target = _sides(pairs.batch(4), training.scales)
    assert resample(training, x, target) == int(dead.sum()) >= 3
    after, sae = training.tensors(), training.sae
    length = 0.2 * before["encoder"][live].norm(dim=1).mean()
    torch.testing.assert_close(sae.encoder[dead].norm(dim=1), length.expand(int(dead.sum())))
    inputs = (unit(sae.encoder[dead]) @ unit(x).T).max(1)
    outputs = (sae.W_dec[dead] @ unit(target - sae.b_dec).T).max(1)
    torch.testing.assert_close(inputs.values, torch.ones(int(dead.sum())))
    torch.testing.assert_close(outputs.values, torch.ones(int(dead.sum())))
    assert torch.equal(inputs.indices, outputs.indices)
    assert sae.b_enc[dead].abs().max() == 0
    for name, tensor in after.items():
        if tensor.ndim and len(tensor) == sae.d_sae and name != "tokens_since_fired":
            assert torch.equal(tensor[live], before[name][live])
            if name.startswith("adam.") and "step" not in name:
                assert tensor[dead].abs().max() == 0
                assert tensor[live].abs().max() > 0


@pytest.mark.parametrize("architecture", ["standard", "skip_transcoder"])
def test_resampling_leaves_alone_what_is_no_latents_where_there_are_as_many_as_dimensions(
    architecture: str,
) -> None:
    """The decoder's bias and the skip, whose rows are dimensions, have 8 rows; so have the weights of 8 latents."""
    settings = dataclasses.replace(
        SETTINGS, options=options_of(architecture), d_sae=8, dead_after_tokens=64, lr=1e-2
    )
    training, stream = begin(settings), stream_of(settings)
    with torch.no_grad():
        training.sae.b_enc[:3] = -1e6
    for step in range(4):
        training.advance(stream.batch(step))
    shared = [name for name in ("b_dec", "W_skip") if hasattr(training.sae, name)]
    kept = [key for key in training.tensors() if any(name in key for name in shared)]
    before = {key: training.tensors()[key].clone() for key in kept}
    assert all(before[f"adam.{name}.exp_avg"].abs().min() > 0 for name in shared)
    assert resample(training, *_sides(stream.batch(4), training.scales)) >= 3
    assert training.sae.b_enc[:3].abs().max() == 0
    assert all(torch.equal(training.tensors()[key], before[key]) for key in kept)


def test_resampling_ends_before_the_run_does() -> None:
    options = options_of("standard")
    settings = dataclasses.replace(SETTINGS, options=options, resample_every=9)
    assert not any(settings.resamples_at(step) for step in range(28, 40))  # 70 % of 40
    assert settings.resamples_at(27)

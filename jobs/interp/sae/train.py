"""Train a TopK SAE on a shuffled stream of activations.

Reproducible and resumable: every batch is a function of (seed, step), the learning rate of the step, and a
checkpoint holds weights, Adam's moments and the counters. On a CPU a resumed run ends with the same bits as
one that was never interrupted. Data are scaled to mean length sqrt(d_in) first, so that learning rate and
losses mean the same for any layer; `finished` folds the scale back, so nobody downstream needs to know.

Cost per step: one encoder product (batch * d_in * d_sae) and about half as much again.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.files import TEMPORARY, read_json, whole_folder, write_json, write_tensors
from jobs.interp.sae.architectures import SAE, Aux, Options, Step, Weights, begin, shaped

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Settings:
    """What shapes a training. `tokens`, `dead_after_tokens` in tokens; `*_every` in steps; fractions of all
    steps.
    """

    d_sae: int
    k: int
    tokens: int
    lr: float = 5e-4
    batch_size: int = 4096
    seed: int = 0
    aux_k: int | None = None  # None: half of d_in, Gao et al. 2024 appendix B.1
    aux_coefficient: float = 1 / 32
    dead_after_tokens: int | None = None  # None: a tenth of the run, at most the paper's ten million
    warmup_fraction: float = 0.05
    decay_fraction: float = 0.2
    checkpoint_every: int = 500
    log_every: int = 10

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def options(self) -> Options:
        return Options(architecture="topk", k=self.k)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch_size)

    @property
    def dead_after(self) -> int:
        return self.dead_after_tokens or min(10_000_000, max(self.batch_size, self.tokens // 10))

    def aux(self, d_in: int) -> Aux:
        return Aux(self.aux_k if self.aux_k is not None else max(1, d_in // 2), self.aux_coefficient)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (from 0): linear up, constant, linear down to almost 0 at the last step."""
        warmup = max(1, round(self.warmup_fraction * self.steps))
        decay = max(1, round(self.decay_fraction * self.steps))
        return self.lr * min(1.0, (step + 1) / warmup, (self.steps - step) / decay)


class Stream(Protocol):
    """Endless batches that depend on the step alone."""

    def batch(self, step: int) -> Tensor: ...


class Training:
    """The state of one training: weights, optimizer, counters. Advance it with `run`."""

    def __init__(self, sae: SAE, settings: Settings, scale: float, *, device: str = "cpu") -> None:
        self.sae, self.settings, self.scale, self.device = sae.to(device), settings, scale, device
        self.aux = settings.aux(sae.d_in)
        self.step = 0
        self.tokens_since_fired = torch.zeros(sae.d_sae, dtype=torch.long, device=device)
        # fused: one pass over the weights; about a third of the time of the default
        self.adam = torch.optim.Adam(
            sae.parameters(), lr=settings.lr, betas=(0.9, 0.999), eps=6.25e-10, fused=True
        )
        self._window = _Window(device)

    @classmethod
    def begin(cls, settings: Settings, stream: Stream, mean_norm: float, *, device: str = "cpu") -> Training:
        """A new training on data of `mean_norm` mean length; `b_dec` starts as the mean of the first
        batches.
        """
        count = _batches_for_mean(settings)
        rows = torch.cat([stream.batch(step).float() for step in range(count)])  # [n, d_in]
        d_in = rows.shape[1]
        scale = math.sqrt(d_in) / mean_norm
        sample = rows.mul_(scale)
        sae = begin(
            settings.options, d_in, d_in, settings.d_sae, seed=settings.seed, sample=sample, target=sample
        )
        return cls(sae, settings, scale, device=device)

    @property
    def dead(self) -> Tensor:
        """Latents that have not fired for `dead_after` tokens. Shapes: `[d_sae]` bool."""
        return self.tokens_since_fired >= self.settings.dead_after

    def run(
        self,
        stream: Stream,
        checkpoints: Path | None = None,
        *,
        on_progress: Callable[[int, int, Metrics], None] = lambda *_: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last step. `on_progress(step, total, metrics)` every `log_every` steps and at the end.

        Raises `Stopped` after writing a checkpoint when `should_stop()`, `NonFinite` naming the step of the
        first loss that is not a number.
        """
        total = self.settings.steps
        while self.step < total:
            if should_stop():
                self._keep(checkpoints)
                raise Stopped(f"Stopped before step {self.step + 1} of {total}.")
            self._advance(stream.batch(self.step))
            if self.step % self.settings.log_every == 0 or self.step in (1, total):
                on_progress(self.step, total, self._window.read(self))
            if self.step % self.settings.checkpoint_every == 0 or self.step == total:
                self._keep(checkpoints)

    def finished(self) -> SAE:
        """The SAE for raw activations, scale folded in, on the CPU."""
        return self.sae.folded(self.scale).cpu()

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on, complete or not at all."""
        with whole_folder(folder) as temporary:
            write_tensors(temporary / "state.safetensors", self._tensors())
            state = {"step": self.step, "scale": self.scale.hex(), "settings": asdict(self.settings)}
            write_json(temporary / "state.json", state)

    @classmethod
    def resume(cls, folder: Path, settings: Settings, *, device: str = "cpu") -> Training:
        """The training saved in `folder`. Raises `Unusable` when it was made with other settings."""
        state = read_json(folder / "state.json")
        if differing := {
            key for key, value in asdict(settings).items() if state["settings"].get(key) != value
        }:
            raise Unusable(f"The checkpoint was made with another {', '.join(sorted(differing))}.")
        tensors = load_file(folder / "state.safetensors")
        d_sae, d_in = tensors["encoder"].shape
        sae = shaped(settings.options, d_in, d_in, d_sae)
        training = cls(sae, settings, float.fromhex(state["scale"]), device=device)
        training._restore(tensors, state["step"])
        return training

    def _advance(self, batch: Tensor) -> None:
        x = batch.to(self.device).float() * self.scale
        for group in self.adam.param_groups:
            group["lr"] = self.settings.lr_at(self.step)
        found = self.sae.backward(x, x, Weights(0.0, self.dead, self.aux))
        self.sae.project()
        self.adam.step()
        self.adam.zero_grad()  # or the next step's gradients would stand beside these
        self.sae.after_step()
        self._count(found, len(x))
        self.step += 1
        self._window.add(self.step, x, found)

    def _count(self, found: Step, tokens: int) -> None:
        self.tokens_since_fired += tokens
        self.tokens_since_fired.masked_fill_(found.firings > 0, 0)

    def _keep(self, checkpoints: Path | None) -> None:
        if checkpoints is not None:
            self._window.require_finite()
            self.save(checkpoints / f"step_{self.step:09d}")
            logger.info("checkpoint after step %d", self.step)
            for old in saved(checkpoints)[:-2]:
                shutil.rmtree(old)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"tokens_since_fired": self.tokens_since_fired, **self.sae.state_dict()}
        for name, weight in self.sae.named_parameters():
            moments = self.adam.state.get(weight, {})
            tensors |= {f"adam.{name}.{moment}": value for moment, value in moments.items()}
        return tensors

    def _restore(self, tensors: dict[str, Tensor], step: int) -> None:
        self.step = step
        self.tokens_since_fired.copy_(tensors["tokens_since_fired"])
        self.sae.load_state_dict({name: tensors[name] for name in self.sae.state_dict()})
        for name, weight in self.sae.named_parameters():
            prefix = f"adam.{name}."
            moments = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
            if moments:
                self.adam.state[weight] = {key: value.to(self.device) for key, value in moments.items()}


class _Window:
    """Sums since the last report, on the device; the host reads them only when there is something to
    report.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.bad_step = torch.zeros((), dtype=torch.long, device=device)  # 0: none so far
        self._clear()

    def add(self, step: int, x: Tensor, found: Step) -> None:
        self.steps += 1
        self.tokens += len(x)
        self.loss += found.loss
        self.residual += found.error.square().sum()
        self.variance += (x - x.mean(0)).square().sum()
        self.live += found.live
        here = torch.where(torch.isfinite(found.loss), 0, step)
        self.bad_step = torch.where(self.bad_step == 0, here, self.bad_step)

    def read(self, training: Training) -> dict[str, float]:
        """Means since the last reading. Raises `NonFinite` when a loss was not a number."""
        self.require_finite()
        metrics = {
            "loss": self.loss.item() / self.steps,
            "fvu": (self.residual / self.variance).item(),
            "l0": self.live.item() / self.tokens,
            "dead_fraction": training.dead.double().mean().item(),
            "lr": training.settings.lr_at(training.step - 1),
            "tokens_per_s": self.tokens / max(time.monotonic() - self.began, 1e-9),
        }
        self._clear()
        return metrics

    def require_finite(self) -> None:
        if step := int(self.bad_step.item()):
            raise NonFinite(f"The loss became NaN or infinite at step {step}; lower the learning rate.")

    def _clear(self) -> None:
        self.began, self.steps, self.tokens = time.monotonic(), 0, 0
        self.loss, self.residual, self.variance = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.live = torch.zeros((), dtype=torch.long, device=self.device)


def saved(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(path for path in checkpoints.glob("step_*") if not path.name.startswith(TEMPORARY))


def begin_or_resume(
    settings: Settings, stream: Stream, mean_norm: float, checkpoints: Path, *, device: str = "cpu"
) -> Training:
    """Go on from the newest checkpoint, or begin when there is none."""
    if found := saved(checkpoints):
        logger.info("going on from %s", found[-1].name)
        return Training.resume(found[-1], settings, device=device)
    return Training.begin(settings, stream, mean_norm, device=device)


def _batches_for_mean(settings: Settings) -> int:
    """Enough batches for about 16 384 tokens, but no more than the run has."""
    return min(settings.steps, max(1, 16_384 // settings.batch_size))

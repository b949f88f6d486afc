"""Our training of SAEs as the benchmarks take it: the one place where they know its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jobs.interp.reading import Selection
from jobs.interp.sae.architectures import begin
from jobs.interp.sae.options import Options
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.together import sampled
from jobs.interp.sae.train import Training
from jobs.interp.shuffling import Shuffled

#: Share of a run after whose tokens a silent latent is dead, as by default.
DEAD = 0.1


def step_of(
    options: Options, d_in: int, d_sae: int, *, batch: int = 4096, lr: float = 1e-3
) -> Callable[[Tensor], object]:
    """The whole step of a training on data of scale 1: gradients, projection, Adam, counters.

    A transcoder's batches hold `[n, d_in + d_in]`, input and target; here both are the same.
    """
    settings = Settings(d_sae=d_sae, options=options, tokens=10**10, batch_size=batch, lr=lr)
    sample = torch.randn(4096, d_in, generator=torch.Generator().manual_seed(1))
    sae = begin(options, d_in, d_in, d_sae, seed=0, sample=sample, target=sample)
    training = Training(sae, settings, [1.0])
    training.step = settings.steps // 2  # past the warm-ups
    return training.advance


def training(
    options: Options,
    rows: Selection,
    *,
    d_sae: int,
    tokens: int,
    batch: int = 4096,
    lr: float = 5e-4,
    device: str = "cpu",
    **more: Any,
) -> tuple[Training, Shuffled]:
    """A training on stored vectors before its first step, and its batches; all else by default."""
    settings = Settings(d_sae=d_sae, options=options, tokens=tokens, batch_size=batch, lr=lr, **more)
    stream = Shuffled(rows, batch, seed=0)
    [sample] = sampled([stream], settings)
    return Training.begin(settings, sample, rows.mean_norms(), device=device), stream


def run(training: Training, stream: Shuffled) -> None:
    """To the last step."""
    for step in range(training.settings.steps):
        training.advance(stream.batch(step))
    training.window.require_finite()

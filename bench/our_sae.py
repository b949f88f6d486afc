"""Our training of SAEs as the benchmarks take it: the one place where they know its calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jobs.interp.reading import Selection, Shuffled
from jobs.interp.sae.architectures import TopK
from jobs.interp.sae.train import Settings, Training

#: Share of a run after whose tokens a silent latent is dead, as by default.
DEAD = 0.1


def step_of(
    architecture: str, d_in: int, d_sae: int, *, k: int = 32, batch: int = 4096, lr: float = 1e-3
) -> Callable[[Tensor], object]:
    """The whole step of a training on data of scale 1: gradients, projection, Adam, counters."""
    assert architecture == TopK.architecture
    settings = Settings(d_sae=d_sae, k=k, tokens=10**10, batch_size=batch, lr=lr)
    sae = TopK.initial(d_in, d_sae, k, seed=0, mean=torch.zeros(d_in))
    return Training(sae, settings, scale=1.0)._advance


def training(
    architecture: str,
    rows: Selection,
    *,
    d_sae: int,
    tokens: int,
    k: int = 32,
    batch: int = 4096,
    lr: float = 5e-4,
    device: str = "cpu",
) -> tuple[Training, Shuffled]:
    """A training on stored vectors before its first step, and its batches; all else by default."""
    assert architecture == TopK.architecture
    settings = Settings(d_sae=d_sae, k=k, tokens=tokens, batch_size=batch, lr=lr)
    stream = Shuffled(rows, batch, seed=0)
    return Training.begin(settings, stream, rows.mean_norm(), device=device), stream

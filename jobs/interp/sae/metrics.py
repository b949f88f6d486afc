"""How good a reconstruction is, in numbers that can be compared.

FVU (fraction of variance unexplained) is *pooled*: sum |x - x_hat|^2 / sum |x - mean|^2 with the mean of each
dimension over all tokens, as in SAEBench and sparsify. The average of per-token ratios, used in older tables,
is another number (F21). Streams: batches of any size give the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.interp.sae.architectures import SAE


class Fvu:
    """Pooled FVU over a stream of batches, in float64."""

    def __init__(self) -> None:
        self.n = 0
        self.residual = self.squares = self.sums = torch.zeros((), dtype=torch.float64)

    def add(self, x: Tensor, x_hat: Tensor) -> None:
        """Shapes: both `[batch, d]`."""
        x, x_hat = x.double(), x_hat.double()
        self.n += len(x)
        self.residual = self.residual.to(x.device) + (x - x_hat).square().sum()
        self.squares = self.squares.to(x.device) + x.square().sum()
        self.sums = self.sums.to(x.device) + x.sum(0)  # [d]

    def value(self) -> float:
        """FVU; explained variance is 1 minus it."""
        variance = self.squares - self.sums.square().sum() / self.n
        return (self.residual / variance).item()


@dataclass(frozen=True)
class Quality:
    """Means over tokens. `squared_error`: |y - y_hat|^2; `cosine` of y and y_hat; `norm_ratio`: |y_hat| / |y|, below 1
    where the SAE shrinks; `l0`: live latents; `firings [d_sae]`: how often each fired.
    """

    fvu: float
    squared_error: float
    cosine: float
    norm_ratio: float
    l0: float
    tokens: int
    firings: Tensor

    @property
    def explained_variance(self) -> float:
        return 1 - self.fvu


class Measure:
    """Sums of one SAE on raw vectors, over batches of any size."""

    def __init__(self, sae: SAE) -> None:
        self.sae, self.fvu = sae, Fvu()
        self.firings = torch.zeros(sae.d_sae, dtype=torch.long, device=sae.b_dec.device)
        self.cosine = self.ratio = 0.0

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Shapes: `[n, d_in]`, of a transcoder input and target side by side, `[n, d_in + d_out]`."""
        rows = rows.to(self.sae.b_dec.device)
        x, target = rows[:, : self.sae.d_in], rows[:, -self.sae.d_out :]
        found, firings = self.sae.reconstruct(x)
        self.fvu.add(target, found)
        lengths, ours = target.double().norm(dim=1), found.double().norm(dim=1)
        products = (target.double() * found.double()).sum(1)
        self.cosine += (products / (lengths * ours).clamp(min=1e-12)).sum().item()
        self.ratio += (ours / lengths.clamp(min=1e-12)).sum().item()
        self.firings += firings

    def quality(self) -> Quality:
        n = self.fvu.n
        return Quality(
            fvu=self.fvu.value(),
            squared_error=self.fvu.residual.item() / n,
            cosine=self.cosine / n,
            norm_ratio=self.ratio / n,
            l0=self.firings.sum().item() / n,
            tokens=n,
            firings=self.firings.cpu(),
        )


def log10_frequency(firings: Tensor, tokens: int) -> Tensor:
    """Log10 of each latent's firing frequency, -10 for one that never fired (SAELens'
    `sparsity.safetensors`).
    """
    return torch.log10(firings / tokens + 1e-10).float()


def histogram(log10_frequencies: Tensor, bins: int = 50) -> dict[str, list[float]]:
    """Counts of latents by log10 firing frequency, from -10 (never) to 0 (always)."""
    counts = torch.histc(log10_frequencies, bins, min=-10, max=0)
    return {"edges": torch.linspace(-10, 0, bins + 1).tolist(), "counts": counts.int().tolist()}


def limited(batches: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    """The first `rows` rows of a stream. Shapes: as the stream's."""
    for batch in batches:
        if rows <= 0:
            return
        yield batch[:rows]
        rows -= len(batch)

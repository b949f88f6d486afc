"""How good a reconstruction is, in numbers that can be compared.

FVU (fraction of variance unexplained) is *pooled*: sum |x - x_hat|^2 / sum |x - mean|^2 with the mean of each
dimension over all tokens, as in SAEBench and sparsify. The average of per-token ratios, used in older tables,
is another number (F21). Streams: batches of any size give the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.interp.errors import Stopped
from jobs.interp.hooks import capture, replacing
from jobs.interp.models import LanguageModel
from jobs.interp.sae.architectures import SAE
from jobs.interp.site import Site
from jobs.interp.tokens import Batch, kept


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
    """`squared_error`: |x - x_hat|^2 per token; `l0`: live latents per token; `firings [d_sae]`: how often
    each fired.
    """

    fvu: float
    squared_error: float
    l0: float
    tokens: int
    firings: Tensor

    @property
    def explained_variance(self) -> float:
        return 1 - self.fvu


@torch.no_grad()
def quality(sae: SAE, batches: Iterable[Tensor]) -> Quality:
    """Measure `sae` on raw activations. Shapes: each batch `[n, d_in]`."""
    fvu, firings = Fvu(), torch.zeros(sae.d_sae, dtype=torch.long, device=sae.b_dec.device)
    for batch in batches:
        x = batch.to(sae.b_dec.device)
        x_hat, fired = sae.reconstruct(x)
        fvu.add(x, x_hat)
        firings += fired
    return Quality(
        fvu.value(), fvu.residual.item() / fvu.n, firings.sum().item() / fvu.n, fvu.n, firings.cpu()
    )


def log10_frequency(firings: Tensor, tokens: int) -> Tensor:
    """Log10 of each latent's firing frequency, -10 for one that never fired (SAELens'
    `sparsity.safetensors`).
    """
    return torch.log10(firings / tokens + 1e-10).float()


@dataclass(frozen=True)
class CrossEntropy:
    """Loss per predicted token in nats: as the model is, with the SAE's reconstruction, with zeros in its
    place.
    """

    clean: float
    sae: float
    zero: float
    tokens: int

    @property
    def recovered(self) -> float:
        """(zero - sae) / (zero - clean): 1 when the SAE changes nothing, 0 when it is as bad as zeros."""
        return (self.zero - self.sae) / (self.zero - self.clean)


@torch.no_grad()
def cross_entropy(
    model: LanguageModel,
    site: Site,
    reconstruct: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    excluded_ids: Iterable[int] = (),
    norm_limit: float | None = None,
    on_batch: Callable[[int], None] = lambda tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CrossEntropy:
    """Splice `reconstruct` into `model` at `site` on held-out text and compare losses.

    Only positions that an SAE is made for are replaced: real tokens, not excluded by id, not longer than
    `norm_limit` (attention sinks). `reconstruct` takes and returns `[n, d_model]`. Three forward passes per
    batch.
    """
    totals = dict.fromkeys(("clean", "sae", "zero"), 0.0)
    tokens = 0
    for batch in batches:
        if should_stop():
            raise Stopped("Stopped while the loss on held-out text was measured.")
        inputs = batch.model_inputs(model.device)
        chosen = kept(inputs["input_ids"], inputs["attention_mask"], excluded_ids)
        if norm_limit is not None:
            values = capture(model.model, [site], **inputs)[site]
            chosen &= values.float().norm(dim=-1) <= norm_limit
        changes = {"clean": None, "sae": _at(chosen, reconstruct), "zero": _at(chosen, torch.zeros_like)}
        for name, change in changes.items():
            totals[name] += _summed_loss(model, site, change, inputs)
        tokens += int(_predicted(inputs["attention_mask"]).sum())
        on_batch(tokens)
    return CrossEntropy(**{name: total / tokens for name, total in totals.items()}, tokens=tokens)


def _at(chosen: Tensor, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`change` applied to chosen positions only. Shapes: `chosen [batch, seq]`, stream `[batch, seq,
    d_model]`.
    """

    def changed(stream: Tensor) -> Tensor:
        stream = stream.clone()
        stream[chosen] = change(stream[chosen].float()).to(stream.dtype)
        return stream

    return changed


def _summed_loss(
    model: LanguageModel, site: Site, change: Callable[[Tensor], Tensor] | None, inputs: dict[str, Tensor]
) -> float:
    with replacing(model.model, site, change) if change else nullcontext():
        logits = model.model(**inputs, use_cache=False).logits[:, :-1]
    total = 0.0
    real, targets = _predicted(inputs["attention_mask"]), inputs["input_ids"][:, 1:]
    for row, there, wanted in zip(
        logits, real, targets, strict=True
    ):  # a batch's scores once, not three times
        total += F.cross_entropy(row[there].float(), wanted[there], reduction="sum").item()
    return total


def _predicted(mask: Tensor) -> Tensor:
    """Which tokens follow a real one, so that a prediction of them counts. Shapes: → `[batch, seq - 1]` bool."""
    return (mask[:, 1:] * mask[:, :-1]).bool()


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

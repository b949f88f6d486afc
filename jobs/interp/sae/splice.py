"""What a language model loses when SAEs stand in for what they reconstruct: cross-entropy and KL on held-out text.

Loss per predicted token in nats: as the model is, with the reconstruction, with zeros in its place. KL is that of the
spliced model's predictions from the clean ones, KL(clean || spliced). A transcoder reads at the MLP's input and is
spliced in at its output. Only positions that an SAE is made for are replaced: real tokens, not excluded by id, not
longer than the limit of a site (attention sinks).

Cost: one forward pass for the clean model, one per site for zeros, one per SAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.interp.errors import Stopped
from jobs.interp.hooks import replacing
from jobs.interp.models import LanguageModel
from jobs.interp.site import Site
from jobs.interp.tokens import Batch, kept


@dataclass(frozen=True)
class Splice:
    """An SAE in its place. `rebuild`: raw vectors at `source` to those at `target`, `[n, d_in]` → `[n, d_out]`."""

    source: Site
    target: Site
    rebuild: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Loss per predicted token in nats, and KL(clean || spliced) per predicted token; of no token all are 0."""

    clean: float
    sae: float
    zero: float
    kl: float
    tokens: int

    @property
    def recovered(self) -> float | None:
        """(zero - sae) / (zero - clean): 1 when the SAE changes nothing, 0 when it is as bad as zeros.

        `None` where zeros lose nothing, as when no position of the text was to be replaced.
        """
        if self.zero == self.clean:
            return None
        return (self.zero - self.sae) / (self.zero - self.clean)


@torch.no_grad()
def cross_entropies(
    model: LanguageModel,
    splices: Sequence[Splice],
    batches: Iterable[Batch],
    *,
    excluded_ids: Iterable[int] = (),
    limits: Mapping[Site, float] | None = None,
    on_batch: Callable[[int], None] = lambda tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[CrossEntropy]:
    """One answer per splice, all on the same text. `on_batch` is told the predicted tokens so far."""
    total = _Totals(splices)
    for batch in batches:
        if should_stop():
            raise Stopped("Stopped while the loss on held-out text was measured.")
        _add(total, model, splices, batch, tuple(excluded_ids), limits or {})
        on_batch(total.tokens)
    return total.answers(splices)


class _Totals:
    """Sums over predicted tokens."""

    def __init__(self, splices: Sequence[Splice]) -> None:
        self.tokens, self.clean = 0, 0.0
        self.zero: dict[tuple[Site, Site], float] = {(s.source, s.target): 0.0 for s in splices}
        self.spliced = [0.0] * len(splices)
        self.kl = [0.0] * len(splices)

    def answers(self, splices: Sequence[Splice]) -> list[CrossEntropy]:
        n = max(self.tokens, 1)
        zeros = [self.zero[s.source, s.target] for s in splices]
        rows = zip(self.spliced, zeros, self.kl, strict=True)
        return [
            CrossEntropy(self.clean / n, sae / n, zero / n, kl / n, self.tokens) for sae, zero, kl in rows
        ]


def _add(
    total: _Totals,
    model: LanguageModel,
    splices: Sequence[Splice],
    batch: Batch,
    excluded: tuple[int, ...],
    limits: Mapping[Site, float],
) -> None:
    inputs = batch.model_inputs(model.device)
    real = kept(inputs["input_ids"], inputs["attention_mask"], excluded)
    predicted = _predicted(inputs["attention_mask"])
    clean, seen = _clean(model, {site for s in splices for site in (s.source, s.target)}, inputs)
    total.tokens += int(predicted.sum())
    total.clean += _compared(clean, clean, inputs, predicted)[0]
    for pair in total.zero:
        chosen = _chosen(real, pair, seen, limits)
        logits = _replaced(model, pair[1], chosen, torch.zeros_like(seen[pair[1]][chosen]), inputs)
        total.zero[pair] += _compared(clean, logits, inputs, predicted)[0]
    for number, splice in enumerate(splices):
        chosen = _chosen(real, (splice.source, splice.target), seen, limits)
        values = splice.rebuild(seen[splice.source][chosen].float())
        logits = _replaced(model, splice.target, chosen, values, inputs)
        loss, kl = _compared(clean, logits, inputs, predicted)
        total.spliced[number] += loss
        total.kl[number] += kl


def _clean(
    model: LanguageModel, sites: Iterable[Site], inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[Site, Tensor]]:
    """The model's scores and what passed the sites. Shapes: `[batch, seq - 1, d_vocab]`; `[batch, seq, d]`."""
    seen: dict[Site, Tensor] = {}

    def noting(site: Site) -> Callable[[Tensor], Tensor]:
        def note(stream: Tensor) -> Tensor:
            seen[site] = stream.clone()  # some blocks add to the stream in place
            return stream

        return note

    with ExitStack() as hooks:
        for site in sites:
            hooks.enter_context(replacing(model.model, site, noting(site)))
        return _scores(model, inputs), seen


def _chosen(
    real: Tensor, pair: tuple[Site, Site], seen: Mapping[Site, Tensor], limits: Mapping[Site, float]
) -> Tensor:
    """Positions to replace. Shapes: `[batch, seq]` bool."""
    for site in pair:
        if site in limits:
            real = real & (seen[site].float().norm(dim=-1) <= limits[site])
    return real


def _replaced(
    model: LanguageModel, site: Site, chosen: Tensor, values: Tensor, inputs: dict[str, Tensor]
) -> Tensor:
    """Scores with `values` at the chosen positions of a site. Shapes: `values [chosen, d]`."""

    def changed(stream: Tensor) -> Tensor:
        stream = stream.clone()
        stream[chosen] = values.to(stream.dtype)
        return stream

    with replacing(model.model, site, changed):
        return _scores(model, inputs)


def _scores(model: LanguageModel, inputs: dict[str, Tensor]) -> Tensor:
    return model.model(**inputs, use_cache=False).logits[:, :-1]


def _compared(
    clean: Tensor, spliced: Tensor, inputs: dict[str, Tensor], predicted: Tensor
) -> tuple[float, float]:
    """Summed loss of the spliced scores and their KL from the clean ones, a row of the batch at a time: scores over a
    vocabulary are wide."""
    loss, kl = 0.0, 0.0
    targets = inputs["input_ids"][:, 1:]
    for before, after, there, wanted in zip(clean, spliced, predicted, targets, strict=True):
        logs = F.log_softmax(after[there].float(), dim=-1)  # [predicted, d_vocab]
        loss += F.nll_loss(logs, wanted[there], reduction="sum").item()
        if clean is not spliced:
            known = F.log_softmax(before[there].float(), dim=-1)
            kl += F.kl_div(logs, known, reduction="sum", log_target=True).item()
    return loss, kl


def _predicted(mask: Tensor) -> Tensor:
    """Which tokens follow a real one, so that a prediction of them counts. Shapes: → `[batch, seq - 1]` bool."""
    return (mask[:, 1:] * mask[:, :-1]).bool()

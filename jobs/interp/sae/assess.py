"""The numbers that finished SAEs are judged by, on text that their training never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from jobs.interp.errors import Stopped
from jobs.interp.live import View
from jobs.interp.sae.metrics import Measure, Quality, limited, log10_frequency
from jobs.interp.sae.sources import HELDOUT_VECTORS, Source
from jobs.interp.sae.splice import CrossEntropy
from jobs.interp.sae.train import Training

#: Training tokens that firing frequencies are taken over: enough for one in a thousand.
FREQUENCY_TOKENS = 65_536


@dataclass(frozen=True)
class Report:
    """`heldout`: reconstruction of held-out vectors; `usage`: firing over training vectors; `loss` as in
    training: in normalised space, summed over dimensions.
    """

    heldout: Quality
    usage: Quality
    loss: float
    facts: Mapping[str, int]
    entropy: CrossEntropy | None = None

    @property
    def log10_frequencies(self) -> Tensor:
        """Shapes: `[d_sae]`; -10 for a latent that never fired."""
        return log10_frequency(self.usage.firings, self.usage.tokens)

    @property
    def dead_fraction(self) -> float:
        """Share of latents that fired on none of `usage.tokens` tokens."""
        return (self.usage.firings == 0).double().mean().item()

    def with_cross_entropy(self, entropy: CrossEntropy) -> Report:
        return replace(self, entropy=entropy)

    def numbers(self) -> dict[str, float | int | None]:
        """For the job's result and the manifest."""
        entropy = self.entropy if self.entropy and self.entropy.tokens else None
        return {
            "loss": self.loss,
            "fvu": self.heldout.fvu,
            "explained_variance": self.heldout.explained_variance,
            "l0": self.heldout.l0,
            "cosine": self.heldout.cosine,
            "norm_ratio": self.heldout.norm_ratio,
            "dead_fraction": self.dead_fraction,
            "dead_over_tokens": self.usage.tokens,
            "heldout_tokens": self.heldout.tokens,
            **self.facts,
            "ce_recovered": entropy.recovered if entropy else None,
            "ce_clean": entropy.clean if entropy else None,
            "ce_sae": entropy.sae if entropy else None,
            "ce_zero": entropy.zero if entropy else None,
            "kl": entropy.kl if entropy else None,
            "ce_tokens": entropy.tokens if entropy else 0,
        }


def assess(
    trainings: Mapping[int, Training],
    views: Mapping[int, View],
    source: Source,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[int, Report]:
    """Measure the SAEs of finished trainings where they are, against both parts of the data; each part is read once for
    all that share a view. No step can follow: copies of the SAEs take the room of Adam's moments."""
    for training in trainings.values():
        training.release()
    reports: dict[int, Report] = {}
    for view in dict.fromkeys(views[number] for number in trainings):
        those = {number: training for number, training in trainings.items() if views[number] == view}
        heldout = measured(those, limited(source.heldout(view), HELDOUT_VECTORS), should_stop)
        usage = measured(those, limited(source.training(view), FREQUENCY_TOKENS), should_stop)
        for number, training in those.items():
            loss = heldout[number].squared_error * training.scales[-1] ** 2
            reports[number] = Report(heldout[number], usage[number], loss, source.facts(view))
    return dict(sorted(reports.items()))


def measured(
    trainings: Mapping[int, Training], batches: Iterable[Tensor], should_stop: Callable[[], bool]
) -> dict[int, Quality]:
    """Quality of every SAE over the same vectors."""
    measures = {number: Measure(training.folded()) for number, training in trainings.items()}
    for batch in unstopped(batches, should_stop):
        for measure in measures.values():
            measure.add(batch)
    return {number: measure.quality() for number, measure in measures.items()}


def unstopped(batches: Iterable[Tensor], should_stop: Callable[[], bool]) -> Iterator[Any]:
    for batch in batches:
        if should_stop():
            raise Stopped("Stopped while the SAEs were measured.")
        yield batch

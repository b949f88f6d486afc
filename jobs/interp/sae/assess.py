"""The numbers that a finished SAE is judged by, on text that its training never saw."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from jobs.interp.reading import Split
from jobs.interp.sae.metrics import CrossEntropy, Quality, limited, log10_frequency, quality
from jobs.interp.sae.train import Training
from jobs.interp.sizes import MEASURED_ROWS

#: Training tokens that firing frequencies are taken over: enough for one in a thousand.
FREQUENCY_TOKENS = 65_536


@dataclass(frozen=True)
class Report:
    """`heldout`: reconstruction of held-out vectors; `usage`: firing over training vectors; `loss` as in
    training.
    """

    heldout: Quality
    usage: Quality
    loss: float
    train_tokens: int
    dropped_outliers: int
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
        """For the job's result and the manifest. `loss`: held-out, in normalised space, summed over d_in."""
        entropy = self.entropy
        return {
            "loss": self.loss,
            "fvu": self.heldout.fvu,
            "explained_variance": self.heldout.explained_variance,
            "l0": self.heldout.l0,
            "dead_fraction": self.dead_fraction,
            "dead_over_tokens": self.usage.tokens,
            "heldout_tokens": self.heldout.tokens,
            "train_tokens": self.train_tokens,
            "dropped_outliers": self.dropped_outliers,
            "ce_recovered": entropy.recovered if entropy else None,
            "ce_clean": entropy.clean if entropy else None,
            "ce_sae": entropy.sae if entropy else None,
            "ce_zero": entropy.zero if entropy else None,
            "ce_tokens": entropy.tokens if entropy else 0,
        }


def assess(training: Training, split: Split) -> Report:
    """Measure the SAE of a finished training, on the training's device, against both parts of `split`."""
    sae = training.sae.folded(training.scale)
    heldout = quality(sae, split.heldout.batches(MEASURED_ROWS))
    usage = quality(sae, limited(split.train.batches(MEASURED_ROWS), FREQUENCY_TOKENS))
    loss = heldout.squared_error * training.scale**2
    return Report(heldout, usage, loss, len(split.train), split.dropped_outliers)

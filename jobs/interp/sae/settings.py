"""What shapes the training of one SAE, and the schedules that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from jobs.interp.sae.architectures import NO_AUX, Aux
from jobs.interp.sae.options import Options

#: Gao et al. 2024, appendix A.3, scaled for gradients of means over few latents.
EPSILON = 6.25e-10
#: Share of the run after which dead latents are no longer given new directions: the rest is for learning them.
RESAMPLE_UNTIL = 0.7


@dataclass(frozen=True)
class Settings:
    """`None` is the default that the comment says. `tokens`, `dead_after_tokens` in tokens; `*_every` in steps;
    fractions are of all steps."""

    d_sae: int
    options: Options
    tokens: int
    lr: float = 5e-4
    batch_size: int = 4096
    seed: int = 0
    aux_k: int | None = None  # None: half of d_out, Gao et al. 2024 appendix B.1
    aux_coefficient: float = 1 / 32
    dead_after_tokens: int | None = None  # None: a tenth of the run, at most ten million (Gao et al. 2024)
    resample_every: int | None = None
    warmup_fraction: float = 0.05
    decay_fraction: float = 0.2
    sparsity_warmup_fraction: float = 0.05
    clip_norm: float | None = None
    adam_beta1: float | None = (
        None  # None: 0.9, and 0 for JumpReLU, whose thresholds have rare and large gradients
    )
    adam_beta2: float = 0.999

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch_size)

    @property
    def dead_after(self) -> int:
        return self.dead_after_tokens or min(10_000_000, max(self.batch_size, self.tokens // 10))

    @property
    def betas(self) -> tuple[float, float]:
        jumps = self.options.architecture == "jumprelu"
        return (0.0 if jumps else 0.9) if self.adam_beta1 is None else self.adam_beta1, self.adam_beta2

    def aux(self, d_out: int) -> Aux:
        if not self.options.has_aux:
            return NO_AUX
        return Aux(self.aux_k if self.aux_k is not None else max(1, d_out // 2), self.aux_coefficient)

    def as_dict(self) -> dict[str, Any]:
        """As JSON reads it back."""
        options = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self.options).items()}
        return asdict(self) | {"options": options}

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (from 0): linear up, constant, linear down to almost 0 at the last step."""
        decay = max(1, round(self.decay_fraction * self.steps))
        return self.lr * min(self._risen(step, self.warmup_fraction), (self.steps - step) / decay)

    def sparsity_at(self, step: int) -> float:
        """Weight of the sparsity term at a step (from 0): linear up to the full one."""
        return self.options.sparsity * self._risen(step, self.sparsity_warmup_fraction)

    def resamples_at(self, step: int) -> bool:
        """Whether dead latents get new directions before this step (from 0)."""
        every = self.resample_every
        return bool(every and step and step % every == 0 and step < RESAMPLE_UNTIL * self.steps)

    def _risen(self, step: int, fraction: float) -> float:
        return min(1.0, (step + 1) / max(1, round(fraction * self.steps)))

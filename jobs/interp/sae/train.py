"""The training of one SAE: weights, optimizer, counters, and one step of them.

Reproducible and resumable: every batch is a function of (seed, step), the learning rate and the sparsity weight of
the step, and what is saved holds weights, Adam's moments and the counters. On a CPU a resumed run ends with the same
bits as one that was never interrupted. Data are scaled to mean length sqrt(d) first, so that learning rate and losses
mean the same for any layer; `finished` folds the scale back, so nobody downstream needs to know.

Cost per step of TopK: one encoder product (batch * d_in * d_sae) and about half as much again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.interp.errors import NonFinite, Unusable
from jobs.interp.sae.architectures import SAE, Step, Weights, begin, shaped
from jobs.interp.sae.resample import resample
from jobs.interp.sae.settings import EPSILON, Settings

Metrics = dict[str, float]
#: Rows that biases and thresholds are begun from.
SAMPLE_ROWS = 16_384


class Stream(Protocol):
    """Endless batches that depend on the step alone. Shapes: `[n, d_in]`, of a transcoder `[n, d_in + d_out]`."""

    def batch(self, step: int) -> Tensor: ...


class Training:
    """The state of one training. `scales`: of the input and of the target, one where they are the same."""

    def __init__(self, sae: SAE, settings: Settings, scales: Sequence[float], *, device: str = "cpu") -> None:
        self.sae, self.settings, self.scales, self.device = sae.to(device), settings, tuple(scales), device
        self.step = 0
        self.tokens_since_fired = torch.zeros(sae.d_sae, dtype=torch.long, device=device)
        # fused: one pass over the weights; about a third of the time of the default
        self.adam = torch.optim.Adam(
            sae.parameters(), lr=settings.lr, betas=settings.betas, eps=EPSILON, fused=True
        )
        self.aux = settings.aux(sae.d_out)
        self.window = Window(device)

    @classmethod
    def begin(
        cls, settings: Settings, sample: Tensor, mean_norms: Sequence[float], *, device: str = "cpu"
    ) -> Training:
        """A new training on data of so long vectors in the mean; biases and thresholds come of the sample.

        Shapes: as the stream's.
        """
        rows = sample.cpu().float()  # a model's vectors lie on its card, an SAE begins here
        widths = [rows.shape[1] // len(mean_norms)] * len(mean_norms)
        scales = [math.sqrt(width) / norm for width, norm in zip(widths, mean_norms, strict=True)]
        x, target = _sides(rows, scales)
        sae = begin(
            settings.options,
            x.shape[1],
            target.shape[1],
            settings.d_sae,
            seed=settings.seed,
            sample=x,
            target=target,
        )
        return cls(sae, settings, scales, device=device)

    @property
    def dead(self) -> Tensor:
        """Latents that have not fired for `dead_after` tokens. Shapes: `[d_sae]` bool."""
        return self.tokens_since_fired >= self.settings.dead_after

    def advance(self, batch: Tensor) -> None:
        """One step. Shapes: as the stream's."""
        settings = self.settings
        x, target = _sides(batch.to(self.device).float(), self.scales)
        if settings.resamples_at(self.step):
            self.window.resampled += resample(self, x, target)
        for group in self.adam.param_groups:
            group["lr"] = settings.lr_at(self.step)
        weights = Weights(settings.sparsity_at(self.step), self.dead, self.aux)
        found = self.sae.backward(x, target, weights)
        self.sae.project()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.sae.parameters(), settings.clip_norm)
        self.adam.step()
        self.adam.zero_grad()  # or the next step's gradients would stand beside these
        self.sae.after_step()
        self.tokens_since_fired += len(x)
        self.tokens_since_fired.masked_fill_(found.firings > 0, 0)
        self.step += 1
        self.window.add(self.step, target, found)

    def metrics(self) -> Metrics:
        """Means since the last reading. Raises `NonFinite` when a loss was not a number."""
        return self.window.read() | {
            "dead_fraction": self.dead.double().mean().item(),
            "lr": self.settings.lr_at(self.step - 1),
        }

    def release(self) -> None:
        """No step follows: let go of Adam's moments, which are twice the weights."""
        self.adam.state.clear()

    def finished(self) -> SAE:
        """The SAE for raw activations, scales folded in, on the CPU."""
        return self.folded().cpu()

    def folded(self) -> SAE:
        """The same where the training is."""
        return self.sae.folded(*self.scales)

    def state(self) -> dict[str, Any]:
        """What `tensors` does not say, as JSON."""
        return {
            "step": self.step,
            "scales": [scale.hex() for scale in self.scales],
            "d_out": self.sae.d_out,
            "settings": self.settings.as_dict(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name."""
        tensors: dict[str, Tensor] = {"tokens_since_fired": self.tokens_since_fired}
        tensors |= dict(self.sae.state_dict())
        for name, weight in self.sae.named_parameters():
            moments = self.adam.state.get(weight, {})
            tensors |= {f"adam.{name}.{moment}": value for moment, value in moments.items()}
        return tensors

    @classmethod
    def restored(
        cls,
        settings: Settings,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        device: str = "cpu",
    ) -> Training:
        """The training of `state` and `tensors`. Raises `Unusable` when it was made with other settings."""
        kept = state["settings"]
        if differing := {key for key, value in settings.as_dict().items() if kept.get(key) != value}:
            raise Unusable(f"The checkpoint was made with another {', '.join(sorted(differing))}.")
        d_sae, d_in = tensors["encoder"].shape
        sae = shaped(settings.options, d_in, state["d_out"], d_sae)
        training = cls(sae, settings, [float.fromhex(scale) for scale in state["scales"]], device=device)
        training.step = state["step"]
        training.tokens_since_fired.copy_(tensors["tokens_since_fired"])
        sae.load_state_dict({name: tensors[name] for name in sae.state_dict()})
        for name, weight in sae.named_parameters():
            prefix = f"adam.{name}."
            moments = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
            if moments:
                training.adam.state[weight] = {key: value.to(device) for key, value in moments.items()}
        return training


def sampled(streams: Sequence[Stream], settings: Settings) -> list[Tensor]:
    """The first rows of each stream, read in step; one that is named twice is read once. Shapes: as the streams'."""
    count = min(settings.steps, max(1, SAMPLE_ROWS // settings.batch_size))
    parts: dict[int, list[Tensor]] = {id(stream): [] for stream in streams}
    for step in range(count):
        batches = {id(stream): stream.batch(step) for stream in streams}
        for key, batch in batches.items():
            parts[key].append(batch)
    rows = {key: torch.cat(found) for key, found in parts.items()}
    return [rows[id(stream)] for stream in streams]


def _sides(rows: Tensor, scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Input and target, scaled; the same tensor where the target is the input. Shapes: → `[n, d_in]`, `[n, d_out]`."""
    if len(scales) == 1:
        x = rows * scales[0]
        return x, x
    x, target = rows.chunk(2, dim=1)  # both as wide as the model
    return x * scales[0], target * scales[1]


class Window:
    """Sums since the last report, on the device; the host reads them only when there is something to report."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.bad_step = torch.zeros((), dtype=torch.long, device=device)  # 0: none so far
        self._clear()

    def add(self, step: int, target: Tensor, found: Step) -> None:
        self.steps += 1
        self.tokens += len(target)
        self.loss += found.loss
        self.residual += found.error.square().sum()
        self.variance += (target - target.mean(0)).square().sum()
        self.live += found.live
        here = torch.where(torch.isfinite(found.loss), 0, step)
        self.bad_step = torch.where(self.bad_step == 0, here, self.bad_step)

    def read(self) -> Metrics:
        """Means since the last reading. Raises `NonFinite` when a loss was not a number."""
        self.require_finite()
        metrics = {
            "loss": self.loss.item() / self.steps,
            "fvu": (self.residual / self.variance).item(),
            "l0": self.live.item() / self.tokens,
        }
        if self.resampled:
            metrics["resampled"] = float(self.resampled)
        self._clear()
        return metrics

    def require_finite(self) -> None:
        if step := int(self.bad_step.item()):
            raise NonFinite(f"The loss became NaN or infinite at step {step}; lower the learning rate.")

    def _clear(self) -> None:
        self.steps = self.tokens = self.resampled = 0
        self.loss, self.residual, self.variance = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.live = torch.zeros((), dtype=torch.long, device=self.device)

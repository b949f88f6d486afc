"""What all sparse autoencoders have in common, and what a training asks of them.

    feature_acts = activation((x - b_dec) @ W_enc + ...)        a transcoder leaves x as it is
    x_hat        = feature_acts @ W_dec + b_dec

Names and orientation are SAELens': `W_enc [d_in, d_sae]`, `W_dec [d_sae, d_out]`; a feature's direction is a *row* of
`W_dec`. The encoder is kept as `encoder [d_sae, d_in]`, feature by feature like the decoder, because sparse
gradients touch whole features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.interp.errors import Unusable
from jobs.interp.sae.options import Options
from jobs.interp.sae.support import Support
from jobs.interp.seeds import generator


@dataclass(frozen=True)
class Aux:
    """The auxiliary term. `k`: dead latents used per token; `coefficient`: weight in the loss."""

    k: int
    coefficient: float


#: No auxiliary term.
NO_AUX = Aux(0, 0.0)


@dataclass(frozen=True)
class Weights:
    """What the loss of one step is made of beside the reconstruction.

    `sparsity`: coefficient of L1 or L0 as the warm-up has it now; `dead [d_sae]` bool: latents for AuxK.
    """

    sparsity: float
    dead: Tensor
    aux: Aux = NO_AUX


@dataclass(frozen=True)
class Step:
    """What a step found, on its device. `parts`: the weighted terms that `loss` is the sum of.

    Shapes: `loss` and parts scalars; `error [batch, d_out]` = reconstruction - target; `firings [d_sae]` int64, tokens
    that each latent fired on.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    error: Tensor
    firings: Tensor

    @property
    def live(self) -> Tensor:
        """Live latents of the whole batch, a scalar; L0 is this by tokens."""
        return self.firings.sum()


class SAE(nn.Module):
    """Weights and what they mean. Subclasses say how a code is made, and what a step's gradients are.

    Shapes: `encoder [d_sae, d_in]`, `W_dec [d_sae, d_out]`, `b_dec [d_out]`; mostly `b_enc [d_sae]`.
    """

    #: The name in `cfg.json`, or that of the training where another form is exported.
    architecture: ClassVar[str]
    #: Whether a `cfg.json` may name it.
    in_files: ClassVar[bool] = True
    #: Whether `b_dec` is taken from the input (`apply_b_dec_to_input`); with another target it has no meaning there.
    centres: ClassVar[bool] = True
    #: Whether directions are kept at length 1, and gradients along them are taken away.
    unit_norm: ClassVar[bool] = True
    #: Length that directions begin with.
    initial_norm: ClassVar[float] = 1.0
    #: Kept in at least float32 whatever the rest is (F13: in bfloat16 Adam's steps round away).
    precise: ClassVar[tuple[str, ...]] = ()

    b_enc: nn.Parameter

    def __init__(
        self, d_in: int, d_sae: int, *, d_out: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        d_out = d_in if d_out is None else d_out
        self.encoder = nn.Parameter(torch.zeros(d_sae, d_in, dtype=dtype))
        self.W_dec = nn.Parameter(torch.zeros(d_sae, d_out, dtype=dtype))
        self.b_dec = nn.Parameter(torch.zeros(d_out, dtype=dtype))

    @classmethod
    def shaped(cls, options: Options, d_in: int, d_out: int, d_sae: int) -> Self:
        """An SAE of these options and shapes, all weights zero: to be filled from a file or a checkpoint."""
        return cls(d_in, d_sae)

    @property
    def W_enc(self) -> Tensor:
        return self.encoder.T

    @property
    def bias(self) -> Tensor:
        """What the encoder adds. Shapes: `[d_sae]`."""
        return self.b_enc

    @property
    def d_in(self) -> int:
        return self.encoder.shape[1]

    @property
    def d_out(self) -> int:
        return self.W_dec.shape[1]

    @property
    def d_sae(self) -> int:
        return self.encoder.shape[0]

    def centred(self, x: Tensor) -> Tensor:
        """What the encoder is given. Shapes: `[batch, d_in]` twice."""
        x = x.to(self.encoder.dtype)
        return x - self.b_dec if self.centres else x

    def pre_acts(self, x: Tensor) -> Tensor:
        """What the encoder says. Shapes: `[batch, d_in]` → `[batch, d_sae]`."""
        return F.linear(self.centred(x), self.encoder, self.bias)

    @abstractmethod
    def active(self, x: Tensor) -> tuple[Support, Tensor]:
        """Where latents may be live, and `feature_acts` there. Shapes: `x [batch, d_in]`."""

    def encode(self, x: Tensor) -> Tensor:
        """`feature_acts`, mostly zeros once trained. Shapes: `[batch, d_in]` → `[batch, d_sae]`."""
        support, acts = self.active(x)
        return support.dense(acts)

    def decode(self, feature_acts: Tensor) -> Tensor:
        """Shapes: `[batch, d_sae]` → `[batch, d_out]`."""
        return feature_acts @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction. Shapes: `[batch, d_in]` → `[batch, d_out]`."""
        return self.reconstruct(x)[0]

    def reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, and how often each latent fired. Shapes: → `[batch, d_out]`, `[d_sae]` int64."""
        support, acts = self.active(x)
        return support.rows(acts, self.W_dec) + self.b_dec, support.counts(acts > 0)

    def backward(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        """Put the gradients of this step's loss into `.grad` of the weights, in their own precision.

        Shapes: `x [batch, d_in]`, `target [batch, d_out]`, both scaled; for an autoencoder the same tensor. An
        autocast around it is switched off: half precision makes ties that selection would cut (F14).
        """
        dtype = self.encoder.dtype
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return self._step(x.to(dtype), target.to(dtype), weights)

    @abstractmethod
    def _step(self, x: Tensor, target: Tensor, weights: Weights) -> Step:
        """The same, both given in the weights' precision."""

    @torch.no_grad()
    def project(self) -> None:
        """Where directions keep length 1: take from their gradient what would only change that length."""
        if self.unit_norm:
            gradient = self.W_dec.grad
            assert gradient is not None
            gradient.sub_((gradient * self.W_dec).sum(1, keepdim=True) * self.W_dec)

    @torch.no_grad()
    def initialise(self, seed: int, sample: Tensor, target: Tensor, options: Options) -> None:
        """Random directions, the encoder equal to them, `b_dec` the mean of what is to be reconstructed.

        Shapes: `sample [n, d_in]`, `target [n, d_out]`, both scaled.
        """
        self.W_dec.copy_(drawn(self.W_dec, seed, "decoder"))
        self.normalise_decoder(self.initial_norm)
        self.encoder.copy_(self.W_dec)
        self.b_dec.copy_(target.double().mean(0))

    @torch.no_grad()
    def normalise_decoder(self, length: float = 1.0) -> None:
        """Give each feature's direction, a row of `W_dec`, one length (F27: not each input axis)."""
        self.W_dec.mul_(length / self.W_dec.norm(dim=1, keepdim=True).clamp(min=1e-12))

    def after_step(self) -> None:
        """What has to hold again after the optimizer moved the weights."""
        if self.unit_norm:
            self.normalise_decoder()

    @torch.no_grad()
    def folded(self, scale_in: float, scale_out: float | None = None) -> SAE:
        """The SAE for raw `x` that does what this one does for `scale_in * x`, divided by `scale_out` again.

        W_enc · s_in, W_dec / s_out, b_dec / s_out, the rest unchanged (F19: without b_dec it is silently wrong). Of
        the form that is exported, whichever it was trained in. Raises `Unusable` when an autoencoder is given two
        scales.
        """
        scale_out = scale_in if scale_out is None else scale_out
        if self.centres and scale_in != scale_out:
            raise Unusable(
                f"An autoencoder has one scale, not {scale_in:g} for its input and {scale_out:g} for its output."
            )
        other = self.exported()
        for name, factor in other.scales(scale_in, scale_out).items():
            getattr(other, name).mul_(factor)
        return other

    def scales(self, scale_in: float, scale_out: float) -> dict[str, float]:
        """By which factor each weight changes in `folded`."""
        return {"encoder": scale_in, "W_dec": 1 / scale_out, "b_dec": 1 / scale_out}

    def exported(self) -> SAE:
        """A copy in the form that is exported."""
        other = self.blank()
        other.load_state_dict(self.state_dict())
        return other

    @abstractmethod
    def blank(self) -> Self:
        """One of the same shapes, type and device, weights zero."""

    def facts(self) -> dict[str, Any]:
        """What `cfg.json` says beside shapes and weights."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: getattr(self, name).detach() for name in self.precise}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            tensor = getattr(self, name)
            if tensor.dtype.itemsize < 4:
                tensor.data = value.to(tensor.device)
        return self


def drawn(like: Tensor, seed: int, purpose: str) -> Tensor:
    """Standard normal on the CPU whatever the device, so that cards begin alike. Shapes: as `like`."""
    return torch.randn(like.shape, generator=generator(seed, purpose))


def sum_of(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(parts.values())).sum()

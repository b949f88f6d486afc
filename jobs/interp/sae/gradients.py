"""Loss and gradients of a TopK training step, written out: only live latents are touched after the encoder.

    loss = mean over tokens of |x_hat - x|^2                                (summed over d_in)
         + aux_coefficient * min(1, n_dead / aux_k) * mean |e_hat - e|^2    (AuxK)

AuxK (Gao et al. 2024, appendix A.2; scale and k as in SAELens): the aux_k strongest *dead* latents, without
ReLU and
without `b_dec`, shall reconstruct what the live ones left over, e = x - x_hat, which is held constant. It
gives gradient to dead latents only. Equal to autograd on the dense form (tests), at a fifth of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.interp.sae.architectures import TopK, select
from jobs.interp.sae.sparse import ByLatent, Code, products

#: Of the latents; `jobs.interp.sizes.batch_bytes` reserves for as many.
AUX_SHARE = 0.3


@dataclass(frozen=True)
class Aux:
    """The auxiliary term. `k`: latents used per token; `coefficient`: weight in the loss."""

    k: int
    coefficient: float


@dataclass(frozen=True)
class Step:
    """What a step found, on its device. `loss`, `aux_loss`: scalars; `error [batch, d_in]` = x_hat - x."""

    loss: Tensor
    aux_loss: Tensor
    error: Tensor
    code: Code


@dataclass
class Gradients:
    """By weight; shapes as the weights'. `b_dec`'s follows from the others."""

    encoder: Tensor
    b_enc: Tensor
    W_dec: Tensor


@torch.no_grad()
def backward(sae: TopK, x: Tensor, dead: Tensor, aux: Aux) -> Step:
    """Put the gradients of the loss into `.grad` of the SAE's weights.

    Shapes: `x [batch, d_in]`, normalised; `dead [d_sae]` bool.
    """
    pre = sae.pre_acts(x)
    values, indexes = select(pre, sae.k)
    code = Code(values.relu(), indexes, sae.d_sae)
    error = sae.rebuild(code) - x  # [batch, d_in]
    found = _main_gradients(sae, x, code, error)
    aux_loss = _add_aux(found, sae, x, pre, error, dead, aux)
    sae.encoder.grad, sae.b_enc.grad, sae.W_dec.grad = found.encoder, found.b_enc, found.W_dec
    # b_dec is added to the output and taken from the encoder's input
    sae.b_dec.grad = error.sum(0) * (2 / len(x)) - found.b_enc @ sae.encoder
    return Step(error.square().sum(1).mean() + aux_loss, aux_loss, error, code)


def _main_gradients(sae: TopK, x: Tensor, code: Code, error: Tensor) -> Gradients:
    slope = error * (2 / len(x))  # d loss / d x_hat
    by_latent = ByLatent(code.indexes, sae.d_sae)
    rising = products(code, slope, sae.W_dec) * (code.values > 0)  # d loss / d pre_acts: [batch, k]
    return Gradients(
        encoder=by_latent.sums(rising, x - sae.b_dec),
        b_enc=by_latent.sums(rising, x.new_ones(len(x), 1)).squeeze(1),
        W_dec=by_latent.sums(code.values, slope),
    )


def _add_aux(
    found: Gradients, sae: TopK, x: Tensor, pre: Tensor, error: Tensor, dead: Tensor, aux: Aux
) -> Tensor:
    """Add the auxiliary term's gradients, dense but over dead latents only; returns its weighted loss."""
    which = dead.nonzero().flatten()
    if not aux.coefficient or not aux.k or not len(which):
        return x.new_zeros(())
    weight = aux.coefficient * min(1.0, len(which) / aux.k) / len(x)
    loss = x.new_zeros(())
    rows = _aux_rows(len(x), sae.d_sae, len(which))
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        loss += _add_aux_of(found, sae, x[part], pre[part], error[part], which, weight, aux.k)
    return loss


def _aux_rows(batch: int, d_sae: int, n_dead: int) -> int:
    """Rows at once: the term takes no more memory than with `AUX_SHARE` of the latents dead, however many are."""
    return max(1, min(batch, int(batch * AUX_SHARE * d_sae / n_dead)))


def _add_aux_of(
    found: Gradients, sae: TopK, x: Tensor, pre: Tensor, error: Tensor, which: Tensor, weight: float, k: int
) -> Tensor:
    """The same for some rows of the batch; `weight` is of one row."""
    acts = _strongest(pre[:, which], k)  # [rows, n_dead]
    directions = sae.W_dec[which]
    off = acts @ directions + error  # e_hat - e, as error is x_hat - x
    slope = off * (2 * weight)
    rising = (slope @ directions.T).mul_(acts != 0)  # [rows, n_dead]
    found.W_dec[which] += acts.T @ slope
    found.encoder[which] += rising.T @ (x - sae.b_dec)
    found.b_enc[which] += rising.sum(0)
    return weight * off.square().sum()


def _strongest(pre: Tensor, k: int) -> Tensor:
    """All but the k largest of each row set to zero. Shapes: `[batch, n_dead]` twice."""
    if k >= pre.shape[1]:
        return pre
    values, indexes = select(pre, k)
    return torch.zeros_like(pre).scatter_(1, indexes, values)


@torch.no_grad()
def project(sae: TopK) -> None:
    """Take from the decoder's gradient what would only change a direction's length, which is put back to 1
    anyway.
    """
    gradient = sae.W_dec.grad
    assert gradient is not None
    gradient.sub_((gradient * sae.W_dec).sum(1, keepdim=True) * sae.W_dec)

"""Loss and gradients of a step with a sparse code, written out: only live latents are touched after the encoder.

    loss = mean over tokens of |x_hat - x|^2 (summed over d_in), Matryoshka: of every prefix, added
         + aux_coefficient * min(1, n_dead / aux_k) * mean |e_hat - e|^2    (AuxK)

AuxK (Gao et al. 2024, appendix A.2; scale and k as in SAELens): the aux_k strongest *dead* latents, without
ReLU and without `b_dec`, shall reconstruct what the live ones left over, e = x - x_hat, which is held constant. It
gives gradient to dead latents only. Equal to autograd on the dense form (tests), at a fifth of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobs.interp.sae.architectures.base import Step, Weights, sum_of
from jobs.interp.sae.architectures.selection import select
from jobs.interp.sae.sparse import ByLatent, Code, products, weighted_rows

if TYPE_CHECKING:
    from jobs.interp.sae.architectures.topk import TopK

#: Of the latents; `jobs.interp.sizes.batch_bytes` reserves for as many.
AUX_SHARE = 0.3


@dataclass
class Gradients:
    """By weight; shapes as the weights'. `b_dec`'s follows from the others."""

    encoder: Tensor
    b_enc: Tensor
    W_dec: Tensor


def sparse_step(sae: TopK, x: Tensor, target: Tensor, pre: Tensor, code: Code, weights: Weights) -> Step:
    """A step of an SAE whose code is `code`, selected from `pre [batch, d_sae]`."""
    centred = sae.centred(x)
    groups = _groups(code, sae.prefixes)
    errors = _errors(groups, sae, target)
    slopes = [error * (2 / len(x)) for error in errors]  # d loss / d x_hat, of each prefix alone
    found = _main_gradients(sae, centred, groups, slopes)
    parts = {name: error.square().sum(1).mean() for name, error in zip(_names(sae), errors, strict=True)}
    parts["auxiliary"] = _add_aux(found, sae, centred, pre, errors[-1], weights)
    sae.encoder.grad, sae.b_enc.grad, sae.W_dec.grad = found.encoder, found.b_enc, found.W_dec
    # b_dec is added to the output and taken from the encoder's input
    sae.b_dec.grad = slopes[0].sum(0) - found.b_enc @ sae.encoder
    return Step(sum_of(parts), parts, errors[-1], code.firings())


def _names(sae: TopK) -> list[str]:
    return [f"inner_{width}" for width in sae.prefixes[:-1]] + ["reconstruction"]


def _groups(code: Code, prefixes: tuple[int, ...]) -> list[tuple[slice, Code]]:
    """The latents that each prefix adds, and the code of these alone."""
    if len(prefixes) == 1:
        return [(slice(0, prefixes[0]), code)]
    return [(slice(low, high), code.between(low, high)) for low, high in pairwise((0, *prefixes))]


def _errors(groups: list[tuple[slice, Code]], sae: TopK, target: Tensor) -> list[Tensor]:
    """Of each prefix's reconstruction. Shapes: `[batch, d_out]` each."""
    errors, error = [], sae.b_dec - target
    for part, code in groups:
        error = weighted_rows(code, sae.W_dec[part]).add_(error)
        errors.append(error)
    return errors


def _main_gradients(
    sae: TopK, centred: Tensor, groups: list[tuple[slice, Code]], slopes: list[Tensor]
) -> Gradients:
    """Of all prefixes. `slopes` ends with what reaches each group: its own prefix's slope and those of wider ones."""
    for wider, narrower in pairwise(reversed(range(len(slopes)))):
        slopes[narrower] += slopes[wider]
    found = [
        _group_gradients(sae, centred, *group, slope) for group, slope in zip(groups, slopes, strict=True)
    ]
    if len(found) == 1:
        return found[0]
    return Gradients(
        encoder=torch.cat([one.encoder for one in found]),
        b_enc=torch.cat([one.b_enc for one in found]),
        W_dec=torch.cat([one.W_dec for one in found]),
    )


def _group_gradients(sae: TopK, centred: Tensor, part: slice, code: Code, slope: Tensor) -> Gradients:
    by_latent = ByLatent(code)
    rising = products(code, slope, sae.W_dec[part]) * (code.values > 0)  # d loss / d pre_acts: [n]
    return Gradients(
        encoder=by_latent.sums(rising, centred),
        b_enc=by_latent.sums(rising, centred.new_ones(len(code), 1)).squeeze(1),
        W_dec=by_latent.sums(code.values, slope),
    )


def _add_aux(
    found: Gradients, sae: TopK, centred: Tensor, pre: Tensor, error: Tensor, weights: Weights
) -> Tensor:
    """Add the auxiliary term's gradients, dense but over dead latents only; returns its weighted loss."""
    aux, loss = weights.aux, centred.new_zeros(())
    if not aux.coefficient or not aux.k:
        return loss
    which = weights.dead.nonzero().flatten()
    if not len(which):
        return loss
    weight = aux.coefficient * min(1.0, len(which) / aux.k) / len(centred)
    rows = _aux_rows(len(centred), sae.d_sae, len(which))
    for first in range(0, len(centred), rows):
        part = slice(first, first + rows)
        loss += _add_aux_of(found, sae, centred[part], pre[part], error[part], which, weight, aux.k)
    return loss


def _aux_rows(batch: int, d_sae: int, n_dead: int) -> int:
    """Rows at once: the term takes no more memory than with `AUX_SHARE` of the latents dead, however many are."""
    return max(1, min(batch, int(batch * AUX_SHARE * d_sae / n_dead)))


def _add_aux_of(
    found: Gradients,
    sae: TopK,
    centred: Tensor,
    pre: Tensor,
    error: Tensor,
    which: Tensor,
    weight: float,
    k: int,
) -> Tensor:
    """The same for some rows of the batch; `weight` is of one row."""
    acts = _strongest(pre[:, which], k)  # [rows, n_dead]
    directions = sae.W_dec[which]
    off = acts @ directions + error  # e_hat - e, as error is x_hat - x
    slope = off * (2 * weight)
    rising = (slope @ directions.T).mul_(acts != 0)  # [rows, n_dead]
    found.W_dec[which] += acts.T @ slope
    found.encoder[which] += rising.T @ centred
    found.b_enc[which] += rising.sum(0)
    return weight * off.square().sum()


def _strongest(pre: Tensor, k: int) -> Tensor:
    """All but the k largest of each row set to zero. Shapes: `[batch, n_dead]` twice."""
    if k >= pre.shape[1]:
        return pre
    values, indexes = select(pre, k)
    return torch.zeros_like(pre).scatter_(1, indexes, values)

"""Sparse autoencoders and transcoders as functions of their weights; `options` says which there are."""

from __future__ import annotations

from torch import Tensor

from jobs.interp.sae.architectures.base import NO_AUX, SAE, Aux, Step, Weights
from jobs.interp.sae.architectures.batchtopk import BatchTopK, Matryoshka
from jobs.interp.sae.architectures.gated import Gated
from jobs.interp.sae.architectures.jumprelu import JumpReLU
from jobs.interp.sae.architectures.selection import select
from jobs.interp.sae.architectures.standard import SkipTranscoder, Standard, Transcoder
from jobs.interp.sae.architectures.topk import TopK
from jobs.interp.sae.options import Options

__all__ = [
    "ARCHITECTURES",
    "NO_AUX",
    "SAE",
    "Aux",
    "BatchTopK",
    "Gated",
    "JumpReLU",
    "Matryoshka",
    "Options",
    "SkipTranscoder",
    "Standard",
    "Step",
    "TopK",
    "Transcoder",
    "Weights",
    "begin",
    "select",
    "shaped",
]

#: By the name in `cfg.json`, or that of the training.
ARCHITECTURES: dict[str, type[SAE]] = {
    cls.architecture: cls
    for cls in (TopK, BatchTopK, Matryoshka, JumpReLU, Standard, Gated, Transcoder, SkipTranscoder)
}


def shaped(options: Options, d_in: int, d_out: int, d_sae: int) -> SAE:
    """An SAE of these options, weights zero. Raises `Unusable` where the shapes do not allow them."""
    options.check(d_in, d_out, d_sae)
    return ARCHITECTURES[options.architecture].shaped(options, d_in, d_out, d_sae)


def begin(
    options: Options, d_in: int, d_out: int, d_sae: int, *, seed: int, sample: Tensor, target: Tensor
) -> SAE:
    """An SAE to be trained, its weights drawn from `seed` and fitted to a sample of scaled data.

    Shapes: `sample [n, d_in]`, `target [n, d_out]`, the same tensor for an autoencoder.
    """
    sae = shaped(options, d_in, d_out, d_sae)
    sae.initialise(seed, sample, target, options)
    return sae

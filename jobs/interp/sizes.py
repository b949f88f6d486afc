"""Bytes before the work: formulas over what manifests say. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Bytes of a number by the name of its type.
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: What a CUDA context and cuBLAS' workspace hold before the first tensor; 0.5 to 0.6 GiB on cards of 2020 and
#: later.
CUDA_BYTES = 640 * 2**20
#: Reading the built-in corpus and holding its token rows, in host memory; measured at 110 to 180 MiB.
CORPUS_BYTES = 192 * 2**20


def model_bytes(manifest: Mapping[str, Any], *, on_cpu: bool) -> int:
    """A loaded model: float32 on a CPU, as stored on a card (`models.compute_dtype`)."""
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    return manifest["parameters"] * width


def forward_bytes(manifest: Mapping[str, Any], tokens: int, *, on_cpu: bool, logits: bool = False) -> int:
    """Working memory of one forward pass over `tokens` tokens without gradients.

    The widest moment holds the stream, queries, keys, values and the MLP's inner layer: about 16 x d_model
    per token;
    with `logits` the scores of the vocabulary, once as they come and once in float32.
    """
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    scores = manifest["d_vocab"] * (width + 4) if logits else 0
    return tokens * (16 * manifest["d_model"] * width + scores)


def topk_bytes(d_in: int, d_sae: int, k: int, batch_size: int) -> dict[str, int]:
    """Parts of a TopK training in float32: weights, gradients, both moments of Adam, and a batch on its
    way.
    """
    weights = 4 * (2 * d_in * d_sae + d_sae + d_in)
    batch = 4 * batch_size * (2 * d_sae + 6 * d_in + 8 * k)
    return {"sae": weights, "gradients": weights, "adam": 2 * weights, "batch": batch}


def buffer_bytes(manifest: Mapping[str, Any]) -> int:
    """Rows of stored activations that a training mixes at a time (`reading.BUFFER_BYTES`), twice while
    filling.
    """
    return 2 * min(512 * 2**20, manifest["tokens"] * manifest["d_model"] * WIDTHS[manifest["dtype"]])

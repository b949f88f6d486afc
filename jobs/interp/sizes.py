"""Bytes before the work: formulas over what manifests say. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Bytes of a number by the name of its type.
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: What a CUDA context and cuBLAS' workspace hold before the first tensor; 0.5 to 0.6 GiB on cards of 2020 and
#: later.
CUDA_BYTES = 640 * 2**20
#: A tokenizer, the modules of its model's family, and what the allocator keeps after loading: measured with
#: SmolLM2-135M (49 152 words) at 80 MB beyond the process; in an extraction part of `CORPUS_BYTES`.
TOKENIZER_BYTES = 96 * 2**20
#: Rows per pass of `sae.assess`, which does not depend on the training's batch size.
MEASURED_ROWS = 4096
#: Reading the built-in corpus and holding its token rows, in host memory; measured at 110 to 180 MiB.
CORPUS_BYTES = 192 * 2**20
#: Reading files piece by piece, with the tokenizer at work.
READER_BYTES = 128 * 2**20


def model_bytes(manifest: Mapping[str, Any], *, on_cpu: bool) -> int:
    """A loaded model: float32 on a CPU, as stored on a card (`models.compute_dtype`)."""
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    return manifest["parameters"] * width


def forward_bytes(manifest: Mapping[str, Any], tokens: int, *, on_cpu: bool, logits: bool = False) -> int:
    """Working memory of one forward pass over `tokens` tokens without gradients.

    The widest moment holds the stream, queries, keys, values and the MLP's inner layer: 10 x d_model per token in
    SmolLM2 (measured), 15 in Gemma-2; with `logits` the scores of the vocabulary for all, and a row of eight at a
    time in float32 with its logarithms (`metrics.cross_entropy`).
    """
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    scores = manifest["d_vocab"] * (width + 2) if logits else 0
    return tokens * (16 * manifest["d_model"] * width + scores)


def captured_bytes(manifest: Mapping[str, Any], tokens: int, sites: int, *, on_cpu: bool) -> int:
    """What hooks hold until the pass is over. Taking it out then needs less than the pass has let go of."""
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    return tokens * manifest["d_model"] * width * sites


def file_bytes(manifest: Mapping[str, Any], *, on_cpu: bool) -> int:
    """A model's file while it is loaded: mapped, and a mapping that nobody shares counts as private memory.

    On a card the file is the host's affair.
    """
    return manifest["parameters"] * WIDTHS.get(manifest["dtype"], 4) if on_cpu else 0


def widest(*phases: dict[str, int]) -> dict[str, int]:
    """The parts of the phase that takes most: phases follow each other, and each lets go of its own."""
    return max(phases, key=lambda phase: sum(phase.values()))


def topk_bytes(d_in: int, d_sae: int) -> dict[str, int]:
    """What a TopK training in float32 holds from begin to end: weights, both moments of Adam, and at the peak
    of a step the gradients and their product with the decoder (`gradients.project`).
    """
    weights = 4 * (2 * d_in * d_sae + d_sae + d_in)
    return {"sae": weights, "gradients": weights + weights // 2, "adam": 2 * weights}


def batch_bytes(d_in: int, d_sae: int, k: int, batch_size: int) -> int:
    """A batch on its way, in training or in the measurement after it, whichever is wider.

    Per row: what the encoder says (1.2 measured with no latent dead), and the auxiliary term's 2.25 times that for
    three in ten latents (1.9 in all), which it never exceeds: where more are dead, it goes through the batch in parts;
    the input, its copies and the error; values and indexes of the live ones.
    """
    training = batch_size * (19 * d_sae // 10 + 8 * d_in + 12 * k)
    measuring = MEASURED_ROWS * (d_sae + 8 * d_in + 4 * k)
    return 4 * max(training, measuring)


def buffer_bytes(manifest: Mapping[str, Any]) -> int:
    """Rows of stored activations that a training mixes at a time (`reading.BUFFER_BYTES`), twice while filling."""
    return 2 * min(512 * 2**20, manifest["tokens"] * manifest["d_model"] * WIDTHS[manifest["dtype"]])


#: Vectors of a shard, where they fit `SHARD_BYTES`.
SHARD_TOKENS = 16_384
#: All sites of a shard in memory. Two shards lie there: one is filled while the one before is written.
SHARD_BYTES = 256 * 2**20


def shard_tokens(d_model: int, sites: int, dtype: str) -> int:
    """Vectors per shard: fewer where there are many wide sites, so that memory does not grow with them."""
    return max(1024, min(SHARD_TOKENS, SHARD_BYTES // (d_model * sites * WIDTHS[dtype])))


def shard_bytes(d_model: int, sites: int, room: int, tokens: int, dtype: str) -> int:
    """A shard being filled and one being written, at most `room` tokens each and `tokens` together: all sites as
    stored, and one site put together.
    """
    first = min(room, tokens)
    return (min(2 * room, tokens) * sites + first) * d_model * WIDTHS[dtype]

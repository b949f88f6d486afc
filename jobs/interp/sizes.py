"""Bytes before the work: formulas over what manifests say. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.interp.headers import Weights

#: Of a model that is not quantized.
NOTHING_PACKED = {"weights": 0, "bytes": 0, "largest": 0}
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
#: Vectors of a site that a training mixes at a time (`shuffling.BUFFER_BYTES`).
BUFFER_BYTES = 512 * 2**20
#: Numbers in float32 for each latent and row, in a step and in a measurement: measured with 4096 latents and rows at
#: 1.3 and 1.0 (topk), 1.4 and 1.1, 1.6 and 1.1, 1.5 and 1.2 (jumprelu), 4.6 and 4.8, 6.9 and 6.4, 4.7 and 4.8.
PER_LATENT = {
    "topk": (2.2, 1.05),  # once a step beside other work came to 2.1
    "batchtopk": (2.0, 1.2),
    "matryoshka_batchtopk": (2.2, 1.2),
    "jumprelu": (1.9, 1.3),
    "standard": (4.9, 4.9),
    "gated": (7.1, 6.6),
    "transcoder": (4.9, 4.9),
    "skip_transcoder": (4.9, 4.9),
}
#: Share of live latents from which on a step of JumpReLU is dense (`support.SPARSE_BELOW`, with room).
SPARSE_LIVE = 0.04
#: Reading the built-in corpus and holding its token rows, in host memory; measured at 110 to 180 MiB.
CORPUS_BYTES = 192 * 2**20
#: Reading files piece by piece, with the tokenizer at work.
READER_BYTES = 128 * 2**20

#: Bytes of a quantized weight with its share of the scales: a float32 for a row (int8), for 64 weights (nf4).
PACKED_BYTES = {"int8": 1.02, "nf4": 0.57}
#: Working memory of packing one weight on a CPU (bitsandbytes 0.50: it as float32, scaled, cut, as indexes), and of
#: unpacking it for a product there; measured.
PACKING_BYTES, UNPACKING_BYTES = 24, 16
#: The library and its tables, in host memory.
LIBRARY_BYTES = 64 * 2**20
#: Tokens of `probe.TEXT` that are read, at most; of usual vocabularies it has about 240.
PROBE_TOKENS = 256


def model_bytes(manifest: Mapping[str, Any], *, on_cpu: bool) -> int:
    """A loaded model: float32 on a CPU, as stored on a card (`models.compute_dtype`); packed weights stay packed."""
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    packed = manifest.get("quantization") or NOTHING_PACKED
    return (manifest["parameters"] - packed["weights"]) * width + packed["bytes"]


def forward_bytes(manifest: Mapping[str, Any], tokens: int, *, on_cpu: bool, logits: bool = False) -> int:
    """Working memory of one forward pass over `tokens` tokens without gradients.

    The widest moment holds the stream, queries, keys, values and the MLP's inner layer: 10 x d_model per token in
    SmolLM2 (measured), 15 in Gemma-2; with `logits` the scores of the vocabulary for all, and a row of eight at a
    time in float32 with its logarithms (`metrics.cross_entropy`). A packed layer is unpacked for its product.
    """
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    scores = manifest["d_vocab"] * (width + 2) if logits else 0
    largest = (manifest.get("quantization") or NOTHING_PACKED)["largest"]
    unpacked = largest * (UNPACKING_BYTES if on_cpu else width)
    return tokens * (16 * manifest["d_model"] * width + scores) + unpacked


def captured_bytes(manifest: Mapping[str, Any], tokens: int, sites: int, *, on_cpu: bool) -> int:
    """What hooks hold until the pass is over. Taking it out then needs less than the pass has let go of."""
    width = 4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)
    return tokens * manifest["d_model"] * width * sites


def clean_bytes(manifest: Mapping[str, Any], tokens: int, *, on_cpu: bool) -> int:
    """Scores of the model as it is, kept while those of the changed one are made, and what comparing a row of eight of
    both takes in float32: measured at 3 bytes a score with SmolLM2.
    """
    return tokens * manifest["d_vocab"] * ((4 if on_cpu else WIDTHS.get(manifest["dtype"], 4)) + 3)


def file_bytes(manifest: Mapping[str, Any], *, on_cpu: bool) -> int:
    """A model's file while it is loaded: mapped, and a mapping that nobody shares counts as private memory.

    On a card the file is the host's affair.
    """
    packed = manifest.get("quantization")
    plain = manifest["parameters"] - (packed or NOTHING_PACKED)["weights"]
    library = LIBRARY_BYTES + packed["bytes"] if packed else 0
    return plain * WIDTHS.get(manifest["dtype"], 4) + library if on_cpu else 0


def quantized_bytes(weights: Weights, scheme: str) -> int:
    """A model as it will be: its linear layers packed, the rest as stored; on the disk and on a card."""
    linear = sum(weights.linear)
    plain = weights.parameters - linear
    return int(plain * WIDTHS.get(weights.dtype, 4) + linear * PACKED_BYTES[scheme])


def quantizing(weights: Weights, scheme: str, *, on_cpu: bool) -> dict[str, int]:
    """The parts of a quantization, where it takes most: the original runs over the probe's text, on a card with one
    block at a time, on a CPU with all of it in float32; the layers are packed one at a time; the result runs over it.
    """
    width = 4 if on_cpu else WIDTHS.get(weights.dtype, 4)
    linear, result = weights.linear, quantized_bytes(weights, scheme)
    plain = weights.parameters - sum(linear)
    words, d_model = weights.table
    forward = PROBE_TOKENS * (
        16 * d_model * width + words * (width + 8)
    )  # scores, in float32, their logarithms
    if not on_cpu:
        visit = {"embeddings": plain * width, "block": weights.widest_block * width, "forward": forward}
        made = {"model": result, "packing": 2 * max(linear, default=0) * width, "forward": forward}
        return widest(visit, made) | {"cuda": CUDA_BYTES}
    same = width == WIDTHS.get(weights.dtype)  # then the mapped file is the model
    original = {"model": weights.parameters * width, "tokenizer": TOKENIZER_BYTES}
    original |= {} if same else {"file": weights.bytes}
    running = {"model": weights.parameters * width, "tokenizer": TOKENIZER_BYTES, "forward": forward}
    packing = {"file": weights.bytes, "model": result, "packing": max(linear, default=0) * PACKING_BYTES}
    return widest(original, running, packing) | {"library": LIBRARY_BYTES}


def nothing_to_quantize(name: str) -> str:
    return (
        f"{name} has no linear layer that bitsandbytes could quantize: all its weights are embeddings, the head, "
        "norms, or experts that lie in one tensor. Take it with quantization none."
    )


def widest(*phases: dict[str, int]) -> dict[str, int]:
    """The parts of the phase that takes most: phases follow each other, and each lets go of its own."""
    return max(phases, key=lambda phase: sum(phase.values()))


def sae_bytes(architecture: str, width: int, d_sae: int) -> dict[str, int]:
    """What a training in float32 holds from begin to end: weights, both moments of Adam, and at the peak of a step
    the gradients and their product with the decoder (`SAE.project`). `width`: of the model, in and out.
    """
    skip = width * width if architecture == "skip_transcoder" else 0
    weights = 4 * (2 * width * d_sae + d_sae + width + skip)
    return {"sae": weights, "gradients": weights + weights // 2, "adam": 2 * weights}


def batch_bytes(architecture: str, width: int, d_sae: int, k: int, batch_size: int, live: float = 0) -> int:
    """A batch on its way, in training or in the measurement after it, whichever is wider.

    Per row: numbers for each latent (`PER_LATENT`; of TopK 1.2 measured with no latent dead, and the auxiliary term's
    2.25 for three in ten latents, which it never exceeds: where more are dead, it goes through the batch in parts); the
    input, its copies and the error; values and indexes of the live ones. `live`: latents that JumpReLU begins with.
    """
    step, measure = PER_LATENT[architecture]
    if architecture == "jumprelu" and live > SPARSE_LIVE * d_sae:
        step, measure = PER_LATENT["standard"]
    training = batch_size * (int(step * d_sae) + 8 * width + 12 * k)
    measuring = MEASURED_ROWS * (int(measure * d_sae) + 8 * width + 4 * k)
    return 4 * max(training, measuring)


def buffer_bytes(manifest: Mapping[str, Any]) -> int:
    """Rows of stored activations of a site that a training mixes at a time, and those it reads ahead."""
    return 2 * min(BUFFER_BYTES, manifest["tokens"] * manifest["d_model"] * WIDTHS[manifest["dtype"]])


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

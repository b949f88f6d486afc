"""What a training of SAEs takes, before it runs: bytes, and how much work there is. Plain Python, no torch.

SAEs that are trained together are held together; their steps come one after another, so of their batches only the
widest counts. What follows the training lets go of its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.interp import sizes
from jobs.interp.sae import choices
from jobs.interp.sae.options import Options

Values = Mapping[str, Any]
#: A token that `sources.held` holds, and what a row takes beside its tokens; measured at 150 to 180.
TOKEN_BYTES, ROW_BYTES = 4, 192
#: Time of a step, TopK's being 1: measured with 512 dimensions, 4096 latents, one thread.
STEP_COST = {
    "matryoshka_batchtopk": 1.2,
    "standard": 2.6,
    "transcoder": 2.6,
    "skip_transcoder": 3.0,
    "gated": 4.2,
}
Parts = dict[str, int]


def training(
    params: Values, manifests: Mapping[str, Values], ce_rows: int, *, on_cpu: bool
) -> dict[str, Any]:
    """`parts` (bytes on the card by name, or in the host's memory where the mathematics runs there), `disk_bytes` and
    `work`, by the names that `Estimate.of` takes. `manifests`: of the inputs, by parameter."""
    members, width = choices.members(params), width_of(manifests)
    held = held_bytes(members, width)
    disk = 7 * held["sae"]  # two checkpoints of weights and both moments, and the result
    batch = {"batch": max(batch_of(member, width, params["batch_size"]) for member in members)}
    reading = buffers(params, members, manifests, on_cpu=on_cpu)
    phases = [batch | reading, *measuring(params, manifests, ce_rows, on_cpu=on_cpu)]
    loading = loading_model(params, manifests, on_cpu=on_cpu)
    parts = held | ({} if on_cpu else {"cuda": sizes.CUDA_BYTES}) | sizes.widest(*phases, *loading)
    work = sum(
        params["tokens"] * width * member["d_sae"] * STEP_COST.get(member["architecture"], 1.0)
        for member in members
    )
    if "activations" not in manifests:
        work += float(params["tokens"]) * manifests["model"]["parameters"]
    return {"parts": parts, "disk_bytes": disk, "work": work}


def finalizing(params: Values, manifests: Mapping[str, Values], ce_rows: int) -> dict[str, Any]:
    """The same for making artifacts of a checkpoint, in the host's memory."""
    members, width = choices.members(params), width_of(manifests)
    held = held_bytes(members, width)
    batch = {"batch": max(batch_of(member, width, 0) for member in members)}
    phases = [batch, *measuring(params, manifests, ce_rows, on_cpu=True)]
    phases += loading_model(params, manifests, on_cpu=True)
    parts = {"sae": held["sae"], "adam": held["adam"]} | sizes.widest(*phases)
    return {"parts": parts, "disk_bytes": held["sae"]}


def width_of(manifests: Mapping[str, Values]) -> int:
    return (manifests.get("activations") or manifests["model"])["d_model"]


def held_bytes(members: list[dict[str, Any]], width: int) -> Parts:
    """Weights and moments of all from begin to end, and the gradients of one at a time."""
    each = [sizes.sae_bytes(member["architecture"], width, member["d_sae"]) for member in members]
    return {
        "sae": sum(one["sae"] for one in each),
        "gradients": max(one["gradients"] for one in each),
        "adam": sum(one["adam"] for one in each),
    }


def batch_of(member: Values, width: int, batch_size: int) -> int:
    live = member.get("target_l0") or Options.target_l0
    return sizes.batch_bytes(
        member["architecture"], width, member["d_sae"], member["k"] or 0, batch_size, live
    )


def buffers(
    params: Values, members: list[dict[str, Any]], manifests: Mapping[str, Values], *, on_cpu: bool
) -> Parts:
    """Vectors waiting to be trained on. Stored ones lie in the host's memory, those of a model where the model is."""
    if "activations" in manifests:
        manifest = manifests["activations"]
        read = [choices.places(member, manifest["sites"]) or [] for member in members]
        views = {str(entries): len(entries) for entries in read}
        return {"buffer": sum(views.values()) * sizes.buffer_bytes(manifest)} if on_cpu else {}
    manifest = manifests["model"]
    places = {(m["site"]["block"], place) for m in members for place in choices.reads(m)}
    tokens = params["model_batch_size"] * params["context_size"]
    number = 4 if on_cpu else sizes.WIDTHS.get(manifest["dtype"], 4)
    rows = min(sizes.BUFFER_BYTES // (number * manifest["d_model"]) + 2**14, needed_tokens(params))
    found = {
        "model": sizes.model_bytes(manifest, on_cpu=on_cpu),
        "forward": sizes.forward_bytes(manifest, tokens, on_cpu=on_cpu),
        "buffer": len(places) * rows * manifest["d_model"] * number,
    }
    if not on_cpu:
        return found
    return found | {"text": text_bytes(params), "tokenizer": sizes.TOKENIZER_BYTES}


def text_bytes(params: Values) -> int:
    """Text in the host's memory: all rows of a training, unless it ends before; the built-in one with its rows."""
    if params["corpus"] == "english":
        return sizes.CORPUS_BYTES
    needed = needed_tokens(params)
    return sizes.READER_BYTES + TOKEN_BYTES * needed + ROW_BYTES * (needed // params["context_size"] + 1)


def needed_tokens(params: Values) -> int:
    """Tokens of text that a training straight from a model reads, at most."""
    return params["max_tokens"] or int(params["tokens"] / (1 - params["heldout_fraction"]))


def measuring(params: Values, manifests: Mapping[str, Values], ce_rows: int, *, on_cpu: bool) -> list[Parts]:
    """What the two phases after the training take that measure the loss through the SAEs."""
    if not params["ce_tokens"]:
        return []
    source = manifests.get("activations")
    facts = source["model"] if source else manifests["model"]
    tokens = ce_rows * (source or params)["context_size"]
    model = {"model": sizes.model_bytes(facts, on_cpu=on_cpu)}
    model |= {"tokenizer": sizes.TOKENIZER_BYTES} if on_cpu else {}
    forward = sizes.forward_bytes(facts, tokens, on_cpu=on_cpu, logits=True)
    forward += sizes.clean_bytes(facts, tokens, on_cpu=on_cpu)
    return [model | {"file": sizes.file_bytes(facts, on_cpu=on_cpu)}, model | {"forward": forward}]


def loading_model(params: Values, manifests: Mapping[str, Values], *, on_cpu: bool) -> list[Parts]:
    """The moment before a training straight from a model in which the model's file is mapped."""
    if "activations" in manifests:
        return []
    facts = manifests["model"]
    return [
        {
            "model": sizes.model_bytes(facts, on_cpu=on_cpu),
            "file": sizes.file_bytes(facts, on_cpu=on_cpu),
            "tokenizer": sizes.TOKENIZER_BYTES if on_cpu else 0,
        }
    ]

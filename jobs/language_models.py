"""What kinds ask of a model artifact before they run it: places, context, and the facts that its products carry on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.kind import Input

#: What those who read a product of the model must know of it.
FACTS = (
    "repository",
    "revision",
    "weights_sha256",
    "parameters",
    "dtype",
    "d_model",
    "d_vocab",
    "n_layers",
    "quantization",
)


def facts_of(model: Input) -> dict[str, Any]:
    return {"name": model.name} | {key: model.manifest.get(key) for key in FACTS}


def missing_words(block: int, place: str, manifest: Mapping[str, Any]) -> str:
    """Why the model has no such place; empty where it has, or where its manifest does not say."""
    last = manifest["n_layers"] - 1
    if block > last:
        return f"Block {block} does not exist: the model has blocks 0 to {last}."
    missing = manifest.get("missing_sites", {}).get(place, {})
    return f"Block {block} has no {place}: {missing['why']}" if block in missing.get("blocks", ()) else ""


def context_errors(context_size: int, model: Input) -> dict[str, list[str]]:
    limit = model.manifest.get("max_positions")
    if limit is None or context_size <= limit:
        return {}
    sentence = (
        f"A context of {context_size} tokens is over the limit of {limit} that {model.name} was made for."
    )
    return {"context_size": [sentence]}

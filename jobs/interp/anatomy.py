"""What a model is made of, from its configuration: the architecture is built on torch's meta device, where a tensor has
a shape and no memory. Takes 0.02 s for 30 layers, once transformers knows the family; no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.interp.errors import Unusable
from jobs.interp.headers import config_of
from jobs.interp.site import HOOKS, Site, blocks_of, place_of

#: Why a part keeps its type, by its role.
WHY = {
    "head": "its rounding would go straight into the scores of the words",
    "embeddings": "a table whose rows are looked up, not multiplied",
    "norms": "vectors: a thousandth of the bytes, and every number counts",
    "other_linear": "layers that transformers keeps as they are in this architecture",
    "other": "no linear layers: bitsandbytes has no packed form of them",
}


def skeleton(folder: Path) -> Any:
    """The causal language model of a folder, unquantized and without weights.

    Raises `Unusable` for an architecture that needs code of its own, that transformers does not know, or that is no
    causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    refuse_own_code(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except (ValueError, KeyError, ImportError) as error:
        raise Unusable(_not_a_model(folder)) from error


def refuse_own_code(folder: Path) -> None:
    if "auto_map" in config_of(folder):
        raise Unusable(f"{folder.name} needs program code of its own, which is never run.")


def _not_a_model(folder: Path) -> str:
    import transformers

    family = config_of(folder).get("model_type") or "an unnamed architecture"
    return (
        f"transformers {transformers.__version__} has no causal language model of the architecture {family!r}. "
        "Programs that come with a model are never run; a newer miStudio may know it."
    )


def facts_of(model: nn.Module) -> dict[str, Any]:
    """n_layers, d_model, d_vocab, n_heads, tied_embeddings, and `missing_sites` (below).

    Raises `Unusable` when no list of transformer blocks is found.
    """
    _, blocks = blocks_of(model)
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config
    text = config.get_text_config()
    return {
        "n_layers": len(blocks),
        "d_model": table.shape[1],
        "d_vocab": table.shape[0],
        "n_heads": getattr(text, "num_attention_heads", None),
        "tied_embeddings": head is not None and head.weight is table,
        "missing_sites": missing_sites(model),
    }


def missing_sites(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For each place that some blocks lack: their numbers (`blocks`) and the reason (`why`)."""
    found: dict[str, dict[str, Any]] = {}
    for block in range(len(blocks_of(model)[1])):
        for site in HOOKS:
            try:
                place_of(model, Site(block, site))
            except Unusable as error:
                found.setdefault(site, {"blocks": [], "why": str(error)})["blocks"].append(block)
    return found


def eligible(model: Any) -> dict[str, nn.Module]:
    """The linear layers that transformers gives to bitsandbytes, by name: all but the head and what is tied to the
    embeddings.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }


def left(model: Any, quantized: set[str]) -> dict[str, dict[str, Any]]:
    """What keeps its type beside the `quantized` modules: by role, how many modules and parameters, and why."""
    found: dict[str, dict[str, Any]] = {}
    for name, module, count in _owners(model):
        if name in quantized:
            continue
        role = _role(model, module)
        entry = found.setdefault(role, {"modules": 0, "parameters": 0, "why": WHY[role]})
        entry["modules"] += 1
        entry["parameters"] += count
    return found


def _owners(model: Any) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules that hold parameters themselves, each parameter counted where it comes first."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            yield name, module, sum(weight.numel() for weight in own if id(weight) not in seen)
            seen |= set(map(id, own))


def _role(model: Any, module: nn.Module) -> str:
    if module is model.get_output_embeddings():
        return "head"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if all(weight.ndim < 2 for weight in module.parameters(recurse=False)):
        return "norms"
    return "other_linear" if isinstance(module, nn.Linear) else "other"

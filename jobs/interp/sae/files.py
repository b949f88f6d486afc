"""Sparse autoencoders on disk, in SAELens' layout (checked against sae-lens 6.54.12).

cfg.json                     true to the weights; `metadata.sae_lens_version` decides how SAELens reads the
rest sae_weights.safetensors      W_enc [d_in, d_sae], b_enc [d_sae], W_dec [d_sae, d_in], b_dec [d_in]
sparsity.safetensors         sparsity [d_sae]: log10 of the firing frequency
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from jobs.interp.errors import Unusable
from jobs.interp.files import read_json, write_json, write_tensors
from jobs.interp.sae.architectures import ARCHITECTURES, TopK

#: The release whose layout is written. Without a version SAELens falls back to its parser of before 6.0.
SAE_LENS_VERSION = "6.54.12"
CONFIG, WEIGHTS, SPARSITY = "cfg.json", "sae_weights.safetensors", "sparsity.safetensors"


@dataclass(frozen=True)
class Metadata:
    """Where an SAE belongs: what SAELens and Neuronpedia read from `cfg.json`'s metadata."""

    model_name: str
    hook_name: str
    hf_hook_name: str
    context_size: int
    prepend_bos: bool
    exclude_special_tokens: bool
    dataset_path: str

    def as_dict(self) -> dict[str, Any]:
        """The keys of SAELens 6.x."""
        return {
            "sae_lens_version": SAE_LENS_VERSION,
            "sae_lens_training_version": None,
            "model_name": self.model_name,
            "model_class_name": "AutoModelForCausalLM",
            "hook_name": self.hook_name,
            "hook_head_index": None,
            "hf_hook_name": self.hf_hook_name,
            "context_size": self.context_size,
            "prepend_bos": self.prepend_bos,
            "exclude_special_tokens": self.exclude_special_tokens,
            "seqpos_slice": [None],
            "dataset_path": self.dataset_path,
            "model_from_pretrained_kwargs": {},
            "neuronpedia_id": None,
        }


def save_sae(
    folder: Path,
    sae: TopK,
    metadata: Metadata,
    *,
    log10_frequencies: Tensor | None = None,
    extra: Mapping[str, Any] = {},
) -> None:
    """Write `sae`, whose weights are for raw activations (folded), to `folder`.

    `extra` goes into the metadata under `mistudio`: the recipe, for reading and repeating.
    """
    config = {
        "architecture": sae.architecture,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "k": sae.k,
        "rescale_acts_by_decoder_norm": False,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata.as_dict() | {"mistudio": dict(extra)},
    }
    weights = {name: getattr(sae, name) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    write_tensors(folder / WEIGHTS, weights)
    if log10_frequencies is not None:
        write_tensors(folder / SPARSITY, {"sparsity": log10_frequencies})
    write_json(folder / CONFIG, config)


def load_sae(folder: Path, *, device: str = "cpu") -> TopK:
    """The SAE in a folder of SAELens' layout, ours or another's, as float32.

    Raises `Unusable` when the architecture or a normalisation is one that would be applied wrongly.
    """
    config = read_json(folder / CONFIG)
    _require_readable(config)
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    d_in, d_sae = weights["W_enc"].shape  # the weights are right where a configuration is not
    if config.get("rescale_acts_by_decoder_norm"):
        _fold_decoder_norms(weights)
    sae = ARCHITECTURES[config["architecture"]](d_in, d_sae, config["k"])
    with torch.no_grad():
        sae.encoder.copy_(weights["W_enc"].T)
        for name in ("b_enc", "W_dec", "b_dec"):
            getattr(sae, name).copy_(weights[name])
    return sae.to(device)


def _require_readable(config: Mapping[str, Any]) -> None:
    if config.get("architecture") not in ARCHITECTURES:
        raise Unusable(
            f"SAEs of architecture {config.get('architecture')!r} cannot be read; "
            f"{', '.join(ARCHITECTURES)} can."
        )
    if config.get("normalize_activations", "none") != "none":
        raise Unusable(
            f"The SAE expects {config['normalize_activations']!r} activations; "
            "fold that into its weights first."
        )
    if not config.get("apply_b_dec_to_input", True):
        raise Unusable("The SAE does not subtract b_dec from its input; that form is not supported yet.")


def _fold_decoder_norms(weights: dict[str, Tensor]) -> None:
    """SAELens' `rescale_acts_by_decoder_norm`: latents are selected by their contribution, so make that
    explicit.
    """
    norms = weights["W_dec"].norm(dim=1)
    weights["W_enc"] = weights["W_enc"] * norms
    weights["b_enc"] = weights["b_enc"] * norms
    weights["W_dec"] = weights["W_dec"] / norms[:, None]

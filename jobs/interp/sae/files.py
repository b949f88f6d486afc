"""Sparse autoencoders on disk, in SAELens' layout (checked against sae-lens 6.54.12).

cfg.json                   true to the weights; `metadata.sae_lens_version` decides how SAELens reads the rest
sae_weights.safetensors    W_enc [d_in, d_sae], b_enc [d_sae], W_dec [d_sae, d_out], b_dec [d_out]; jumprelu: and
                           threshold [d_sae]; gated: b_gate, b_mag, r_mag [d_sae], no b_enc; skip_transcoder: and
                           W_skip [d_out, d_in]
sparsity.safetensors       sparsity [d_sae]: log10 of the firing frequency
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from jobs.interp.errors import Unusable
from jobs.interp.files import read_json, write_json, write_tensors
from jobs.interp.sae.architectures import ARCHITECTURES, SAE, Options

#: The release whose layout is written. Without a version SAELens falls back to its parser of before 6.0.
SAE_LENS_VERSION = "6.54.12"
CONFIG, WEIGHTS, SPARSITY = "cfg.json", "sae_weights.safetensors", "sparsity.safetensors"


@dataclass(frozen=True)
class Metadata:
    """Where an SAE belongs: what SAELens and Neuronpedia read from `cfg.json`'s metadata.

    `hook_name_out`, `hf_hook_name_out`: a transcoder's target. `training_architecture`: where another one is exported.
    """

    model_name: str
    hook_name: str
    hf_hook_name: str
    context_size: int
    prepend_bos: bool
    exclude_special_tokens: bool
    dataset_path: str
    hook_name_out: str | None = None
    hf_hook_name_out: str | None = None
    training_architecture: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The keys of SAELens 6.x."""
        return {
            "sae_lens_version": SAE_LENS_VERSION,
            "sae_lens_training_version": None,
            "training_architecture": self.training_architecture,
            "model_name": self.model_name,
            "model_class_name": "AutoModelForCausalLM",
            "hook_name": self.hook_name,
            "hook_head_index": None,
            "hf_hook_name": self.hf_hook_name,
            "hook_name_out": self.hook_name_out,
            "hf_hook_name_out": self.hf_hook_name_out,
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
    sae: SAE,
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
        **sae.facts(),
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": sae.centres,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata.as_dict() | {"mistudio": dict(extra)},
    }
    weights = {name: tensor.detach().float() for name, tensor in sae.state_dict().items()}
    weights["W_enc"] = weights.pop("encoder").T
    write_tensors(folder / WEIGHTS, weights)
    if log10_frequencies is not None:
        write_tensors(folder / SPARSITY, {"sparsity": log10_frequencies})
    write_json(folder / CONFIG, config)


def load_sae(folder: Path, *, device: str = "cpu") -> SAE:
    """The SAE in a folder of SAELens' layout, ours or another's, as float32.

    Raises `Unusable` when the architecture or a normalisation is one that would be applied wrongly.
    """
    config = read_json(folder / CONFIG)
    _require_readable(config)
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    # the weights are right where a configuration is not
    (d_in, d_sae), d_out = weights["W_enc"].shape, weights["W_dec"].shape[1]
    if config.get("rescale_acts_by_decoder_norm"):
        _fold_decoder_norms(weights)
    cls = ARCHITECTURES[config["architecture"]]
    if cls.centres and not config.get("apply_b_dec_to_input", True):
        _centre(weights)
    sae = cls.shaped(Options(cls.architecture, k=config.get("k", Options.k)), d_in, d_out, d_sae)
    _fill(sae, weights, folder)
    return sae.to(device)


def _fill(sae: SAE, weights: dict[str, Tensor], folder: Path) -> None:
    """Raises `Unusable` with the names of weights that are missing, too many, or of another shape."""
    weights["encoder"] = weights.pop("W_enc").T
    wanted = {name: tuple(tensor.shape) for name, tensor in sae.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wanted != found:
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise Unusable(
            f"The weights of the SAE in {folder.name} are not those of a {sae.architecture} with {sae.d_sae} latents: "
            f"{', '.join(wrong)} differ."
        )
    sae.load_state_dict(weights)


def _require_readable(config: Mapping[str, Any]) -> None:
    readable = [name for name, cls in ARCHITECTURES.items() if cls.in_files]
    if config.get("architecture") not in readable:
        raise Unusable(
            f"SAEs of architecture {config.get('architecture')!r} cannot be read; {', '.join(readable)} can."
        )
    if config.get("normalize_activations", "none") != "none":
        raise Unusable(
            f"The SAE expects {config['normalize_activations']!r} activations; "
            "fold that into its weights first."
        )
    if not ARCHITECTURES[config["architecture"]].centres and config.get("apply_b_dec_to_input"):
        raise Unusable(
            "The transcoder asks for its b_dec to be subtracted from its input, where it has no meaning; "
            "set apply_b_dec_to_input to false if it was trained that way."
        )


def _centre(weights: dict[str, Tensor]) -> None:
    """For an SAE that takes x as it is: the biases with which it does the same for x - b_dec."""
    shift = (weights["b_dec"].double() @ weights["W_enc"].double()).float()
    for name in ("b_enc", "b_gate"):
        if name in weights:
            weights[name] = weights[name] + shift
    if "b_mag" in weights:
        weights["b_mag"] = weights["b_mag"] + shift * weights["r_mag"].exp()


def _fold_decoder_norms(weights: dict[str, Tensor]) -> None:
    """SAELens' `rescale_acts_by_decoder_norm`: latents are selected by their contribution, so make that
    explicit.
    """
    norms = weights["W_dec"].norm(dim=1)
    weights["W_enc"] = weights["W_enc"] * norms
    weights["b_enc"] = weights["b_enc"] * norms
    weights["W_dec"] = weights["W_dec"] / norms[:, None]

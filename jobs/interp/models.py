"""Load a causal language model and its tokenizer from a local folder: safetensors only, never remote code.

Also here: what a model's folder says about itself without loading it, and the conversion of a GGUF file (the
demo's model) to a safetensors folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.interp import anatomy, packed
from jobs.interp.errors import Unusable
from jobs.interp.files import digest, read_json, whole_folder
from jobs.interp.headers import SCHEMES, Weights, config_of, scheme_of, weight_files
from jobs.interp.site import blocks_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: From this machine, without pickles, without code of the model's own.
SAFELY = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
#: Keys under which configurations keep the longest context.
LIMIT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class Pad:
    """A token id to fill batches with, and where it comes from. Masks keep it from mattering."""

    id: int
    source: str


@dataclass(frozen=True)
class LanguageModel:
    """A model ready to run, in eval mode, without gradients on its weights."""

    model: Any  # a transformers PreTrainedModel
    tokenizer: Any
    name: str
    device: str

    @property
    def n_layers(self) -> int:
        return len(blocks_of(self.model)[1])

    @property
    def d_model(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def d_vocab(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def limit(self) -> int | None:
        """The longest context the model was made for, in tokens; None when its configuration does not say."""
        return limit_of(self.model.config.to_dict())

    @property
    def bos_id(self) -> int | None:
        return _within(self.tokenizer.bos_token_id, self.d_vocab)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are no text: pad, BOS, EOS and what else the tokenizer marks as special."""
        added = self.tokenizer.added_tokens_decoder.items()
        return tuple(
            sorted({*self.tokenizer.all_special_ids, *(number for number, token in added if token.special)})
        )

    @property
    def pad(self) -> Pad:
        return choose_pad(self.tokenizer, self.d_vocab)

    def require_context(self, context_size: int) -> None:
        """Raises `Unusable` when rows of `context_size` tokens are longer than the model's limit (F09).

        Also for rotary models, which would run on without complaint and give values nobody trained.
        """
        require_context(context_size, self.limit, self.name)


def require_context(context_size: int, limit: int | None, name: str) -> None:
    """Raises `Unusable` naming context, limit and model when the one exceeds the other."""
    if limit is not None and context_size > limit:
        raise Unusable(
            f"A context of {context_size} tokens is over the limit of {limit} that {name} was made for."
        )


def load(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, name: str = ""
) -> LanguageModel:
    """The causal LM and tokenizer in `folder`, on `device`, computing in `dtype`; quantized weights stay packed.

    Raises `Unusable` when the folder holds no safetensors weights, needs code of its own, or is quantized and cannot
    run there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()  # jobs report their own progress; the log is for sentences
    require_loadable(folder)
    quantized = scheme_of(config_of(folder)) is not None
    if quantized:
        packed.require_support(device)
        packed.require_room(Weights.of(folder).bytes, device)
    placed = {"device_map": {"": device}} if quantized else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=_attention(folder), **SAFELY, **placed
    )
    if quantized:
        packed.settle(model, dtype)
    else:
        model.to(device)
    model.eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return LanguageModel(model, tokenizer, name or folder.name, device)


def compute_dtype(stored: str, device: str) -> torch.dtype:
    """The type to run a model in: as stored on a card, float32 on a CPU (half types are slow or emulated
    there).
    """
    return torch.float32 if device == "cpu" else DTYPES.get(stored, torch.float32)


def require_loadable(folder: Path) -> None:
    """Raises `Unusable` unless `folder` holds a configuration and safetensors weights, in a form that jobs can run
    without code of its own.
    """
    if not (folder / "config.json").is_file():
        raise Unusable(f"{folder.name} has no config.json: it is not a Hugging Face model folder.")
    if not weight_files(folder):
        raise Unusable(
            f"{folder.name} has no safetensors weights. Pickled ones can run code when they are "
            "opened and are refused; convert them with `save_pretrained(..., safe_serialization=True)`."
        )
    anatomy.refuse_own_code(folder)
    scheme = scheme_of(config_of(folder))
    if scheme not in (None, *SCHEMES):
        raise Unusable(
            f"{folder.name} is quantized with {scheme}, which no job here can run. Take the original weights, and let "
            "them be quantized here where they are too large (quantization int8 or nf4)."
        )


def describe(folder: Path) -> dict[str, Any]:
    """What a model folder says about itself: configuration and safetensors headers, no weights loaded.

    Keys: architecture, n_layers, d_model, d_vocab, n_heads, tied_embeddings, sites, max_positions (tokens or None),
    parameters (count, of packed weights too), bytes, dtype (of what is not quantized), quantization (None, or scheme,
    weights, bytes, largest), weights_sha256, tokenizer_sha256.

    Raises `Unusable` for an architecture that is unknown or has no list of blocks.
    """
    config, weights = config_of(folder), Weights.of(folder)
    scheme = scheme_of(config)
    return {
        "architecture": (config.get("architectures") or [config.get("model_type", "unknown")])[0],
        **anatomy.facts_of(anatomy.skeleton(folder)),
        "max_positions": limit_of(config),
        "parameters": weights.parameters,
        "bytes": weights.bytes,
        "dtype": weights.dtype,
        "quantization": {"scheme": scheme, **weights.packed} if scheme else None,
        "weights_sha256": digest(weight_files(folder)),
        "tokenizer_sha256": digest([path for path in folder.glob("*") if "token" in path.name]),
    }


def limit_of(config: dict[str, Any]) -> int | None:
    """The longest context in tokens that a configuration declares, or None."""
    return _first_of(config.get("text_config") or config, *LIMIT_KEYS)


def choose_pad(tokenizer: Any, d_vocab: int) -> Pad:
    """An id to pad with that the model has an embedding for; nothing is added to the vocabulary (F08)."""
    for source in ("pad", "eos", "bos", "unk"):
        found = _within(getattr(tokenizer, f"{source}_token_id"), d_vocab)
        if found is not None:
            return Pad(found, source)
    return Pad(0, "first id")


def convert_gguf(gguf: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the Llama-style model in a GGUF file as a safetensors folder with its tokenizer. About 25 s per
    100 MB.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers keeps such a model marked as quantized, and refuses to save it: move the weights to a plain
    # one.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    build: Any = type(loaded)
    plain = build(type(loaded.config).from_dict(settings)).to(dtype)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.tie_weights()
    with whole_folder(folder) as temporary:
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def save_as(folder: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the model in `folder` to `target` in another dtype, with its tokenizer."""
    loaded = load(folder, dtype=dtype)
    with whole_folder(target) as temporary:
        loaded.model.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)


def _attention(folder: Path) -> str | None:
    """Gemma-2's cap on attention logits exists in the eager form only; others choose for themselves."""
    return "eager" if read_json(folder / "config.json").get("attn_logit_softcapping") else None


def _within(token_id: int | None, d_vocab: int) -> int | None:
    return token_id if token_id is not None and 0 <= token_id < d_vocab else None


def _first_of(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)

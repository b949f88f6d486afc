"""Load a causal language model and its tokenizer from a local folder: safetensors only, never remote code.

Also here: what a model's folder says about itself without loading it, and the conversion of a GGUF file (the
demo's model) to a safetensors folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.interp.errors import Unusable
from jobs.interp.files import digest, read_json, whole_folder
from jobs.interp.site import blocks_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: What safetensors headers call the types a checkpoint is kept in.
HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
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
    """The causal LM and tokenizer in `folder`, on `device`.

    Raises `Unusable` when the folder holds no safetensors weights or needs code of its own.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()  # jobs report their own progress; the log is for sentences
    require_loadable(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, attn_implementation=_attention(folder), **options
    )
    model.to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    return LanguageModel(model, tokenizer, name or folder.name, device)


def compute_dtype(stored: str, device: str) -> torch.dtype:
    """The type to run a model in: as stored on a card, float32 on a CPU (half types are slow or emulated
    there).
    """
    return torch.float32 if device == "cpu" else DTYPES.get(stored, torch.float32)


def require_loadable(folder: Path) -> None:
    """Raises `Unusable` unless `folder` holds a configuration and safetensors weights and needs no remote
    code.
    """
    if not (folder / "config.json").is_file():
        raise Unusable(f"{folder.name} has no config.json: it is not a Hugging Face model folder.")
    if not weight_files(folder):
        raise Unusable(
            f"{folder.name} has no safetensors weights. Pickled ones can run code when they are "
            "opened and are refused; convert them with `save_pretrained(..., safe_serialization=True)`."
        )
    if "auto_map" in read_json(folder / "config.json"):
        raise Unusable(f"{folder.name} needs program code of its own, which is never run.")


def describe(folder: Path) -> dict[str, Any]:
    """What a model folder says about itself: configuration and safetensors headers, no weights loaded.

    Keys: architecture, n_layers, d_model, d_vocab, max_positions (tokens or None), parameters (count), bytes,
    dtype, weights_sha256, tokenizer_sha256.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    tensors = [tensor for path in weight_files(folder) for tensor in header_of(path).values()]
    return {
        "architecture": (config.get("architectures") or [config.get("model_type", "unknown")])[0],
        "n_layers": _first_of(text, "num_hidden_layers", "n_layer"),
        "d_model": _first_of(text, "hidden_size", "n_embd"),
        "d_vocab": text.get("vocab_size"),
        "max_positions": limit_of(text),
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "bytes": sum(end - start for start, end in (tensor["data_offsets"] for tensor in tensors)),
        "dtype": _most_common(tensors),
        "weights_sha256": digest(weight_files(folder)),
        "tokenizer_sha256": digest([path for path in folder.glob("*") if "token" in path.name]),
    }


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: {tensor: {dtype, shape, data_offsets}}. Reads no weights."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


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


def _most_common(tensors: list[dict[str, Any]]) -> str:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
    kind = max(sizes, key=lambda name: sizes[name])
    return HEADER_DTYPES.get(kind, kind)


def _within(token_id: int | None, d_vocab: int) -> int | None:
    return token_id if token_id is not None and 0 <= token_id < d_vocab else None


def _first_of(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)

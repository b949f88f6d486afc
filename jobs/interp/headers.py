"""What the weights of a model folder are, from safetensors headers and `config.json` alone. Plain Python, no torch.

Quantized weights of bitsandbytes are packed: two 4-bit numbers in a byte, with their scales as tensors beside them.
Counts here are of the model's own numbers, not of what they are packed into.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs.interp.errors import Unusable

#: What safetensors headers call the types a checkpoint is kept in.
HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
#: Schemes of bitsandbytes, which jobs can run; other methods are refused.
SCHEMES = ("int8", "nf4", "fp4")
#: Ends of the names under which bitsandbytes keeps scales and tables of a packed weight.
STATES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
BLOCK = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.\d+\.")
PACKED = re.compile(r"\.quant_state\.bitsandbytes__(nf4|fp4)$")
#: A matrix of a linear layer inside a numbered block. Experts that lie in one tensor are no linear layers.
LINEAR = re.compile(r"(^|\.)(layers|layer|h|blocks|block)\.\d+\.(?!.*\bexperts\b).*\.weight$")


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder by name, each `{dtype, shape, data_offsets}` as the headers say it."""

    tensors: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Weights:
        return cls({name: told for path in weight_files(folder) for name, told in header_of(path).items()})

    @property
    def bytes(self) -> int:
        return sum(size_of(told) for told in self.tensors.values())

    @cached_property
    def quantized(self) -> set[str]:
        """Names of packed weights."""
        four = {PACKED.sub("", name) for name in self.tensors if PACKED.search(name)}
        eight = {f"{name.removesuffix('.SCB')}.weight" for name in self.tensors if name.endswith(".SCB")}
        return four | eight

    def numbers(self, name: str) -> int:
        """How many of the model's own numbers a tensor holds."""
        if name.endswith(STATES) or PACKED.search(name):
            return 0
        told = self.tensors[name]
        return math.prod(told["shape"]) * (2 if name in self.quantized and told["dtype"] == "U8" else 1)

    @cached_property
    def parameters(self) -> int:
        return sum(map(self.numbers, self.tensors))

    @property
    def dtype(self) -> str:
        """The type of most numbers that are not quantized, by its name in torch."""
        sizes: Counter[str] = Counter()
        for name, told in self.tensors.items():
            if name not in self.quantized:
                sizes[told["dtype"]] += self.numbers(name)
        kind = sizes.most_common(1)[0][0] if sizes else "F32"
        return HEADER_DTYPES.get(kind, kind)

    @property
    def packed(self) -> dict[str, int]:
        """`weights` that are quantized, the `bytes` that they and their scales take, and the `largest` of them."""
        stems = tuple(name.removesuffix("weight") for name in self.quantized)
        beside = [n for n in self.tensors if n.startswith(stems) and not n.endswith(".bias")] if stems else []
        counts = [self.numbers(name) for name in self.quantized]
        size = sum(size_of(self.tensors[name]) for name in beside)
        return {"weights": sum(counts), "bytes": size, "largest": max(counts, default=0)}

    @property
    def linear(self) -> list[int]:
        """Sizes of the matrices that a quantization would pack, told by their names."""
        return [
            math.prod(told["shape"])
            for name, told in self.tensors.items()
            if len(told["shape"]) == 2 and LINEAR.search(name)
        ]

    @property
    def widest_block(self) -> int:
        """Numbers of the largest numbered block."""
        blocks: Counter[str] = Counter()
        for name in self.tensors:
            if found := BLOCK.search(name):
                blocks[found[0]] += self.numbers(name)
        return max(blocks.values(), default=0)

    @property
    def table(self) -> tuple[int, int]:
        """Rows and columns of the largest matrix outside the blocks: the words, and the width of the model."""
        outside = [told["shape"] for name, told in self.tensors.items() if not BLOCK.search(name)]
        return max(((rows, columns) for rows, columns in (s for s in outside if len(s) == 2)), default=(0, 0))


def size_of(told: dict[str, Any]) -> int:
    begin, end = told["data_offsets"]
    return end - begin


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: {tensor: {dtype, shape, data_offsets}}. Reads no weights."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def scheme_of(config: dict[str, Any]) -> str | None:
    """How a configuration says that its weights are quantized: `int8`, `nf4` or `fp4` of bitsandbytes, the name of
    another method, None for plain weights.
    """
    told = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not told:
        return None
    if told.get("load_in_8bit"):
        return "int8"
    if told.get("load_in_4bit"):
        return told.get("bnb_4bit_quant_type", "fp4")
    return told.get("quant_method") or "an unnamed method"


def require_plain(config: dict[str, Any], name: str, wanted: str) -> None:
    """Raises `Unusable` where the weights are quantized already."""
    scheme = scheme_of(config)
    if scheme is not None:
        as_it_is = ", or take it as it is, with quantization none and dtype auto" if scheme in SCHEMES else ""
        raise Unusable(
            f"{name} is quantized already ({scheme}); it cannot become {wanted}. Start from the original{as_it_is}."
        )

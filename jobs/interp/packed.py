"""Models whose linear layers bitsandbytes holds in 8 or 4 bits: what can run them, what is in them, what they take.

int8 (LLM.int8, Dettmers et al. 2022, arXiv 2208.07339): a weight is `round(127 w / max|row|)`, one float32 scale a row;
inputs are rounded the same way, a row at a time, without those columns in which one exceeds 6. nf4 (Dettmers et al.
2023, arXiv 2305.14314): 64 weights share one float32 scale, each is the nearest of 16 quantiles of a normal
distribution; they are unpacked for the product, which is done in the model's own type.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jobs.interp import extras
from jobs.interp.errors import Unusable

CLASSES = ("Linear8bitLt", "Linear4bit")
#: What bitsandbytes and the allocator take beside the weights while they are put on a card.
MARGIN = 1.1
#: 4-bit weights that share a scale.
BLOCK = 64


def library() -> Any:
    """bitsandbytes, without its hints about faster kernels and, at every layer, about the type it rounds in.

    Raises `MissingExtra` where it is not installed, `Unusable` where it cannot be loaded.
    """
    extras.require("quant")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise Unusable(
            f"bitsandbytes is installed and cannot be loaded here: {error}. Go without quantization."
        ) from error
    return bitsandbytes


def require_support(device: str) -> None:
    """Raises `Unusable` where bitsandbytes has no kernels for `device`."""
    kind, bnb = torch.device(device).type, library()
    offered = sorted(bnb.supported_torch_devices)
    if kind not in offered:
        raise Unusable(
            f"bitsandbytes {bnb.__version__} does not run on {kind!r} here; it offers {', '.join(offered)}."
        )
    if kind == "cuda" and type(bnb.cextension.lib).__name__.startswith("ErrorHandler"):
        raise Unusable(
            f"bitsandbytes {bnb.__version__} has no kernels for CUDA {torch.version.cuda} here. Install a build that "
            "has them, or go without quantization."
        )


def require_room(need: int, device: str) -> None:
    """Raises `Unusable` where a card has less than `need` bytes free: what does not fit would have to lie in the host's
    memory, where bitsandbytes does not run it (G56).
    """
    if torch.device(device).type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    wanted = int(need * MARGIN)
    if wanted > free:
        raise Unusable(
            f"The quantized model needs {wanted / 2**30:.1f} GiB on the card, and {free / 2**30:.1f} GiB are free. The "
            "rest would have to lie in the host's memory, where bitsandbytes does not run it. Choose a card with more "
            "memory, wait until this one is free, or use nf4."
        )


def settle(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a loaded model compute in `dtype`: transformers leaves what is not packed in the type of the file.

    The kernel for CPUs with AVX512-BF16 stays off: it rounds inputs and weights to bfloat16, so that the same model
    would give other numbers on other machines, and it fails where a layer's outputs are no multiple of 32.
    """
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    for _, module in layers(model):
        if hasattr(module, "compute_dtype"):
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.support_avx512bf16_for_cpu = False
            if module.weight.device.type == "cpu" and module.in_features % BLOCK:
                module.forward = partial(_by_the_formula, module)


def _by_the_formula(layer: Any, x: Tensor) -> Tensor:
    """The product of a 4-bit layer. bitsandbytes 0.50.2 unpacks wrongly on CPUs with AVX512 where a row is no whole
    number of blocks (in_features 16, 32, 48, 96: errors as large as the weights).
    """
    return linear(x, unpacked(layer.weight).to(x.dtype), layer.bias)


def unpacked(weight: Any) -> Tensor:
    """The numbers that 4-bit weights stand for, in float32: `[out, in]`. The first of two is in the upper half."""
    state, both = weight.quant_state, weight.data.view(torch.uint8).flatten()
    codes = torch.stack([both >> 4, both & 15], dim=1).flatten()[: state.shape.numel()]
    scales = state.absmax
    if state.nested:
        scales = library().functional.dequantize_blockwise(scales, state.state2) + state.offset
    each = scales.float().repeat_interleave(state.blocksize)[: codes.numel()]
    return (state.code[codes.long()] * each).reshape(state.shape)


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that are really quantized, by the class that they have."""
    return ((name, module) for name, module in model.named_modules() if type(module).__name__ in CLASSES)


def bytes_of(model: nn.Module) -> int:
    """Memory of a model's tensors, scales and tables included."""
    plain = [*model.parameters(), *model.buffers()]
    beside = [tensor for _, module in layers(model) for tensor in _beside(module)]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*plain, *beside])


def _beside(module: Any) -> list[Tensor]:
    """Scales and tables of one layer, which are no parameters."""
    state = getattr(module.weight, "quant_state", None)
    if state is not None:
        nested = state.state2
        found = [state.absmax, state.code, *([nested.absmax, nested.code] if nested else [])]
    else:
        found = [module.state.SCB if module.weight.SCB is None else module.weight.SCB]
    return [tensor for tensor in found if tensor is not None]

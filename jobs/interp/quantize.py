"""Make a model's linear layers 8 or 4 bits wide, as a Hugging Face snapshot that transformers opens by itself.

What keeps its type is stored as the source has it (bfloat16 stays bfloat16), whatever device did the work. 4-bit scales
are stored as they are, not quantized a second time. About 4 s for 100 million weights on one core.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jobs.interp import anatomy, heap, packed, probe, sizes
from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.files import bring, whole_folder
from jobs.interp.headers import Weights, config_of, require_plain
from jobs.interp.models import DTYPES, SAFELY, LanguageModel, compute_dtype, load
from jobs.interp.repository import MODEL_FILES

logger = logging.getLogger(__name__)

#: Written by the library that packs the weights; the rest of a folder goes over as it is.
WRITTEN = ("*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json")
STEPS = ("loss of the original", "quantize", "loss of the quantized")


def require_quantizable(folder: Path, scheme: str, name: str) -> None:
    """Raises `Unusable` where the weights are quantized already, or none of the layers can be."""
    require_plain(config_of(folder), name, scheme)
    if not anatomy.eligible(anatomy.skeleton(folder)):
        raise Unusable(sizes.nothing_to_quantize(name))


def quantize(folder: Path, target: Path, scheme: str, *, device: str) -> None:
    """Write the model of `folder` to `target`, its linear layers quantized by `scheme` (`int8`, `nf4`) on `device`.

    The weights go there one at a time. Raises `Unusable` where `device` cannot do it or has no room.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    weights = Weights.of(folder)
    packed.require_support(device)
    packed.require_room(sizes.quantized_bytes(weights, scheme), device)
    stored = DTYPES.get(weights.dtype, torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=stored,
        quantization_config=configuration(scheme, stored),
        device_map={"": device},
        **SAFELY,
    )
    with whole_folder(target) as temporary:
        model.save_pretrained(temporary)
        bring(folder, temporary, names=[name for name in MODEL_FILES if name not in WRITTEN])


def configuration(scheme: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if scheme == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_compute_dtype=dtype)


def compared(
    folder: Path,
    target: Path,
    scheme: str,
    *,
    device: str,
    on_step: Callable[[int, str], None] = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Quantize `folder` into `target` (unless an earlier attempt did), and say what became of it.

    Keys: modules_quantized, modules_eligible, left, disk_bytes_before and _after, memory_bytes_before and _after (of
    the weights, as they run on `device`), loss_before and _after (nats per token on `probe.TEXT`), quantized_on.

    Raises `NonFinite` when the quantized model's loss is no number, `Stopped` between its steps.
    """
    heap.give_back_large_blocks()

    def begin(step: int) -> None:
        if should_stop():
            raise Stopped(f"Stopped before the {STEPS[step]}.")
        on_step(step, STEPS[step])

    dtype = compute_dtype(Weights.of(folder).dtype, device)
    begin(0)
    before = looked_at(load(folder, device="cpu", dtype=dtype), device)
    begin(1)
    if not target.exists():
        quantize(folder, target, scheme, device=device)
        gc.collect()
    begin(2)
    model = load(target, device=device, dtype=dtype)
    after = looked_at(model, device)
    if not after["loss"] < float("inf"):
        raise NonFinite(f"The loss of the {scheme} model is {after['loss']}: it cannot be used.")
    counted = census(folder, model)
    logger.info(
        "%s: %d of %d layers on %s", scheme, counted["modules_quantized"], counted["modules_eligible"], device
    )
    return {
        **counted,
        "disk_bytes_before": Weights.of(folder).bytes,
        "disk_bytes_after": Weights.of(target).bytes,
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "quantized_on": device,
    }


def looked_at(model: LanguageModel, device: str) -> dict[str, Any]:
    """Bytes first: a pass may pack a layer anew for the CPU that it runs on."""
    return {"memory_bytes": packed.bytes_of(model.model), "loss": probe.loss(model, device)}


def census(folder: Path, quantized: LanguageModel) -> dict[str, Any]:
    """Counted from the classes that the layers of the quantized model have; what was left, and why."""
    names = {name for name, _ in packed.layers(quantized.model)}
    skeleton = anatomy.skeleton(folder)
    return {
        "modules_quantized": len(names),
        "modules_eligible": len(anatomy.eligible(skeleton)),
        "left": anatomy.left(skeleton, names),
    }

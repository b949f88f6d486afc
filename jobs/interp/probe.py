"""The loss of a model on a fixed text: a number that tells in seconds what a change of its weights costs.

The text is ours, in plain English, and never changes, so that figures of different days and models can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from jobs.interp.models import LanguageModel
from jobs.interp.site import blocks_of
from jobs.interp.sizes import PROBE_TOKENS

TEXT = """The river had risen during the night, and by morning the lower field lay under water. Anna stood at the gate
with her brother and counted the sheep on the far bank. There were eleven of them, which meant that four had crossed
before the bridge went. "We cannot reach them today," he said, "but the water never stays for long." She nodded, though
she was not sure that he was right. In the spring of the year before, it had taken nine days until the road was dry
again, and the mill had not turned until the end of April. They walked back to the house, lit the stove, and wrote down
what they would need from the town: flour, salt, two coils of rope, and new glass for the lamp. When the rain stopped in
the afternoon, a thin line of blue appeared over the hills, and the first birds began to sing in the hedge behind the
barn. Most floods in this valley are like that one. They come from melting snow, they are measured at the old stone
below the church, and they are forgotten by the summer, when the children swim where the fields had been."""


def loss(lm: LanguageModel, device: str) -> float:
    """Mean loss in nats per token on `TEXT`, after BOS where there is one; the scores' logarithms in float32.

    The model may lie on the CPU: its blocks visit `device` one at a time, so that of the original of a quantized model
    no more than one has to fit beside the embeddings.
    """
    ids = lm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    row = [*([lm.bos_id] if lm.bos_id is not None else []), *ids][:PROBE_TOKENS][: lm.limit]
    tokens = torch.tensor([row], device=device)  # [1, seq]
    with visiting(lm.model, device), torch.no_grad():
        logits = lm.model(input_ids=tokens, use_cache=False).logits[0, :-1]  # [seq - 1, d_vocab]
        return float(cross_entropy(logits.float(), tokens[0, 1:]))


@contextmanager
def visiting(model: nn.Module, device: str) -> Iterator[None]:
    """While this holds, a model that lies elsewhere runs on `device`: all but its blocks is there, each block for as
    long as it works. It is left where it was.
    """
    home = next(model.parameters()).device
    if home.type == torch.device(device).type:
        yield
        return
    _, blocks = blocks_of(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    hooks = [hook for block in blocks for hook in _moves(block, device, home)]
    try:
        _move(outside, device)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _move(model.modules(), home)


def _moves(block: nn.Module, device: str, home: torch.device) -> list[Any]:
    def comes(*_: Any) -> None:
        block.to(device)

    def goes(*_: Any) -> None:
        block.to(home)

    return [block.register_forward_pre_hook(comes), block.register_forward_hook(goes)]


def _move(modules: Any, device: Any) -> None:
    """The tensors that modules hold themselves."""
    for module in modules:
        module._apply(lambda tensor: tensor.to(device), recurse=False)

"""Run by the oracle environment's Python: steps of SAELens' own training classes from given weights on given batches.

    python saelens_steps.py FOLDER ARCHITECTURE…

Reads `<architecture>.in`: weights as SAELens names them, `x` and `y` [steps, batch, d], `dead`; writes
`<architecture>.out`: `loss` and gradients `grad.<name>` of the first step, weights after the last. Directions are put
back to length 1 where `unit` says so, as our trainings do; SAELens has no such constraint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sae_lens import (  # type: ignore[import-not-found]
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    GatedTrainingSAE,
    GatedTrainingSAEConfig,
    JumpReLUTrainingSAE,
    JumpReLUTrainingSAEConfig,
    MatryoshkaBatchTopKTrainingSAE,
    MatryoshkaBatchTopKTrainingSAEConfig,
    SkipTranscoder,
    SkipTranscoderConfig,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
    TopKTrainingSAE,
    TopKTrainingSAEConfig,
    Transcoder,
    TranscoderConfig,
)
from sae_lens.saes.sae import TrainStepInput  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from torch import Tensor

SPARSITY, AUX, K, WIDTHS, BANDWIDTH, LR = 0.02, 1 / 32, 4, [6, 12, 24], 0.5, 1e-3

CLASSES: dict[str, Any] = {
    "topk": (TopKTrainingSAE, TopKTrainingSAEConfig, {"k": K, "aux_loss_coefficient": AUX}),
    "batchtopk": (BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, {"k": K, "aux_loss_coefficient": AUX}),
    "matryoshka_batchtopk": (
        MatryoshkaBatchTopKTrainingSAE,
        MatryoshkaBatchTopKTrainingSAEConfig,
        {"k": K, "aux_loss_coefficient": AUX, "matryoshka_widths": WIDTHS},
    ),
    "jumprelu": (JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig, {"jumprelu_bandwidth": BANDWIDTH}),
    "standard": (StandardTrainingSAE, StandardTrainingSAEConfig, {}),
    "gated": (GatedTrainingSAE, GatedTrainingSAEConfig, {}),
    "transcoder": (Transcoder, TranscoderConfig, {"apply_b_dec_to_input": False}),
    "skip_transcoder": (SkipTranscoder, SkipTranscoderConfig, {"apply_b_dec_to_input": False}),
}


def built(architecture: str, weights: dict[str, Tensor]) -> Any:
    cls, config, more = CLASSES[architecture]
    (d_in, d_sae), d_out = weights["W_enc"].shape, weights["W_dec"].shape[1]
    more |= {"d_out": d_out} if "transcoder" in architecture else {}
    sae = cls(config(d_in=d_in, d_sae=d_sae, **more))
    with torch.no_grad():
        for name, weight in sae.named_parameters():
            weight.copy_(weights[name])
    return sae


def backward(architecture: str, sae: Any, x: Tensor, y: Tensor, dead: Tensor) -> Tensor:
    """The loss, its gradients in `.grad`."""
    if (
        "transcoder" in architecture
    ):  # there is no training class: their forward, the loss of their standard one
        y_hat, acts = sae.forward_with_activations(x)
        sparsity = (acts * sae.W_dec.norm(dim=1)).norm(p=1, dim=-1).mean()
        loss: Tensor = (y_hat - y).square().sum(1).mean() + SPARSITY * sparsity
        loss.backward()
        return loss.detach()
    given = TrainStepInput(
        sae_in=x,
        coefficients={"l1": SPARSITY, "l0": SPARSITY},
        dead_neuron_mask=dead,
        n_training_steps=0,
        is_logging_step=False,
    )
    found = sae.training_forward_pass(given)
    if architecture == "gated":
        backward_frozen(sae, found.losses)
    else:
        found.loss.backward()
    return found.loss.detach()


def backward_frozen(sae: Any, losses: dict[str, Tensor]) -> None:
    """Their terms, with the decoder constant in the auxiliary one (as in the paper), but for its share in the gate."""
    (losses["mse_loss"] + losses["l1_loss"]).backward(retain_graph=True)
    shares = torch.autograd.grad(losses["auxiliary_reconstruction_loss"], [sae.W_enc, sae.b_gate])
    for weight, share in zip((sae.W_enc, sae.b_gate), shares, strict=True):
        weight.grad += share
    with torch.no_grad():
        sae.b_dec.grad -= sae.W_enc @ shares[1]


def run(folder: Path, architecture: str) -> None:
    given = load_file(folder / f"{architecture}.in")
    sae, unit = built(architecture, given), bool(given["unit"])
    adam = torch.optim.Adam(sae.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8)
    found: dict[str, Tensor] = {}
    for x, y in zip(given["x"], given["y"], strict=True):
        adam.zero_grad()
        loss = backward(architecture, sae, x, y, given["dead"])
        if not found:
            found["loss"] = loss
            found |= {f"grad.{name}": weight.grad.clone() for name, weight in sae.named_parameters()}
        if unit:
            sae.W_dec.grad -= (sae.W_dec.grad * sae.W_dec.detach()).sum(1, keepdim=True) * sae.W_dec.detach()
        adam.step()
        if unit:
            with torch.no_grad():
                sae.W_dec /= sae.W_dec.norm(dim=1, keepdim=True)
    found |= {name: value.detach().float().contiguous() for name, value in sae.state_dict().items()}
    save_file(found, folder / f"{architecture}.out")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name)

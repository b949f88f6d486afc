"""One training step of other people's SAE trainers, each as its own library takes it; float32.

sae-lens              `training_forward_pass`, backward, Adam: its trainer's step without its bookkeeping; or, as
                      `saelens_trainer`, all that its `SAETrainer` does in a step
eai-sparsify          as its `Trainer`: loss is the FVU, decoder projected and renormalised; *eager* without a card
dictionary-learning   `update` of its trainers

By architecture in `PEERS`: name of the peer → a function of the shape that gives a rival. Transcoders read and
write the same vectors here; only sparsify trains them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("SPARSIFY_DISABLE_TRITON", "1")

import sae_lens  # type: ignore[import-not-found]
from sae_lens.saes.sae import TrainCoefficientConfig, TrainStepInput  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Shape:
    """What a step is measured at. `device`: of the weights; batches are moved there. `steps`: of the whole run,
    which the learning rate follows: up over 5 % of them, down over the last 20 %.
    """

    d_in: int = 576
    d_sae: int = 4608
    k: int = 32
    lr: float = 1e-3
    batch: int = 4096
    device: str = "cpu"
    steps: int = 10**6
    dead_after_steps: int = 1000

    @property
    def nested(self) -> list[int]:
        """Widths of a Matryoshka SAE: a sixteenth, a quarter, all."""
        return [self.d_sae // 16, self.d_sae // 4, self.d_sae]

    @property
    def warmup(self) -> int:
        return max(1, round(0.05 * self.steps))

    @property
    def decay(self) -> int:
        return max(1, round(0.2 * self.steps))

    def schedule(self, adam: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: min(1.0, (step + 1) / self.warmup, max(0, self.steps - step) / self.decay)
        )


@dataclass(frozen=True)
class Rival:
    """A trainer in the middle of its work. `step`: takes a batch `[n, d_in]`; `reconstruct`: `[n, d_in]` → the same."""

    step: Callable[[Tensor], object]
    reconstruct: Callable[[Tensor], Tensor]


Peer = Callable[[Shape], Rival]


def saelens(name: str, **settings: Any) -> Peer:
    """SAELens' training class `name`, by hand; settings that depend on the shape are functions of it."""

    def made(shape: Shape) -> Rival:
        sae = saelens_sae(name, shape, settings)
        adam = torch.optim.Adam(sae.parameters(), lr=shape.lr, betas=(0.9, 0.999))
        nobody = torch.zeros(shape.d_sae, dtype=torch.bool, device=shape.device)
        weights = {
            key: value.value if isinstance(value, TrainCoefficientConfig) else value
            for key, value in sae.get_coefficients().items()
        }

        def step(x: Tensor) -> object:
            given = TrainStepInput(
                sae_in=x.to(shape.device),
                coefficients=weights,
                dead_neuron_mask=nobody,
                n_training_steps=0,
                is_logging_step=False,
            )
            adam.zero_grad()
            found = sae.training_forward_pass(given)
            found.loss.backward()
            adam.step()
            return found

        return Rival(step, sae)

    return made


def saelens_sae(name: str, shape: Shape, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    given = {key: value(shape) if callable(value) else value for key, value in settings.items()}
    config = getattr(sae_lens, f"{name}TrainingSAEConfig")(
        d_in=shape.d_in, d_sae=shape.d_sae, device=shape.device, **given
    )
    return getattr(sae_lens, f"{name}TrainingSAE")(config)


def saelens_trainer(name: str, **settings: Any) -> Peer:
    """All that SAELens' `SAETrainer` does in a step: firing counts, dead latents, clipping, schedule."""

    def made(shape: Shape) -> Rival:
        from sae_lens.config import SAETrainerConfig  # type: ignore[import-not-found]
        from sae_lens.training.sae_trainer import SAETrainer  # type: ignore[import-not-found]

        config = SAETrainerConfig(
            total_training_samples=shape.steps * shape.batch, train_batch_size_samples=shape.batch, lr=shape.lr,
            lr_end=shape.lr,
            lr_warm_up_steps=shape.warmup, lr_decay_steps=shape.decay, device=shape.device,
            dead_feature_window=shape.dead_after_steps,
        )  # fmt: skip
        trainer: Any = SAETrainer(config, saelens_sae(name, shape, settings), iter(()))

        def step(x: Tensor) -> object:
            found = trainer.step(x)
            trainer.n_training_steps += 1
            return found

        return Rival(step, trainer.sae)

    return made


def sparsify(**settings: Any) -> Peer:
    def made(shape: Shape) -> Rival:
        from sparsify import SparseCoder, SparseCoderConfig  # type: ignore[import-not-found]

        torch.manual_seed(0)
        config = SparseCoderConfig(num_latents=shape.d_sae, k=shape.k, **settings)
        coder = SparseCoder(shape.d_in, config, device=shape.device, dtype=torch.float32)
        adam = torch.optim.Adam(coder.parameters(), lr=shape.lr)
        schedule = shape.schedule(adam)
        silent = torch.zeros(shape.d_sae, dtype=torch.long, device=shape.device)

        def step(x: Tensor) -> object:
            x = x.to(shape.device)
            if not config.transcode:
                coder.set_decoder_norm_to_unit_norm()
            found = coder(x)
            found.fvu.backward()
            if not config.transcode:
                coder.remove_gradient_parallel_to_decoder_directions()
            adam.step()
            adam.zero_grad()
            schedule.step()
            silent.add_(len(x))
            silent[found.latent_indices.flatten()] = 0
            return found

        return Rival(step, lambda x: coder(x).sae_out)

    return made


def dictionary_learning(module: str, name: str, **settings: Any) -> Peer:
    def made(shape: Shape) -> Rival:
        from importlib import import_module

        trainer_class = getattr(import_module(f"dictionary_learning.trainers.{module}"), name)
        given = {key: value(shape) if callable(value) else value for key, value in settings.items()}
        trainer = trainer_class(
            steps=shape.steps, activation_dim=shape.d_in, dict_size=shape.d_sae, layer=0, lm_name="bench",
            lr=shape.lr, warmup_steps=shape.warmup, decay_start=shape.steps - shape.decay, device=shape.device,
            seed=0, **given,
        )  # fmt: skip
        trainer.dead_feature_threshold = shape.dead_after_steps * shape.batch
        done = 0

        def step(x: Tensor) -> object:
            nonlocal done
            done += 1
            return trainer.update(done - 1, x.to(shape.device))

        return Rival(step, trainer.ae)

    return made


def k_of(shape: Shape) -> int:
    return shape.k


#: Its fastest form: the codes as COO tensors, which works on a CPU without the rescaling only.
SPARSE_SAELENS = saelens("TopK", k=k_of, use_sparse_activations=True, rescale_acts_by_decoder_norm=False)

PEERS: dict[str, dict[str, Peer]] = {
    "topk": {
        "SAELens": saelens("TopK", k=k_of),
        "SAELens' trainer": saelens_trainer("TopK", k=k_of),
        "SAELens, sparse": SPARSE_SAELENS,
        "sparsify": sparsify(),
        "dictionary_learning": dictionary_learning("top_k", "TopKTrainer", k=k_of),
    },
    "batchtopk": {
        "SAELens": saelens("BatchTopK", k=k_of),
        "dictionary_learning": dictionary_learning("batch_top_k", "BatchTopKTrainer", k=k_of),
    },
    "matryoshka_batchtopk": {
        "SAELens": saelens("MatryoshkaBatchTopK", k=k_of, matryoshka_widths=lambda shape: shape.nested),
        "dictionary_learning": dictionary_learning(
            "matryoshka_batch_top_k",
            "MatryoshkaBatchTopKTrainer",
            k=k_of,
            group_fractions=lambda shape: [1 / 16, 3 / 16, 3 / 4],
        ),
    },
    "jumprelu": {
        "SAELens": saelens("JumpReLU"),
        "dictionary_learning": dictionary_learning("jumprelu", "JumpReluTrainer"),
    },
    "standard": {
        "SAELens": saelens("Standard"),
        "dictionary_learning": dictionary_learning("standard", "StandardTrainer"),
    },
    "gated": {
        "SAELens": saelens("Gated"),
        "dictionary_learning": dictionary_learning("gdm", "GatedSAETrainer"),
    },
    "transcoder": {"sparsify": sparsify(transcode=True)},
    "skip_transcoder": {"sparsify": sparsify(transcode=True, skip_connection=True)},
}

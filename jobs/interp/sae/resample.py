"""New directions for latents that no longer fire, for SAEs whose sparsity is a penalty (L1).

After Bricken et al. 2023 ("Towards Monosemanticity", appendix on neuron resampling): a dead latent takes the direction
of a vector that is badly reconstructed, drawn with probability in proportion to its squared loss; its encoder row has
a fifth of the mean length of the live ones, its biases are 0, and Adam forgets it. TopK kinds have an auxiliary loss
for the same end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobs.interp.seeds import generator

if TYPE_CHECKING:
    from jobs.interp.sae.train import Training

#: Length of a new encoder row, of the mean length of the live ones.
SHARE = 0.2
#: Weights whose rows are dimensions of what comes out, of which there may be as many as latents.
OF_DIMENSIONS = ("b_dec", "W_skip")


@torch.no_grad()
def resample(training: Training, x: Tensor, target: Tensor) -> int:
    """Give dead latents directions out of a batch, one vector to a latent; how many got one.

    Shapes: `x [n, d_in]`, `target [n, d_out]`, scaled.
    """
    sae, dead = training.sae, training.dead
    which = dead.nonzero().flatten()
    if not len(which) or bool(dead.all()):  # where all are dead there is no length to go by
        return 0
    losses = (sae(x) - target).square().sum(1).double().cpu()
    which = which[: int((losses > 0).sum())]
    if not len(which):
        return 0
    draw = generator(training.settings.seed, "resample", training.step)
    chosen = torch.multinomial(losses.square(), len(which), generator=draw).to(x.device)
    length = SHARE * sae.encoder[~dead].norm(dim=1).mean()
    for name, weight in sae.named_parameters():
        if name == "encoder":
            weight[which] = unit(x[chosen] - (sae.b_dec if target is x else 0)) * length
        elif name == "W_dec":
            weight[which] = unit(target[chosen] - sae.b_dec)
        elif name not in OF_DIMENSIONS:
            weight[which] = 0
        else:
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in training.adam.state.get(weight, {}):
                training.adam.state[weight][moment][which] = 0
    training.tokens_since_fired[which] = 0
    return len(which)


def unit(rows: Tensor) -> Tensor:
    """Shapes: `[n, d]` twice."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)

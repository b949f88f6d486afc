"""Claim: a TopK step is ≥ 3 × SAELens' and ≥ 1.1 × sparsify's, a JumpReLU or L1 step ≥ 1.1 × SAELens', in one run.

    .venv-peers/bin/python -m bench.sae_step [architecture=topk,…] [peers=SAELens,…] [rounds=3] [steps=8]
        [d_sae=4608] [batch=4096]

All in one process of the peers' environment, with the same data, shape (576 to 4608 latents, k 32, batch 4096,
float32), Adam and no dead latents; ours is the training's whole step, counters and projections included. Beside
them the encoder product alone, the least that any step must do. In turns (`bench.side_by_side`), each warmed up,
equal numbers of steps: short runs are 10 to 20 % faster than long ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.our_sae import step_of
from bench.sae_peers import PEERS, Shape
from bench.side_by_side import in_turns
from jobs.interp.sae.options import Options

Step = Callable[[Tensor], object]
#: By architecture: peer → how many times as fast ours is said to be.
CLAIMS = {
    "topk": {"SAELens": 3.0, "sparsify": 1.1},
    "jumprelu": {"SAELens": 1.1},
    "standard": {"SAELens": 1.1},
}


def data(steps: int, batch: int, width: int) -> list[Tensor]:
    """Batches of unit variance, so that all start from a loss of the same size."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(batch, width, generator=draw) for _ in range(steps)]


def floor(shape: Shape) -> Step:
    weight, bias = torch.randn(shape.d_sae, shape.d_in), torch.zeros(shape.d_sae)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.linear(x, weight, bias)

    return step


def speed_of(step: Step, batches: list[Tensor]) -> Callable[[], float]:
    """Measures tokens per second over all batches."""

    def speed() -> float:
        began = time.perf_counter()
        for batch in batches:
            step(batch)
        return sum(map(len, batches)) / (time.perf_counter() - began)

    return speed


def compare(architecture: str, numbers: dict[str, int], peers: list[str]) -> None:
    shape = Shape(d_sae=numbers["d_sae"], batch=numbers["batch"])
    batches = data(numbers["steps"], shape.batch, shape.d_in)
    options = Options(architecture, k=shape.k, target_l0=shape.k, widths=tuple(shape.nested))
    steps = {
        "encoder product": floor(shape),
        "ours": step_of(options, shape.d_in, shape.d_sae, batch=shape.batch),
    }
    rivals = {name: peer for name, peer in PEERS[architecture].items() if not peers or name in peers}
    steps |= {name: peer(shape).step for name, peer in rivals.items()}
    for step in steps.values():
        step(batches[0])
    sides = {name: speed_of(step, batches) for name, step in steps.items()}
    seen = in_turns(sides, numbers["rounds"], first="ours", once=("encoder product",))
    counts = " ".join(f"{name}={value}" for name, value in numbers.items())
    print(f"\n{architecture}, {counts}, {torch.get_num_threads()} threads")
    print("\n".join(seen.lines("tokens/s")))
    for name in sides:
        if name != "ours":
            print(verdict(architecture, name, seen.ratio("ours", name)), flush=True)


def verdict(architecture: str, peer: str, ratio: float) -> str:
    claim = CLAIMS.get(architecture, {}).get(peer)
    said = f" (claim {claim}: {'kept' if ratio >= claim else 'NOT KEPT'})" if claim else ""
    return f"ours / {peer} {ratio:.2f}{said}"


def main() -> None:
    given = dict(argument.split("=") for argument in sys.argv[1:])
    architectures = given.pop("architecture", "topk").split(",")
    peers = [name for name in given.pop("peers", "").split(",") if name]
    numbers = {"rounds": 3, "steps": 8, "d_sae": 4608, "batch": 4096}
    numbers |= {name: int(value) for name, value in given.items()}
    for architecture in architectures:
        compare(architecture, numbers, peers)


if __name__ == "__main__":
    main()

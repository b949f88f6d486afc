"""Claim: twice the work takes twice the time, over two decades; memory does not grow with the length of a training.

    MISTUDIO_HOME=... .venv/bin/python -m bench.growth [words of series]

step by latents       a TopK training step, 576 wide, batch 1024, k 32: 1 k to 100 k latents
step by batch         the same with 4608 latents: 100 to 10 000 tokens
training by tokens    1024 latents on stored vectors, batch 1024: 20 k to 2 M tokens; memory is flat
extraction by tokens  through block 2 of SmolLM2-135M: 1 k to 100 k tokens; memory is a few shards (16 k tokens)

For each size a fresh process with one thread; CPU seconds, which other work on the machine hardly changes. The
exponent is the slope of log time over log size, over the whole series and over its upper half, where what a step
costs at any size no longer counts; memory is the peak beside what the process had before.
Takes the demo's model, and the stored vectors of `bench.quality`.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

HOME = Path(os.environ.get("MISTUDIO_HOME", "var"))
WIDTH, K = 576, 32


@dataclass(frozen=True)
class Point:
    """`seconds`: CPU time of the whole work at `size`; `memory_bytes`: peak beside what was there before it."""

    size: int
    seconds: float
    memory_bytes: int


class Peak:
    """The most resident memory from now on, beside what is there now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts anew
        self.before = status_bytes("VmRSS")

    def bytes(self) -> int:
        return status_bytes("VmHWM") - self.before


def status_bytes(name: str) -> int:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def step(d_sae: int, batch: int) -> tuple[float, int]:
    """Median seconds of one training step, and the memory that weights, moments and step take."""
    import torch

    from bench.our_sae import step_of
    from jobs.interp.sae.options import Options

    peak = Peak()
    advance = step_of(Options(k=K), WIDTH, d_sae, batch=batch)
    x, taken = torch.randn(batch, WIDTH), list[float]()
    while len(taken) < 4 or (sum(taken) < 2 and len(taken) < 100):
        began = time.process_time()
        advance(x)
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:]), peak.bytes()


def by_latents(size: int) -> Point:
    return Point(size, *step(size, 1024))


def by_batch(size: int) -> Point:
    return Point(size, *step(4608, size))


def training_by_tokens(size: int) -> Point:
    from bench.our_sae import run, training
    from bench.quality import Data, stock
    from jobs.interp.sae.options import Options

    data = Data.open(stock(HOME), block=4)
    peak, began = Peak(), time.process_time()
    run(*training(Options(k=K), data.parts.train, d_sae=1024, tokens=size, batch=1024))
    return Point(size, time.process_time() - began, peak.bytes())


def extraction_by_tokens(size: int) -> Point:
    from jobs.interp import corpora, models, tokens
    from jobs.interp.activations import Recipe, extract
    from jobs.interp.site import Site

    model = models.load(HOME / "cache" / "demo-model")
    text = corpora.english().documents
    rows = list(tokens.RowStream(text, model.tokenizer, 128, max_tokens=size, bos_id=model.bos_id))
    peak, began = Peak(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        extract(model, rows, Recipe((Site(2),)), Path(folder) / "a", batch_size=8)
        return Point(size, time.process_time() - began, peak.bytes())


@dataclass(frozen=True)
class Series:
    """`flat`: whether memory may not grow with the size."""

    name: str
    work: Callable[[int], Point]
    sizes: tuple[int, ...]
    flat: bool = False


SERIES = (
    Series("step by latents", by_latents, (1024, 3072, 10_240, 32_768, 102_400)),
    Series("step by batch", by_batch, (100, 300, 1000, 3000, 10_000)),
    Series(
        "training by tokens", training_by_tokens, (20_480, 65_536, 204_800, 655_360, 2_048_000), flat=True
    ),
    Series("extraction by tokens", extraction_by_tokens, (1000, 3000, 10_000, 30_000, 100_000), flat=True),
)


def exponent(points: list[Point]) -> float:
    """Slope of log time over log size, by least squares."""
    xs, ys = [math.log(point.size) for point in points], [math.log(point.seconds) for point in points]
    return statistics.linear_regression(xs, ys).slope


def alone(work: Callable[[int], Point], size: int) -> Point:
    """In one thread: CPU seconds then hardly feel what else the machine does."""
    import torch

    torch.set_num_threads(1)
    return work(size)


def show(series: Series) -> None:
    print(f"\n{series.name}")
    points = []
    for size in series.sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            point = pool.submit(alone, series.work, size).result()
        points.append(point)
        print(
            f"{size:9,}  {point.seconds:8.3f} s  {1e6 * point.seconds / size:9.2f} µs each  "
            f"{point.memory_bytes / 2**20:7.0f} MiB",
            flush=True,
        )
    upper = points[len(points) // 2 :]
    print(f"exponent {exponent(points):.2f}, upper half {exponent(upper):.2f}", end="")
    if series.flat:
        print(
            f"; memory {points[-1].memory_bytes / points[-2].memory_bytes:.2f} × that of the size before",
            end="",
        )
    print(flush=True)


def main() -> None:
    wanted = sys.argv[1:]
    for series in SERIES:
        if not wanted or any(word in series.name for word in wanted):
            show(series)


if __name__ == "__main__":
    main()

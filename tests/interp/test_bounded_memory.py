"""A training reads activations of any size in the same memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WIDTH, SHARD = 256, 4096  # a shard of 4 MiB
PROGRAM = """
import sys
from pathlib import Path
import torch
from jobs.interp.reading import Store, split
from jobs.interp.shuffling import Shuffled
torch.set_num_threads(1)
def resident():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024
begun = resident()
parts = split(Store(Path(sys.argv[1])))
parts.train.mean_norms()
most = divided = resident()
stream = Shuffled(parts.train, 512, seed=0, buffer_bytes=40 * 2**20)
for step in range(len(stream) // 512 + 1):
    stream.batch(step)
    most = max(most, resident())
print(divided - begun, most - begun)
"""


def peaks(folder: Path, shards: int) -> list[int]:
    """Memory taken by dividing the activations, and at most while a pass is read, in bytes, in a process of its own."""
    folder.mkdir()
    for number in range(shards):
        acts = torch.randn(SHARD, WIDTH, generator=torch.Generator().manual_seed(number))
        tensors = {"acts": acts, "norms": acts.norm(dim=1)}
        tensors["document"] = torch.arange(SHARD, dtype=torch.int32) // 64 + 64 * number
        save_file(tensors, folder / f"shard_{number:05d}.safetensors")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True
    )
    return [int(found) for found in ran.stdout.split()]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_activations(tmp_path: Path) -> None:
    """96 MiB and 960 MiB of vectors through two buffers of 40 MiB."""
    small, large = peaks(tmp_path / "small", 24), peaks(tmp_path / "large", 240)
    print(f"24 shards: {small}, 240 shards: {large} bytes")
    assert large[0] < 16 * 2**20  # their numbers are gone through shard by shard
    assert 40 * 2**20 < large[1] < 128 * 2**20  # two buffers, shards being copied, what the allocator keeps
    assert large[1] - small[1] < 40 * 2**20  # of 864 MiB more: a filling of the buffer, at most

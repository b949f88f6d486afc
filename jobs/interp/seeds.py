"""Random draws that depend on what they are for, not on what was drawn before.

Each draw has a generator made from (seed, purpose, numbers such as epoch and shard). So a resumed job draws
what the uninterrupted one would have drawn, and adding a draw changes no other.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. `generator(0, "shards", epoch)`."""
    name = f"{seed}:{purpose}:{':'.join(map(str, numbers))}"
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(value)

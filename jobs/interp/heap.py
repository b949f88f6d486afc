"""Let go of large blocks at once. glibc keeps what was freed below a threshold that grows with use (to 32 MiB), and
small results between large intermediates hold it fast: quantizing SmolLM2-135M took 1.1 GB instead of 0.7."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE = 2**18


def give_back_large_blocks() -> None:
    """From now on blocks of 256 KiB and more go back to the system when they are freed (`mallopt(3)`)."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)

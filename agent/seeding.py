"""Randomness without state: before every step torch, numpy and random are seeded from (seed, step, data coordinate).

So no generator's state is saved, and none is lost in a restart or a change of shape. Ranks of one data coordinate draw
the same numbers. Step 0 is the building of the model: the same numbers on *all* ranks, so that all begin alike.
"""

from __future__ import annotations

import hashlib
import random
import struct

BUILD_STEP = 0


def seed_of(seed: int, step: int, coordinate: int) -> int:
    """64 bits that name (seed, step, coordinate); neighbours share nothing."""
    words = struct.pack("<qqq", seed, step, coordinate)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"surefoot-step").digest(), "little")


def seed_all(value: int) -> None:
    """Seed the global generators of torch (the CPU's, and CUDA's where it is in use), numpy and random."""
    import numpy as np
    import torch

    # torch.manual_seed would also queue a seed for every accelerator it might meet later, with a stack trace each time.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    np.random.seed([value & 0xFFFFFFFF, value >> 32])
    random.seed(value)

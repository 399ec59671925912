"""A data section straight from live memory: all bytes in order, whatever is small, large, or does not lie as it is stored."""

from __future__ import annotations

import pytest
import torch

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.live.copying import BOUNCE_NBYTES, DIRECT_NBYTES, LiveChunks
from surefoot.ckpt.live.leaves import dtype_name, leaf_of, memory_of
from surefoot.ckpt.live.ranklayout import Copy

SMALL = DIRECT_NBYTES // 4 - 1
"""Elements of float32 that are gathered; one more, and they would be handed over where they lie."""

STATES = {
    "nothing": [],
    "small": [torch.arange(n, dtype=torch.float32) for n in (1, 2, SMALL)],
    "large": [torch.arange(n, dtype=torch.float32) for n in (SMALL + 1, 3 * 2**20)],
    "more small ones than the buffer holds": [
        torch.full((SMALL - i % 7,), float(i)) for i in range(2 * BOUNCE_NBYTES // DIRECT_NBYTES)
    ],
    "in turn": [
        torch.full((SMALL if i % 3 else 2 * SMALL,), float(i))
        for i in range(3 * BOUNCE_NBYTES // DIRECT_NBYTES)
    ],
    "not as it is stored": [
        torch.arange(9.0),
        torch.arange(4 * 2**20, dtype=torch.float32).view(2048, 2048).t(),
        torch.arange(64.0)[::2],
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.arange(2**16, dtype=torch.float32),
        torch.view_as_complex(torch.arange(12.0).view(6, 2)).conj(),
        torch.arange(5, dtype=torch.int8),
    ],
}


@pytest.mark.parametrize("name", STATES)
def test_all_bytes_come_in_order(name: str) -> None:
    """Views are kept until `drain`, as an upload in the background keeps them."""
    leaves = {f"t{i}": leaf_of(f"t{i}", t) for i, t in enumerate(STATES[name])}
    copies: list[Copy] = []
    expected = bytearray()
    for i, t in enumerate(STATES[name]):
        stored = bytes(memory_of(t.resolve_conj().contiguous()).numpy())
        box, at = Box((0,) * t.dim(), tuple(t.shape)), len(expected)
        copies.append(Copy(name=f"t{i}", box=box, at=at, end=at + len(stored), dtype=dtype_name(t.dtype)))
        expected += stored
    found, kept = bytearray(), list[memoryview]()

    def drain() -> None:
        for view in kept:
            found.extend(view)
        kept.clear()

    for view in LiveChunks(copies, leaves)(drain):
        kept.append(view)
    drain()
    assert found == expected

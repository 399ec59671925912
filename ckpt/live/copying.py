"""Live tensors to bytes: copied into a buffer, hashed where they lie, or given as views. (torch)

A contiguous tensor in host memory is copied by memmove(3), which writes past the cache (measured: 4.0 GB/s where torch's
copy_ takes 2.4, one thread each); where torch has several threads a large one is copied by them. Tensors on a device are
copied on a side stream while the host goes on. The caller's stream waits for the copies before it runs what is launched
after the save, so the next optimizer step cannot change what is being copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.live.leaves import Leaf, dtype_of, memory_of, part_of
from surefoot.ckpt.live.ranklayout import Copy
from surefoot.ckpt.live.streams import Fence, SideStreams

THREADS_NBYTES = 4 * 2**20
"""A larger copy is worth starting torch's threads for."""
BOUNCE_NBYTES = 8 * 2**20
"""What a save straight from live memory copies small and non-contiguous tensors into, over and over."""
DIRECT_NBYTES = 64 * 2**10
"""Contiguous tensors from here on are handed over where they lie; smaller ones are gathered."""

_memmove = ctypes.memmove


def is_plain_memory(t: torch.Tensor) -> bool:
    """Do its bytes lie in host memory one after the other?"""
    return t.device.type == "cpu" and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def copy_into(
    copies: Iterable[Copy], leaves: Mapping[str, Leaf], base: torch.Tensor, side: SideStreams
) -> Fence | None:
    """Copy pieces to their places in `base` (uint8, contiguous, host memory). Returns what a device still copies."""
    on_device: list[tuple[torch.Tensor, torch.Tensor]] = []
    start, alone = base.data_ptr(), torch.get_num_threads() == 1
    with torch.no_grad():
        for c in copies:
            source = part_of(leaves[c.name], c.box)
            nbytes = c.end - c.at
            if is_plain_memory(source) and (alone or nbytes < THREADS_NBYTES):
                _memmove(start + c.at, source.data_ptr(), nbytes)
                continue
            target = base[c.at : c.end].view(dtype_of(c.dtype)).view(c.box.extent)
            if source.device.type == "cuda":
                on_device.append((target, source))
            else:
                target.copy_(source)
    return side.copy(on_device)


def view_bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a tensor for which `is_plain_memory` holds; valid while the tensor lives."""
    array: Any = memory_of(t).numpy()
    return memoryview(array)


def hashable_in_place(shared: Iterable[tuple[str, Box]], leaves: Mapping[str, Leaf]) -> bool:
    """Do the bytes of all these boxes lie in host memory as they would be stored?"""
    return all(is_plain_memory(part_of(leaves[name], box)) for name, box in shared)


def hash_in_place(t: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(view_bytes(t))


@dataclass(frozen=True, slots=True)
class LiveChunks:
    """The data section of what a rank writes, straight from live memory: `Chunks` for ckpt/objects/stream.py."""

    copies: Sequence[Copy]
    leaves: Mapping[str, Leaf]

    def __call__(self, drain: Callable[[], None]) -> Iterator[memoryview]:
        """Views are made ready for as many tensors as the bounce buffer has room for the small ones of: between writes of
        megabytes, which leave nothing else in the cache, the same work takes several times as long."""
        bounce = torch.empty(BOUNCE_NBYTES, dtype=torch.uint8, device="cpu")
        view, start, begin, end = view_bytes(bounce), bounce.data_ptr(), 0, 0
        ready: list[memoryview] = []
        for source in self._sources():
            nbytes, plain = source.nbytes, is_plain_memory(source)
            if plain and nbytes >= DIRECT_NBYTES:
                ready += view[begin:end], view_bytes(source)
                begin = end
                continue
            for part in (source,) if plain else _parts(source):
                if end + part.nbytes > BOUNCE_NBYTES:
                    yield from ready
                    yield view[begin:end]
                    drain()
                    ready, begin, end = [], 0, 0
                if plain:
                    _memmove(start + end, part.data_ptr(), nbytes)
                else:
                    bounce[end : end + part.nbytes].copy_(memory_of(part.contiguous()))
                end += part.nbytes
        yield from ready
        yield view[begin:end]

    def _sources(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [part_of(self.leaves[c.name], c.box).detach() for c in self.copies]


def _parts(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of at most `BOUNCE_NBYTES` that follow each other in row-major order: no tensor is copied as a whole."""
    if t.nbytes <= BOUNCE_NBYTES:
        yield t
        return
    if t.shape[0] == 1:
        yield from _parts(t[0])
        return
    rows = max(1, BOUNCE_NBYTES * t.shape[0] // t.nbytes)
    for at in range(0, t.shape[0], rows):
        yield from _parts(t[at : at + rows])

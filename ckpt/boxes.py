"""Boxes: rectangular parts of a tensor. PURE.

A box is `offset` and `extent`, one number of elements per dimension. A 0-d tensor has the one box ``((), ())``.
That some boxes make up the whole is proved in coverage.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Index = tuple[int, ...]


class Box(NamedTuple):
    """See the module. Sorts by offset, then extent."""

    offset: Index
    extent: Index

    @property
    def numel(self) -> int:
        """Elements; a 0-d box has one."""
        return math.prod(self.extent)

    def __str__(self) -> str:
        """``[0:4,2:3]``."""
        return "[" + ",".join(f"{o}:{o + e}" for o, e in zip(self.offset, self.extent, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """What both cover, or None."""
    offset = tuple(map(max, a.offset, b.offset))
    extent = tuple(
        [
            min(ao + ae, bo + be) - o
            for ao, ae, bo, be, o in zip(a.offset, a.extent, b.offset, b.extent, offset, strict=True)
        ]
    )
    return None if extent and min(extent) <= 0 else Box(offset, extent)


def relative(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of `outer`."""
    return Box(tuple([i - o for i, o in zip(inner.offset, outer.offset, strict=True)]), inner.extent)


def stretch(box: Box, begin: int, end: int) -> list[Box]:
    """Elements begin .. end - 1 of a box in row-major order, as few boxes: each contiguous, following each other in order of
    their offsets. At most 2 * dims - 1 of them."""
    if begin >= end:
        return []
    if (begin, end) == (0, box.numel):
        return [box]
    axis = next(i for i, e in enumerate(box.extent) if e > 1)
    row = math.prod(box.extent[axis + 1 :])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        at = begin - last * row
        return stretch(slab(box, axis, last, last + 1), at, at + end - begin)
    head = (
        stretch(slab(box, axis, first - 1, first), row - (first * row - begin), row)
        if first * row > begin
        else []
    )
    rows = [slab(box, axis, first, last)] if last > first else []
    tail = stretch(slab(box, axis, last, last + 1), 0, end - last * row) if end > last * row else []
    return [*head, *rows, *tail]


def slab(box: Box, axis: int, start: int, stop: int) -> Box:
    """Rows start .. stop - 1 of `box` along `axis`, counted from the box's own offset."""
    offset, extent = list(box.offset), list(box.extent)
    offset[axis] += start
    extent[axis] = stop - start
    return Box(tuple(offset), tuple(extent))


def span(outer: Box, inner: Box, itemsize: int) -> tuple[int, int]:
    """Bytes [begin, end) of a row-major `outer` that hold all of `inner`, which lies within it and is not empty."""
    first = last = 0
    stride = itemsize
    for i, e, o, rows in zip(
        *map(reversed, (inner.offset, inner.extent, outer.offset, outer.extent)), strict=True
    ):
        first += (i - o) * stride
        last += (e - 1) * stride
        stride *= rows
    return first, first + last + itemsize


# ---------------------------------------------------------------- which boxes a shard holds


class Run(NamedTuple):
    """Indices start .. start + length - 1 of one dimension of the whole tensor, held from local index `local` on."""

    start: int
    length: int
    local: int


class Sharding(NamedTuple):
    """One mesh dimension shards tensor dimension `dim`: chunk number `at` of `parts`. With `factor` > 1 (a strided shard) what
    is there is first cut into `factor` chunks, each of which is sharded."""

    dim: int
    parts: int
    at: int
    factor: int = 1


class Held(NamedTuple):
    """A box of the whole tensor, and where it begins in the local tensor."""

    box: Box
    local: Index


def held_boxes(shape: Sequence[int], shardings: Iterable[Sharding]) -> list[Held]:
    """What one rank holds of a tensor that is sharded by mesh dimensions, left to right. No box where it holds nothing.

    Chunks are torch.chunk's: all of the same, rounded-up length but the last ones, which may be short or empty.
    """
    runs = [[Run(0, n, 0)] if n else [] for n in shape]
    for s in shardings:
        runs[s.dim] = _shard(runs[s.dim], s)
    return [
        Held(Box(tuple(r.start for r in at), tuple(r.length for r in at)), tuple(r.local for r in at))
        for at in itertools.product(*runs)
    ]


def local_shape(shape: Sequence[int], shardings: Iterable[Sharding]) -> Index:
    """The shape of the local tensor under `held_boxes`."""
    lengths = list(shape)
    for s in shardings:
        lengths[s.dim] = sum(b - a for a, b in _chunks(lengths[s.dim], s))
    return tuple(lengths)


def _chunks(length: int, s: Sharding) -> list[tuple[int, int]]:
    """The positions [a, b) out of `length` that the shard takes."""
    taken: list[tuple[int, int]] = []
    outer = -(-length // s.factor) if length else 0
    for begin in range(0, length, outer or 1):
        end = min(begin + outer, length)
        inner = -(-(end - begin) // s.parts)
        a, b = begin + s.at * inner, min(begin + (s.at + 1) * inner, end)
        if b > a:
            taken.append((a, b))
    return taken


def _shard(runs: list[Run], s: Sharding) -> list[Run]:
    found: list[Run] = []
    for a, b in _chunks(sum(r.length for r in runs), s):
        for r in runs:
            begin, end = max(a, r.local), min(b, r.local + r.length)
            if end > begin:
                found.append(Run(r.start + begin - r.local, end - begin, 0))
    return _numbered(found)


def _numbered(runs: list[Run]) -> list[Run]:
    """Join neighbours and count the local indices anew."""
    joined: list[Run] = []
    for r in runs:
        if joined and joined[-1].start + joined[-1].length == r.start:
            joined[-1] = joined[-1]._replace(length=joined[-1].length + r.length)
        else:
            joined.append(r)
    locals_ = itertools.accumulate((r.length for r in joined), initial=0)
    return [r._replace(local=at) for r, at in zip(joined, locals_, strict=False)]

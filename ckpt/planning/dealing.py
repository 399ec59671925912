"""Dealing the bytes that several ranks hold alike out to them. PURE.

The boxes of one *group* (those held by the same ranks) are laid end to end in order of their names, and the line is cut into one
stretch per rank, as long as fills the ranks up to one level (water in connected vessels). So every rank writes neighbouring
tensors, a tensor larger than a stretch is split over as many ranks as it takes, and the number of pieces grows with boxes plus
ranks, not with their product. Small boxes, which are not cut, are dealt afterwards on a line of their own: they even out what
rounding left, and lie together in a few slabs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.ckpt.manifest import BLOCK_NBYTES

Ints = NDArray[np.int64]

SPLIT_NBYTES = 256 * 2**10
"""A stretch has at least this much, as long as there is: below, a piece costs more to name than to write."""
SLABS_MIN = 8
"""Small boxes go to so many ranks at least, where there are: a small state stays balanced, and a load has few slabs to ask for."""
UNIT_SHARE = 16
"""Cuts are rounded to a part of at most 1/16 of a stretch: off by 1/32 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """One box to deal: how large, and how it may be cut."""

    extent: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * self.itemsize


def fill(loads: Ints, nbytes: int, *, ranks_max: int | None = None) -> Ints:
    """How to add `nbytes` to vessels of these loads so that the fullest stays as low as can be: what each gets, in whole bytes.

    Args:
        ranks_max: only the so many emptiest get anything.
    """
    order = np.argsort(loads, kind="stable")[:ranks_max]
    sorted_loads = loads[order]
    below = np.cumsum(sorted_loads)
    count = np.arange(1, len(order) + 1)
    # The k lowest hold the water if level k does not reach the next.
    fits = nbytes + below[:-1] <= count[:-1] * sorted_loads[1:]
    k = int(np.argmax(fits)) + 1 if fits.any() else len(order)
    level = (nbytes + int(below[k - 1])) // k
    given = np.zeros_like(loads)
    given[order[:k]] = level - sorted_loads[:k]
    given[order[: nbytes - int(given.sum())]] += 1
    return given


def deal(bulks: Sequence[Bulk], loads: Ints, at: int) -> tuple[Ints, Ints]:
    """What rank number `at` of a group gets of each of the group's boxes: from byte `begin` [boxes] to before `end` [boxes].

    Args:
        loads: what each rank has to write besides.
    """
    nbytes = np.array([b.nbytes for b in bulks], np.int64)
    large = nbytes >= 2 * SPLIT_NBYTES
    begin, end = np.zeros_like(nbytes), np.zeros_like(nbytes)
    for chosen, cut in ((large, _cut_large), (~large, _cut_small)):
        if not chosen.any():
            continue
        edges = cut([b for b, is_chosen in zip(bulks, chosen, strict=True) if is_chosen], loads)
        line = _edges(nbytes[chosen])
        assert (edges[0], edges[-1]) == (0, line[-1]), "each byte is somebody's"
        assert (np.diff(edges) >= 0).all(), "and nobody else's"
        starts = line[:-1]
        begin[chosen] = np.clip(edges[at] - starts, 0, nbytes[chosen])
        end[chosen] = np.clip(edges[at + 1] - starts, 0, nbytes[chosen])
        loads = loads + np.diff(edges)
    return begin, end


def _cut_large(bulks: Sequence[Bulk], loads: Ints) -> Ints:
    """Where the line of these boxes is cut [ranks + 1]."""
    nbytes = np.array([b.nbytes for b in bulks], np.int64)
    total = int(nbytes.sum())
    ranks = max(1, min(len(loads), total // SPLIT_NBYTES))
    edges = _edges(fill(loads, total, ranks_max=ranks))
    starts = _edges(nbytes)
    units = np.array([unit_of(b, total // ranks) for b in bulks], np.int64)
    box = np.clip(np.searchsorted(starts, edges, side="right") - 1, 0, len(bulks) - 1)
    size, unit = nbytes[box], units[box]
    inside = np.minimum((edges - starts[box] + unit // 2) // unit * unit, size)
    # No sliver at either end of a box.
    inside = np.where(inside < SPLIT_NBYTES // 2, 0, inside)
    inside = np.where(size - inside < SPLIT_NBYTES // 2, size, inside)
    # What is rounded are cuts between ranks. The end of the line is none: what lies behind it would be nobody's.
    return np.where(edges == total, total, starts[box] + inside)


def _cut_small(bulks: Sequence[Bulk], loads: Ints) -> Ints:
    """As `_cut_large`, between boxes."""
    nbytes = np.array([b.nbytes for b in bulks], np.int64)
    total = int(nbytes.sum())
    ranks = min(len(loads), max(SLABS_MIN, total // SPLIT_NBYTES))
    edges = _edges(fill(loads, total, ranks_max=ranks))
    starts = _edges(nbytes)
    upto = np.searchsorted(starts[:-1] + nbytes // 2, edges, side="right")
    upto[0], upto[-1] = 0, len(nbytes)
    return starts[upto]


def _edges(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def unit_of(bulk: Bulk, stretch: int) -> int:
    """The multiple of bytes at which a box is cut: whole rows and whole checksum blocks where the stretch is long enough for
    the rounding not to matter (1/16 of it), then whole rows, then rows of deeper dimensions."""
    most = max(stretch // UNIT_SHARE, bulk.itemsize)
    for axis in range(len(bulk.extent)):
        row = math.prod(bulk.extent[axis + 1 :]) * bulk.itemsize
        if (both := math.lcm(row, BLOCK_NBYTES)) <= most:
            return both
        if row <= most:
            return row
    return bulk.itemsize

"""The proof that pieces make up whole tensors, each element exactly once. PURE.

The number of boxes that cover a point is a step function, and its mixed derivative is a sum of signed unit masses at the
boxes' corners: plus one at every corner with an even number of upper sides, minus one at the others. Two such functions are
equal exactly if their masses are. So n boxes cover every element of a tensor exactly once if and only if their masses add up
to those of the tensor's own box: n * 2**dims additions after one sort, no comparison of boxes with each other. Where they do
not, the first point (in lexicographic order) with mass left over is an element that is covered 1 + mass times, since nothing
before it contributes: the error names it.

All tensors of as many dimensions are proved in one sort: a point is one number, its place in the grids of all tensors laid
end to end. (A grid has one point more per dimension than the tensor: upper sides lie on it.) What does not fit that, because a
box reaches outside, the grids have more points than a number can say, or there are many dimensions, is proved tensor by
tensor, on the coordinates themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.ckpt.boxes import Box, Index
from surefoot.ckpt.errors import CoverageError
from surefoot.ckpt.manifest import TensorMeta

Ints = NDArray[np.int64]

TOGETHER_DIMS_MAX = 4
"""Tensors of more dimensions are proved one by one, on the dimensions along which they are cut."""
CORNERS_MAX = 2**24
"""The proof visits 2**dims corners of each box. A tensor that is cut along more than TOGETHER_DIMS_MAX dimensions into so many
boxes that these are more corners is refused: no mesh makes such a one, and a forged manifest must not cost memory."""
GRID_POINTS_MAX = 2**62


class Boxed(Protocol):
    """A `Box`, or whatever has one's numbers."""

    @property
    def offset(self) -> Index: ...
    @property
    def extent(self) -> Index: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscount:
    """`element` is covered `times` times instead of once."""

    element: Index
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxColumns:
    """Boxes of as many dimensions: `offset` and `extent` [boxes, dims], the number of their tensor, and their place among all
    pieces that were given, ascending [boxes]."""

    which: Ints
    tensor: Ints
    offset: Ints
    extent: Ints

    def __len__(self) -> int:
        return len(self.tensor)


def prove_coverage(tensors: Mapping[str, TensorMeta], pieces: Iterable[tuple[str, Boxed]]) -> None:
    """Every element of every tensor lies in exactly one piece. O(n log n) in the number of pieces.

    Raises CoverageError naming tensor and element, and the boxes that hold it.
    """
    prove_columns(tensors, columns_of(tensors, pieces))


def prove_columns(tensors: Mapping[str, TensorMeta], columns: Sequence[BoxColumns]) -> None:
    """As `prove_coverage`, of pieces that are arrays already."""
    metas = list(tensors.values())
    wrong = first_wrong(metas, columns)
    if wrong is None:
        return
    name = list(tensors)[wrong]
    shape = metas[wrong].shape
    boxes = [b for at in columns for b in _boxes(at, at.tensor == wrong)]
    raise uncovered_error(name, shape, boxes)


def uncovered_error(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> CoverageError:
    """What to raise for a tensor that `boxes` do not cover."""
    found = miscovered(shape, boxes)
    assert found is not None, f"{name} is covered"
    at = [
        str(b)
        for b in boxes
        if all(o <= i < o + e for i, o, e in zip(found.element, b.offset, b.extent, strict=True))
    ]
    held = f"by the boxes {', '.join(sorted(at)[:4])}" if at else "by no box"
    return CoverageError(
        f"{name} of shape {list(shape)}: element {list(found.element)} is covered {found.times} times, {held}; every element must be "
        f"written exactly once"
    )


def columns_of(tensors: Mapping[str, TensorMeta], pieces: Iterable[tuple[str, Boxed]]) -> list[BoxColumns]:
    """Pieces as arrays, one set for each number of dimensions.

    Raises CoverageError for a piece of no tensor, or one that is no box of its tensor.
    """
    number = {name: i for i, name in enumerate(tensors)}
    given = list(pieces)
    # List by list: a million pieces go through here.
    tensor = np.array([number.get(name, -1) for name, _ in given], np.int64)
    dims = np.array([len(box.extent) for _, box in given], np.int64)
    wanted = np.array([len(meta.shape) for meta in tensors.values()] or [0], np.int64)[tensor]
    fits = (dims == wanted) & (dims == [len(box.offset) for _, box in given]) & (tensor >= 0)
    if not fits.all():
        raise _no_box(tensors, *given[int(np.argmin(fits))])
    columns: list[BoxColumns] = []
    for d in np.unique(dims).tolist():
        which = np.flatnonzero(dims == d)
        chosen = [given[i][1] for i in which.tolist()]
        try:
            offset, extent = as_rows([b.offset for b in chosen], d), as_rows([b.extent for b in chosen], d)
        except OverflowError as e:
            raise CoverageError("a piece has numbers of more than 64 bits: it is no box of any tensor") from e
        negative = ((offset < 0) | (extent < 0)).any(axis=1)
        if negative.any():
            raise _no_box(tensors, *given[int(which[np.argmax(negative)])])
        columns.append(BoxColumns(which=which, tensor=tensor[which], offset=offset, extent=extent))
    return columns


def as_rows(rows: Sequence[Index], dims: int) -> Ints:
    """Tuples of `dims` numbers as an array [rows, dims]. Raises OverflowError for a number beyond 64 bits."""
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(rows) * dims)
    return flat.reshape(len(rows), dims)


def _no_box(tensors: Mapping[str, TensorMeta], name: str, box: Boxed) -> CoverageError:
    if name not in tensors:
        return CoverageError(
            f"a piece {_text(box)} belongs to {name!r}, which is no tensor of this checkpoint"
        )
    return CoverageError(f"{name}: {_text(box)} is no box of a tensor of shape {list(tensors[name].shape)}")


def _text(box: Boxed) -> str:
    if len(box.offset) != len(box.extent):
        return f"offset {list(box.offset)}, extent {list(box.extent)}"
    return str(Box(box.offset, box.extent))


def _box(c: BoxColumns, i: int) -> Box:
    return Box(tuple(c.offset[i].tolist()), tuple(c.extent[i].tolist()))


def _boxes(c: BoxColumns, chosen: NDArray[np.bool_]) -> Iterator[Box]:
    return (_box(c, int(i)) for i in np.flatnonzero(chosen))


# ---------------------------------------------------------------- all tensors at once


def first_wrong(metas: Sequence[TensorMeta], columns: Iterable[BoxColumns]) -> int | None:
    """The number of the first tensor whose boxes are no partition of it, or None."""
    by_dims: dict[int, list[int]] = {}
    for i, meta in enumerate(metas):
        by_dims.setdefault(len(meta.shape), []).append(i)
    found = {c.offset.shape[1]: c for c in columns}
    wrong: list[int] = []
    for dims, numbers in by_dims.items():
        wrong += _wrong_of(metas, np.array(numbers, np.int64), found.get(dims) or _no_boxes(dims))
    return min(wrong, default=None)


def _no_boxes(dims: int) -> BoxColumns:
    none, nothing = np.zeros(0, np.int64), np.zeros((0, dims), np.int64)
    return BoxColumns(which=none, tensor=none, offset=nothing, extent=nothing)


def _wrong_of(metas: Sequence[TensorMeta], numbers: Ints, c: BoxColumns) -> list[int]:
    """The wrong ones of the tensors `numbers` (ascending), which have as many dimensions as the boxes."""
    dims = c.offset.shape[1]
    shapes = as_rows([metas[i].shape for i in numbers], dims)
    points = [math.prod(n + 1 for n in metas[i].shape) for i in numbers]
    if dims > TOGETHER_DIMS_MAX or sum(points) > GRID_POINTS_MAX:
        return _wrong_one_by_one(metas, numbers, c)
    at = np.searchsorted(numbers, c.tensor)  # the row of each box's tensor
    outside = (c.offset + c.extent > shapes[at]).any(axis=1) & (c.extent > 0).all(axis=1)
    if outside.any():
        return [int(numbers[at[outside]].min())]
    starts = np.concatenate([[0], np.cumsum(np.array(points, np.int64))]).astype(np.int64)
    strides = np.ones_like(shapes)
    for k in range(dims - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * (shapes[:, k + 1] + 1)
    corners, masses = _corners(starts[at], strides[at], c.offset, c.extent, +1)
    own, minus = _corners(starts[:-1], strides, np.zeros_like(shapes), shapes, -1)
    left = _left_over(np.concatenate([corners, own]), np.concatenate([masses, minus]))
    return [] if left is None else [int(numbers[np.searchsorted(starts, left, side="right") - 1])]


def _corners(
    start: Ints, stride: Ints, offset: Ints, extent: Ints, sign: int
) -> tuple[Ints, NDArray[np.int8]]:
    """Where the corners of all boxes lie on the line of grids, and their masses. Boxes without elements have none."""
    full = (extent > 0).all(axis=1)
    base = (start + (offset * stride).sum(axis=1))[full]
    steps = (extent * stride)[full]
    points, masses = [], []
    for upper in itertools.product((0, 1), repeat=offset.shape[1]):
        chosen = [k for k, up in enumerate(upper) if up]
        points.append(base + steps[:, chosen].sum(axis=1))
        masses.append(np.full(len(base), sign * (-1) ** len(chosen), np.int8))
    return np.concatenate(points), np.concatenate(masses)


def _left_over(points: Ints, masses: NDArray[np.int8]) -> int | None:
    """The least point whose masses do not cancel."""
    if not len(points):
        return None
    order = np.argsort(points, kind="stable")
    points = points[order]
    first = np.flatnonzero(np.concatenate([[True], points[1:] != points[:-1]]))
    sums = np.add.reduceat(masses[order].astype(np.int64), first)
    wrong = np.flatnonzero(sums)
    return int(points[first[wrong[0]]]) if len(wrong) else None


# ---------------------------------------------------------------- one tensor


def _wrong_one_by_one(metas: Sequence[TensorMeta], numbers: Ints, c: BoxColumns) -> list[int]:
    order = np.argsort(c.tensor, kind="stable")
    begin = np.searchsorted(c.tensor[order], numbers)
    end = np.searchsorted(c.tensor[order], numbers, side="right")
    for number, a, b in zip(numbers.tolist(), begin, end, strict=True):
        mine = order[a:b]
        if miscounted(metas[number].shape, c.offset[mine], c.extent[mine]) is not None:
            return [number]
    return []


def miscovered(shape: Sequence[int], boxes: Iterable[Box]) -> Miscount | None:
    """The first element of a tensor that `boxes` do not cover exactly once, or None: they are a partition of it.

    Boxes that reach outside the tensor are found as well: an element outside is to be covered zero times, so its count
    appears as one too many.
    """
    given = list(boxes)
    dims = len(shape)
    return miscounted(
        shape, as_rows([b.offset for b in given], dims), as_rows([b.extent for b in given], dims)
    )


def miscounted(shape: Sequence[int], offset: Ints, extent: Ints) -> Miscount | None:
    """As `miscovered`, on arrays [boxes, dims].

    Raises CoverageError for a tensor that is cut along too many dimensions (CORNERS_MAX).
    """
    own = np.array([shape], np.int64).reshape(1, len(shape))
    # A dimension that every box spans cuts nothing: its coordinate is 0 wherever a count is wrong.
    cut = np.flatnonzero(((offset != 0) | (extent != own)).any(axis=0))
    if len(cut) > TOGETHER_DIMS_MAX and len(offset) * 2 ** len(cut) > CORNERS_MAX:
        raise CoverageError(
            f"{len(offset)} boxes cut a tensor of shape {list(shape)} along {len(cut)} dimensions: too many to be checked"
        )
    lower = np.concatenate([offset, np.zeros_like(own)])
    size = np.concatenate([extent, own])
    sign = np.concatenate([np.ones(len(offset), np.int64), [-1]])
    full = (size > 0).all(axis=1)
    lower, size, sign = lower[full][:, cut], size[full][:, cut], sign[full]
    found = _first_mass(lower, size, sign)
    if found is None:
        return None
    element = np.zeros(len(shape), np.int64)
    element[cut] = found[0]
    return Miscount(element=tuple(element.tolist()), times=1 + found[1])


def _first_mass(lower: Ints, size: Ints, sign: Ints) -> tuple[Ints, int] | None:
    """The first point in lexicographic order whose masses do not cancel, and what is left there."""
    if not len(lower):
        return None
    points, masses = [], []
    for upper in itertools.product((0, 1), repeat=lower.shape[1]):
        points.append(lower + size * np.array(upper, np.int64))
        masses.append(sign * (-1) ** sum(upper))
    point, mass = np.concatenate(points), np.concatenate(masses)
    if point.shape[1]:
        order = np.lexsort(point.T[::-1])
        point, mass = point[order], mass[order]
    first = np.flatnonzero(np.concatenate([[True], (point[1:] != point[:-1]).any(axis=1)]))
    sums = np.add.reduceat(mass, first)
    wrong = np.flatnonzero(sums)
    return (point[first[wrong[0]]], int(sums[wrong[0]])) if len(wrong) else None

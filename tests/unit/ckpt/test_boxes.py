"""Geometry and the coverage proof, against counting every element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.boxes import (
    Box,
    Sharding,
    held_boxes,
    intersect,
    local_shape,
    relative,
    span,
    stretch,
    whole,
)
from surefoot.ckpt.planning.coverage import Miscount, miscovered

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
full_shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return Box(offset, extent)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut again and again."""
    shape = draw(full_shapes)
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [i for i, e in enumerate(box.extent) if e > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.extent[axis] - 1))
        for start, stop in ((0, at), (at, box.extent[axis])):
            offset, extent = list(box.offset), list(box.extent)
            offset[axis], extent[axis] = offset[axis] + start, stop - start
            boxes.append(Box(tuple(offset), tuple(extent)))
    return shape, draw(st.permutations(boxes))


def first_miscount(shape: tuple[int, ...], boxes: list[Box]) -> Miscount | None:
    """The same answer by brute force."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices(box)] += 1
    for index in itertools.product(*(range(n) for n in shape)):
        if count[index] != 1:
            return Miscount(element=index, times=int(count[index]))
    return None


@given(partitions())
def test_a_partition_is_proved(partition: tuple[tuple[int, ...], list[Box]]) -> None:
    assert miscovered(*partition) is None


@given(st.data(), full_shapes)
def test_any_set_of_boxes_is_judged_as_by_counting(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    assert miscovered(shape, boxes) == first_miscount(shape, boxes)


@given(st.data(), partitions())
def test_one_box_too_many_or_missing_is_found(
    data: st.DataObject, partition: tuple[tuple[int, ...], list[Box]]
) -> None:
    shape, boxes = partition
    victim = data.draw(st.sampled_from(boxes))
    doubled = [*boxes, victim]
    lost = list(boxes)
    lost.remove(victim)
    assert miscovered(shape, doubled) == Miscount(element=victim.offset, times=2)
    assert miscovered(shape, lost) == Miscount(element=victim.offset, times=0)


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [Box((), ())], None),
        ((), [], Miscount(element=(), times=0)),
        ((), [Box((), ()), Box((), ())], Miscount(element=(), times=2)),
        ((0, 4), [], None),
        ((4,), [Box((0,), (2,)), Box((2,), (2,)), Box((1,), (0,))], None),
        ((4,), [Box((0,), (5,))], Miscount(element=(4,), times=2)),
        ((4,), [Box((0,), (2,)), Box((1,), (3,))], Miscount(element=(1,), times=2)),
        ((2, 2), [Box((0, 0), (1, 2)), Box((1, 1), (1, 1))], Miscount(element=(1, 0), times=0)),
    ],
)
def test_edges(shape: tuple[int, ...], boxes: list[Box], expected: Miscount | None) -> None:
    assert miscovered(shape, boxes) == expected


@given(st.data(), full_shapes)
def test_intersection_and_relative(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    both = intersect(a, b)
    expected = set(index[slices(a)].ravel().tolist()) & set(index[slices(b)].ravel().tolist())
    assert (set() if both is None else set(index[slices(both)].ravel().tolist())) == expected
    if both is not None:
        inside = index[slices(a)][slices(relative(both, a))]
        assert inside.tolist() == index[slices(both)].tolist()


@given(st.data(), full_shapes)
def test_a_stretch_is_its_elements_in_few_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    begin = data.draw(st.integers(0, box.numel))
    end = data.draw(st.integers(begin, box.numel))
    found = stretch(box, begin, end)
    values = np.arange(box.numel).reshape(box.extent)
    joined = [values[slices(relative(s, box))].ravel().tolist() for s in found]
    assert list(itertools.chain.from_iterable(joined)) == list(range(begin, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(st.data(), full_shapes, st.sampled_from([1, 2, 8]))
def test_span_holds_the_inner_box_and_no_more(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int
) -> None:
    outer = whole(shape)
    inner = data.draw(boxes_in(shape))
    index = np.arange(outer.numel).reshape(shape)[slices(inner)]
    assert span(outer, inner, itemsize) == (int(index.min()) * itemsize, (int(index.max()) + 1) * itemsize)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """A shape, and mesh dimensions as (tensor dimension, parts, factor)."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    dims = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4), st.sampled_from([1, 1, 2, 3]))
    return shape, draw(st.lists(dims, max_size=3))


@given(meshes())
def test_the_shards_of_all_ranks_make_up_the_tensor(
    mesh: tuple[tuple[int, ...], list[tuple[int, int, int]]],
) -> None:
    shape, dims = mesh
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    boxes: list[Box] = []
    for place in itertools.product(*(range(parts) for _, parts, _ in dims)):
        shardings = [
            Sharding(d, parts, at, factor) for (d, parts, factor), at in zip(dims, place, strict=True)
        ]
        held = held_boxes(shape, shardings)
        local = np.full(local_shape(shape, shardings), -1)
        for h in held:
            local[slices(Box(h.local, h.box.extent))] = index[slices(h.box)]
        assert (local >= 0).all()
        boxes += [h.box for h in held]
    assert miscovered(shape, boxes) is None


@pytest.mark.parametrize(
    ("n", "shardings", "expected"),
    [
        (7, [Sharding(0, 4, 3)], [(6, 1)]),
        (5, [Sharding(0, 4, 3)], []),
        (8, [Sharding(0, 2, 0), Sharding(0, 2, 1)], [(2, 2)]),
        # The example in torch's _compute_local_shape_and_global_offset: S(0), then SS(0, split_factor=2).
        (8, [Sharding(0, 2, 0), Sharding(0, 2, 0, 2)], [(0, 1), (2, 1)]),
        (8, [Sharding(0, 2, 1), Sharding(0, 2, 1, 2)], [(5, 1), (7, 1)]),
        # FSDP over TP on one dimension: strided first, plain second, and every shard is in one piece.
        (8, [Sharding(0, 2, 1, 2), Sharding(0, 2, 1)], [(6, 2)]),
    ],
)
def test_shards_of_one_dimension(n: int, shardings: list[Sharding], expected: list[tuple[int, int]]) -> None:
    assert [(h.box.offset[0], h.box.extent[0]) for h in held_boxes((n,), shardings)] == expected

"""The proof for all tensors at once, against the proof of each; and what it refuses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.errors import CoverageError
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.planning import coverage
from surefoot.ckpt.planning.coverage import Miscount, miscovered, prove_coverage

Pieces = dict[str, tuple[tuple[int, ...], list[Box]]]


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A tensor cut into a grid of boxes."""
    edges = [
        [n * i // min(p, max(n, 1)) for i in range(min(p, max(n, 1)) + 1)]
        for n, p in zip(shape, parts, strict=True)
    ]
    return [
        Box(tuple(a for a, _ in at), tuple(b - a for a, b in at))
        for at in itertools.product(*(itertools.pairwise(e) for e in edges))
    ]


@st.composite
def tensors(draw: st.DrawFn) -> Pieces:
    """Tensors of different dimensions in grids; some boxes are lost, doubled or moved."""
    found: Pieces = {}
    for n in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 5), max_size=6).map(tuple))
        boxes = grid(shape, tuple(draw(st.integers(1, 2)) for _ in shape))
        if boxes and draw(st.booleans()):
            at = draw(st.integers(0, len(boxes) - 1))
            match draw(st.sampled_from(["lose", "double", "move"])):
                case "lose":
                    del boxes[at]
                case "double":
                    boxes.append(boxes[at])
                case "move":
                    boxes[at] = Box(tuple(o + 1 for o in boxes[at].offset), boxes[at].extent)
        found[f"t{n}"] = shape, boxes
    return found


def refusal(found: Pieces) -> str | None:
    metas = {name: TensorMeta(dtype="float32", shape=shape) for name, (shape, _) in found.items()}
    pieces = [(name, box) for name, (_, boxes) in found.items() for box in boxes]
    try:
        prove_coverage(metas, reversed(pieces))
    except CoverageError as e:
        return str(e)
    return None


@given(tensors())
def test_all_at_once_is_judged_as_one_by_one(found: Pieces) -> None:
    wrong = {n: m for n, (shape, boxes) in found.items() if (m := miscovered(shape, boxes)) is not None}
    said = refusal(found)
    assert (said is not None) == bool(wrong)
    if said is not None:
        name = said.partition(" ")[0]
        assert f"element {list(wrong[name].element)} is covered {wrong[name].times} times" in said


@given(tensors())
def test_coordinates_are_compared_where_places_on_a_line_would_not_fit(found: Pieces) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "GRID_POINTS_MAX", 0)
        assert (refusal(found) is None) == all(miscovered(s, b) is None for s, b in found.values())


def test_overlap_and_hole_are_named_with_tensor_element_and_box() -> None:
    """CKP-01, the refusal: of many tensors the one is named, the element, and the boxes that hold it."""
    good: Pieces = {f"layer{i}": ((7, 3), grid((7, 3), (4, 2))) for i in range(50)}
    assert refusal(good) is None
    overlap = {**good, "layer7": ((7, 3), [*good["layer7"][1], Box((3, 0), (2, 3))])}
    said = refusal(overlap)
    assert said is not None
    assert said.startswith("layer7 of shape [7, 3]: element [3, 0] is covered 2 times, by the boxes ")
    assert "[3:5,0:3]" in said
    hole = {**good, "layer7": ((7, 3), good["layer7"][1][:-1])}
    said = refusal(hole)
    assert said is not None
    assert said.startswith("layer7 of shape [7, 3]: element [5, 1] is covered 0 times, by no box")


def test_a_box_without_elements_covers_nothing_wherever_it_lies() -> None:
    assert refusal({"w": ((0,), [Box((1,), (0,))])}) is None
    assert refusal({"w": ((2,), [Box((0,), (2,)), Box((2**62,), (0,))])}) is None


def test_a_tensor_that_nobody_stores_is_a_hole_unless_it_is_empty() -> None:
    assert refusal({"w": ((0, 4), [])}) is None
    assert "element [0, 0] is covered 0 times" in (refusal({"w": ((1, 4), [])}) or "")
    assert "element [] is covered 0 times" in (refusal({"n": ((), [])}) or "")


def test_tensors_beyond_64_bits_together_are_proved() -> None:
    """Four tensors of 2**61 elements: their points fit no one line."""
    shape = (2**30, 2**31)
    found: Pieces = {f"t{i}": (shape, grid(shape, (2, 2))) for i in range(4)}
    assert refusal(found) is None
    found["t3"][1].pop()
    assert f"t3 of shape {list(shape)}: element [{2**29}, {2**30}] is covered 0 times" in (
        refusal(found) or ""
    )


def test_many_dimensions_cost_no_more_than_those_that_are_cut() -> None:
    shape = (2,) * 60
    half = Box((0,) * 60, (1, *shape[1:]))
    other = Box((1, *(0,) * 59), (1, *shape[1:]))
    assert miscovered(shape, [half, other]) is None
    assert miscovered(shape, [half]) == Miscount(element=(1, *(0,) * 59), times=0)


def test_a_forged_tensor_cut_along_sixty_dimensions_is_refused_at_once() -> None:
    shape = (2,) * 60
    with pytest.raises(CoverageError, match="along 60 dimensions"):
        miscovered(shape, [Box((0,) * 60, (1,) * 60)])


@pytest.mark.parametrize(
    "box", [Box((2**70,), (1,)), Box((0,), (2**70,)), Box((0,), (-1,)), Box((0, 0), (4, 1)), Box((0,), ())]
)
def test_what_is_no_box_is_refused(box: Box) -> None:
    with pytest.raises(CoverageError, match="no box"):
        prove_coverage({"w": TensorMeta(dtype="float32", shape=(4,))}, [("w", box)])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_one_wrong_element_anywhere_is_found(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Brute force: all elements as boxes of their own, one of them missing or doubled."""
    boxes = grid(shape, shape)
    victim = data.draw(st.integers(0, math.prod(shape) - 1))
    element = tuple(int(i) for i in np.unravel_index(victim, shape))
    assert miscovered(shape, [*boxes[:victim], *boxes[victim + 1 :]]) == Miscount(element=element, times=0)
    assert miscovered(shape, [*boxes, boxes[victim]]) == Miscount(element=element, times=2)
    assert miscovered(shape, [whole(shape)]) is None

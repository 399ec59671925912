"""What ranks tell each other of their layouts, and planning for thousands of them: counted, not timed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from ckpt_worlds import worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.ckpt.boxes import Box, Sharding, held_boxes
from surefoot.ckpt.errors import CkptWorldError, CoverageError
from surefoot.ckpt.manifest import TensorMeta
from surefoot.ckpt.planning.coverage import prove_coverage
from surefoot.ckpt.planning.layouts import (
    Description,
    HeldTensor,
    Layouts,
    describe,
    exchange_layouts,
    layouts_of,
)
from surefoot.ckpt.planning.plan import Plan, assign, nbytes_of


class Rounds:
    """The exchange of one rank in a world where everybody's words are known, and a count of what went through it."""

    def __init__(self, everyone: list[Description]) -> None:
        first: dict[bytes, int] = {}
        for r, d in enumerate(everyone):
            first.setdefault(d.template, r)
        self.answers = [
            [d.word for d in everyone],
            [d.template if first[d.template] == r else b"" for r, d in enumerate(everyone)],
        ]
        self.calls: list[bytes] = []
        self.received = 0

    def __call__(self, data: bytes) -> list[bytes]:
        answer = self.answers[len(self.calls)]
        self.calls.append(data)
        self.received += sum(map(len, answer))
        return answer


def held_alike(told: Layouts) -> list[list[HeldTensor]]:
    """Layouts back to what each rank holds: the other way, in plain words."""
    found: list[list[HeldTensor]] = [[] for _ in range(told.world_size)]
    for t in told.templates:
        for rank, values in zip(t.ranks.tolist(), t.values.tolist(), strict=True):
            for row in t.rows:
                terms = np.array(row.terms, int).reshape(row.count, len(row.shape), 3).tolist()
                boxes = [
                    Box(
                        tuple(scale * values[k] if k >= 0 else 0 for scale, _, k in box),
                        tuple(extent for _, extent, _ in box),
                    )
                    for box in terms
                ]
                found[rank].append(
                    HeldTensor(name=row.name, dtype=row.dtype, shape=row.shape, boxes=tuple(boxes))
                )
    return found


def sharded(name: str, shape: tuple[int, ...], shardings: list[Sharding]) -> HeldTensor:
    boxes = tuple(sorted(h.box for h in held_boxes(shape, shardings)))
    return HeldTensor(name=name, dtype="float32", shape=shape, boxes=boxes)


@st.composite
def meshes(draw: st.DrawFn) -> list[list[HeldTensor]]:
    """Tensors of random shapes on a mesh of two dimensions, each cut or not along each of them; strided shards among them."""
    outer, inner = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4))
    found: list[list[HeldTensor]] = [[] for _ in range(outer * inner)]
    for n, shape in enumerate(shapes):
        dims = st.integers(-1, len(shape) - 1)
        first, second, factor = draw(dims), draw(dims), draw(st.sampled_from([1, 1, 2]))
        for rank in range(outer * inner):
            cuts = [Sharding(first, outer, rank // inner, factor)] if first >= 0 else []
            cuts += [Sharding(second, inner, rank % inner)] if second >= 0 else []
            found[rank].append(sharded(f"t{n}", shape, cuts))
    return found


@given(meshes())
def test_what_is_told_is_what_is_held(found: list[list[HeldTensor]]) -> None:
    everyone = [describe(tensors) for tensors in found]
    for rank, tensors in enumerate(found):
        told = exchange_layouts(tensors, rank, Rounds(everyone))
        assert held_alike(told) == [sorted(ts, key=lambda t: t.name) for ts in found]


@settings(max_examples=40)
@given(meshes(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_any_order(found: list[list[HeldTensor]], rng: random.Random) -> None:
    shuffled = [
        [
            HeldTensor(
                name=t.name, dtype=t.dtype, shape=t.shape, boxes=tuple(rng.sample(t.boxes, len(t.boxes)))
            )
            for t in rng.sample(tensors, len(tensors))
        ]
        for tensors in found
    ]
    assert assign(shuffled) == assign(found)


def test_a_rank_that_sends_something_else_is_named() -> None:
    mine, other = [sharded("w", (4,), [])], [sharded("v", (4,), [])]
    rounds = Rounds([describe(mine), describe(other)])
    rounds.answers[1][1] = b"no such layout"
    with pytest.raises(CkptWorldError, match="rank 1 sent another layout"):
        exchange_layouts(mine, 0, rounds)


@pytest.mark.parametrize("box", [Box((0, 0), (1, 1)), Box((-1,), (2,)), Box((0,), (-1,))])
def test_what_is_no_box_is_refused(box: Box) -> None:
    with pytest.raises(CoverageError, match=r"w: .* is no box"):
        describe([HeldTensor(name="w", dtype="float32", shape=(4,), boxes=(box,))])


def test_a_box_that_a_rank_names_twice_is_refused() -> None:
    twice = HeldTensor(name="w", dtype="float32", shape=(4,), boxes=(Box((0,), (4,)),) * 2)
    with pytest.raises(CoverageError, match=r"w: rank 0 holds the box \[0:4\] twice"):
        Plan(layouts_of([[twice]]))


# ---------------------------------------------------------------- thousands of ranks


def planned(kind: Any, ranks: int, tensors: int = 1024) -> tuple[Any, Rounds, Plan]:
    world = kind(ranks, worlds.transformer(tensors))
    rank = ranks // 3
    rounds = Rounds(worlds.descriptions(world))
    return world, rounds, Plan(exchange_layouts(world.held(rank), rank, rounds))


@pytest.mark.parametrize("kind", worlds.KINDS, ids=lambda k: k.__name__)
def test_the_work_grows_with_ranks_and_not_with_ranks_times_tensors(kind: Any) -> None:
    """CKP-45, counted: with 1,024 tensors, the boxes looked at (each sorted once: n log n), and the bytes received, grow as the
    ranks; with more tensors of the shapes that are there already they do not grow at all. Times: bench/plan.py."""
    (_, _, few), (_, rounds, many) = planned(kind, 256), planned(kind, 1024)
    assert many.touched <= 4 * few.touched
    assert many.touched <= 8 * 1024, "a million boxes are held"
    words, templates = rounds.answers
    assert max(map(len, words)) <= 64
    assert len({t for t in templates if t}) <= 8
    _, _, fewer_tensors = planned(kind, 256, tensors=256)
    assert few.touched == fewer_tensors.touched


@pytest.mark.parametrize("kind", worlds.KINDS, ids=lambda k: k.__name__)
def test_all_is_written_once_and_evenly(kind: Any) -> None:
    """All shares of 256 ranks together, a few layers: covered, and no rank off the mean by more than a part of its stretch."""
    world = kind(256, worlds.transformer(29))
    plan = Plan(exchange_layouts(world.held(0), 0, Rounds(worlds.descriptions(world))))
    shares = [plan.share(r) for r in range(256)]
    metas = {name: TensorMeta(dtype="float32", shape=shape) for name, shape in world.tensors.items()}
    prove_coverage(metas, (piece for s in shares for piece in s.written))
    loads = [sum(nbytes_of(metas[n], b) for n, b in s.written) for s in shares]
    assert sum(loads) == world.nbytes
    assert max(loads) <= 1.07 * world.nbytes / 256
    boxes = sum(len(t.boxes) for r in range(256) for t in world.held(r))
    distinct = {(t.name, b) for r in range(256) for t in world.held(r) for b in t.boxes}
    pieces = sum(len(s.written) for s in shares)
    assert pieces <= len(distinct) + 8 * 256, "pieces grow with boxes plus ranks, not with boxes held"
    assert boxes >= pieces


def test_planning_asks_the_others_twice_at_most_and_once_where_all_are_alike() -> None:
    """CKP-26, simulated: planning needs nothing but this exchange, at a new layout only; no collective, no device."""
    _, alike, _ = planned(worlds.hsdp, 256)
    assert [len(call) for call in alike.calls] == [24], "a hash, and where the rank stands"
    _, uneven, _ = planned(worlds.fsdp, 1024)
    assert len(uneven.calls) == 2
    assert sum(len(t) for t in uneven.answers[1]) < 64 * 2**10, "each template is sent once, by one rank"

"""Who writes which box."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.ckpt.boxes import Box, intersect, whole
from surefoot.ckpt.errors import CoverageError, StateError
from surefoot.ckpt.manifest import BLOCK_NBYTES, TensorMeta
from surefoot.ckpt.planning.coverage import prove_coverage
from surefoot.ckpt.planning.dealing import SPLIT_NBYTES
from surefoot.ckpt.planning.plan import (
    ITEMSIZES,
    HeldTensor,
    assign,
    coalesce,
    nbytes_of,
    place,
)


def held(name: str, shape: tuple[int, ...], *boxes: Box, dtype: str = "float32") -> HeldTensor:
    return HeldTensor(name=name, dtype=dtype, shape=shape, boxes=boxes)


def replicated(name: str, shape: tuple[int, ...], dtype: str = "float32") -> HeldTensor:
    return held(name, shape, whole(shape), dtype=dtype)


large_shapes = st.one_of(
    st.tuples(st.integers(10**6, 10**9)),
    st.tuples(st.integers(1000, 60_000), st.sampled_from([768, 1000, 1024, 2048, 4096])),
)
"""Large enough to be cut at whole blocks."""


@st.composite
def large_layouts(draw: st.DrawFn) -> list[list[HeldTensor]]:
    """Replicated, or cut into shards that each several ranks hold: DDP and HSDP."""
    shards, replicas = draw(st.sampled_from([(1, 2), (1, 3), (1, 8), (2, 2), (3, 2), (2, 5)]))
    found: list[list[HeldTensor]] = [[] for _ in range(shards * replicas)]
    for n in range(draw(st.integers(1, 4))):
        shape, dtype = draw(large_shapes), draw(st.sampled_from(["float32", "bfloat16"]))
        edges = [shape[0] * i // shards for i in range(shards + 1)]
        for rank, mine in enumerate(found):
            a, b = edges[rank % shards], edges[rank % shards + 1]
            mine.append(
                held(f"t{n}", shape, Box((a, *[0] * (len(shape) - 1)), (b - a, *shape[1:])), dtype=dtype)
            )
    return found


@st.composite
def layouts(draw: st.DrawFn) -> list[list[HeldTensor]]:
    """Tensors that are cut into rows held by some ranks each, large ones among them."""
    ranks = draw(st.integers(1, 5))
    found: list[list[HeldTensor]] = [[] for _ in range(ranks)]
    for n in range(draw(st.integers(1, 5))):
        shape = (draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, SPLIT_NBYTES])))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "bool", "float64"]))
        edges = sorted({0, shape[0], *draw(st.sets(st.integers(0, shape[0]), max_size=3))})
        boxes = [Box((a, 0), (b - a, shape[1])) for a, b in itertools.pairwise(edges)]
        owners = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
        for rank in range(ranks):
            mine = [b for b, who in zip(boxes, owners, strict=True) if rank in who]
            found[rank].append(held(f"t{n}", shape, *mine, dtype=dtype))
    return found


@given(layouts())
def test_every_element_is_written_once_and_every_rank_keeps_all_it_holds(
    found: list[list[HeldTensor]],
) -> None:
    require_all_shared_out(found)


@given(large_layouts())
@example([[replicated("flat", (40_000_000,))]] * 2)
@example([[replicated(f"wte.{n}", (50_257, 768)) for n in ("exp_avg", "exp_avg_sq", "weight")]] * 2)
def test_nothing_of_large_replicas_is_nobodys(found: list[list[HeldTensor]]) -> None:
    """The last cut is none: a sliver beyond the last whole block belongs to the last rank."""
    require_all_shared_out(found)


def require_all_shared_out(found: list[list[HeldTensor]]) -> None:
    shares = assign(found)
    metas = {t.name: TensorMeta(dtype=t.dtype, shape=t.shape) for t in found[0]}
    prove_coverage(metas, (piece for s in shares for piece in s.written))
    for layout, share in zip(found, shares, strict=True):
        for tensor in layout:
            for box in tensor.boxes:
                parts = [
                    b for n, b in (*share.written, *share.kept) if n == tensor.name and intersect(b, box) == b
                ]
                assert sum(p.numel for p in parts) == box.numel
    assert assign(found) == shares


def test_a_large_replica_is_split_and_small_ones_are_dealt() -> None:
    layout = [replicated("big", (64, SPLIT_NBYTES // 16)), *[replicated(f"s{i}", (10,)) for i in range(40)]]
    shares = assign([layout] * 4)
    metas = {t.name: TensorMeta(dtype=t.dtype, shape=t.shape) for t in layout}
    load = [sum(nbytes_of(metas[n], b) for n, b in s.written) for s in shares]
    assert max(load) - min(load) <= 40
    assert all(any(n == "big" for n, _ in s.written) for s in shares)
    assert all(len(s.shared) == len(layout) for s in shares)


def test_a_tensor_without_elements_and_a_number() -> None:
    shares = assign([[held("empty", (0, 4)), replicated("n", ())]] * 2)
    assert [s.written for s in shares] == [(("n", Box((), ())),), ()]
    assert shares[1].kept == (("n", Box((), ())),)


@pytest.mark.parametrize(
    ("found", "error", "words"),
    [
        pytest.param(
            [[held("w", (4,), Box((0,), (2,)))], [held("w", (4,), Box((1,), (3,)))]],
            CoverageError,
            r"w of shape \[4\]: element \[1\] is covered 2 times, by the boxes \[0:2\], \[1:4\]",
            id="overlap",
        ),
        pytest.param(
            [[held("w", (4,), Box((0,), (2,)))], [held("w", (4,))]],
            CoverageError,
            r"element \[2\] is covered 0 times, by no box.* what the ranks hold: .* ckpt.Boxes",
            id="hole",
        ),
        pytest.param(
            [[replicated("w", (4,))], [replicated("w", (5,))]],
            StateError,
            r"w is float32\[5\] on rank 1 and float32\[4\] on rank 0",
            id="shapes differ",
        ),
        pytest.param(
            [[replicated("w", (4,))], [replicated("w", (4,), "bfloat16")]],
            StateError,
            "bfloat16",
            id="types differ",
        ),
    ],
)
def test_refused(found: list[list[HeldTensor]], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        assign(found)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([("x", Box((0,), (1,)))], "no tensor of this checkpoint"),
        ([("w", Box((0, 0), (1, 1)))], "no box of a tensor"),
        ([("w", Box((-1,), (5,)))], "no box of a tensor"),
    ],
)
def test_foreign_pieces_are_named(pieces: list[tuple[str, Box]], words: str) -> None:
    with pytest.raises(CoverageError, match=words):
        prove_coverage({"w": TensorMeta(dtype="float32", shape=(4,))}, pieces)


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.integers(1, 9)), max_size=12))
def test_pieces_lie_aligned_without_holes(tensors: list[tuple[str, int]]) -> None:
    metas = {f"t{i}": TensorMeta(dtype=d, shape=(n,)) for i, (d, n) in enumerate(tensors)}
    placed, end = place(metas, ((name, whole(m.shape)) for name, m in metas.items()), 64)
    at = 64
    for p in placed:
        assert p.at == at
        assert at % ITEMSIZES[metas[p.name].dtype] == 0
        at += nbytes_of(metas[p.name], p.box)
    assert at == end


def test_pieces_of_whole_blocks_begin_with_a_block() -> None:
    """Large pieces, cut at blocks, share none of theirs with anything else, whatever small things lie in the same object."""
    blocks = {"a": 1, "b": 3, "z": 2}
    metas = {n: TensorMeta(dtype="bfloat16", shape=(k * BLOCK_NBYTES // 2,)) for n, k in blocks.items()}
    metas |= {f"n{i}": TensorMeta(dtype="float64", shape=(i + 1,)) for i in range(9)}
    placed, _ = place(metas, ((name, whole(m.shape)) for name, m in metas.items()))
    assert [p.name for p in placed[:3]] == ["a", "b", "z"]
    assert all(p.at % BLOCK_NBYTES == 0 for p in placed[:3])


def test_the_cuts_of_a_large_replicated_tensor_lie_at_blocks() -> None:
    """4 GiB on three ranks: each part is of whole blocks, and as long as the others but for a block or so."""
    layout = [replicated("w", (2**15, 2**15))]
    parts = [box for s in assign([layout] * 3) for _, box in s.written]
    nbytes = [p.numel * 4 for p in parts]
    assert len(parts) == 3, "whole rows: one box each"
    assert all(n % BLOCK_NBYTES == 0 for n in nbytes)
    assert max(nbytes) - min(nbytes) <= 2 * BLOCK_NBYTES


def test_groups_within_groups_are_levelled_from_the_smallest_up() -> None:
    """Rank 0 alone holds 4 MB, ranks 0 and 1 another 4 MB, all four 8 MB: everybody writes 4 MB."""
    mb = (2**20,)
    layouts = [[replicated("all", (2, 2**20))] for _ in range(4)]
    layouts[0] += [replicated("one", mb), replicated("two", mb)]
    layouts[1] += [replicated("two", mb)]
    shares = assign(layouts)
    load = [sum(box.numel * 4 for _, box in s.written) for s in shares]
    assert load == [4 * 2**20] * 4
    assert [n for n, _ in shares[0].written] == ["one"]


def test_coalesce() -> None:
    assert coalesce([5, 1, 2, 3, 3, 9], count_max=2) == [(1, 3), (3, 4), (5, 6), (9, 10)]
    assert coalesce([], count_max=4) == []


def test_what_many_ranks_hold_lies_together_in_few_blocks() -> None:
    """The steps of an optimizer stand between its moments by name; a block with one of them is a block that all ranks need."""
    metas = {}
    for i in range(40):
        metas[f"{i:02}.exp_avg"] = TensorMeta(dtype="float32", shape=(1000, 301))
        metas[f"{i:02}.pages"] = TensorMeta(dtype="float32", shape=(3, 1024))
        metas[f"{i:02}.step"] = TensorMeta(dtype="float32", shape=())
    shared = {name for name in metas if name.endswith("step")}
    placed, end = place(metas, ((name, whole(m.shape)) for name, m in metas.items()), shared=shared)
    assert [p.name for p in placed[-len(shared) :]] == sorted(shared)
    assert end - placed[-len(shared)].at == 4 * len(shared)
    assert all(p.at % 4096 == 0 for p in placed if p.name.endswith("pages"))

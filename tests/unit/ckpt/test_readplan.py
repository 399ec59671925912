"""The plan of a load: every byte that is wanted is read once, by one rank, and reaches everybody who wants it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest

from surefoot.ckpt.boxes import Box, Sharding, held_boxes, intersect, slab, whole
from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.manifest import DataObject, Manifest, Piece, TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.planning.readplan import (
    NEARBY,
    Pace,
    ReadPlan,
    Segment,
    Wants,
    clip,
    plan_reads,
    require_readable,
)

BLOCK = 64


def manifest_of(tensors: dict[str, TensorMeta], objects: Sequence[Sequence[tuple[str, Box]]]) -> Manifest:
    """Objects hold boxes one after the other, as saved ones do."""
    made: list[DataObject] = []
    for number, boxes in enumerate(objects):
        at, pieces = 0, []
        for name, box in sorted(boxes, key=lambda nb: -ITEMSIZES[tensors[nb[0]].dtype]):
            pieces.append(Piece(name=name, offset=box.offset, extent=box.extent, at=at))
            at += box.numel * ITEMSIZES[tensors[name].dtype]
        made.append(
            DataObject(
                key=f"o{number}",
                size=at + 8,
                data_start=8,
                data_nbytes=at,
                block_nbytes=BLOCK,
                checksums=("x",) * -(-at // BLOCK),
                pieces=tuple(pieces),
            )
        )
    return Manifest(
        generation=1, step=1, attempt="a", world_size=len(objects), tensors=tensors, objects=tuple(made)
    )


def plans_of(manifest: Manifest, wants: Sequence[Wants], pace: Pace = NEARBY) -> list[ReadPlan]:
    told = [(1 << r, w) for r, w in enumerate(wants)]
    return [plan_reads(manifest, told, rank=r, world_size=len(wants), pace=pace) for r in range(len(wants))]


def segments_read(plans: Sequence[ReadPlan]) -> list[tuple[int, Segment]]:
    found: list[tuple[int, Segment]] = []
    for rank, plan in enumerate(plans):
        found += [(rank, s) for s in plan.private]
        found += [(rank, s) for s in itertools.chain(*plan.rounds) if s.reader == rank]
    return found


def wanted_blocks(manifest: Manifest, wants: Sequence[Wants]) -> set[tuple[int, int]]:
    """By brute force: one element at a time."""
    found: set[tuple[int, int]] = set()
    for number, o in enumerate(manifest.objects):
        for p in o.pieces:
            itemsize = ITEMSIZES[manifest.tensors[p.name].dtype]
            inner = itertools.product(*(range(a, a + e) for a, e in zip(p.offset, p.extent, strict=True)))
            for at, element in enumerate(inner):
                point = Box(element, (1,) * len(element))
                if any(intersect(b, point) for w in wants for b in w.get(p.name, ())):
                    found.add((number, (p.at + at * itemsize) // o.block_nbytes))
    return found


def sharded(shape: tuple[int, ...], dim: int, parts: int) -> list[list[Box]]:
    return [[h.box for h in held_boxes(shape, [Sharding(dim, parts, r)])] for r in range(parts)]


SHAPES = {
    "a": TensorMeta(dtype="float32", shape=(37, 11)),
    "b": TensorMeta(dtype="bfloat16", shape=(5, 7, 3)),
    "c": TensorMeta(dtype="uint8", shape=(201,)),
    "s": TensorMeta(dtype="float64", shape=()),
}


def layout(dim: int, parts: int) -> list[dict[str, list[Box]]]:
    """By rank: everything sharded along `dim`, or its last dimension where it has fewer; 0-d tensors replicated."""
    ranks: list[dict[str, list[Box]]] = [{} for _ in range(parts)]
    for name, meta in SHAPES.items():
        if not meta.shape:
            for of in ranks:
                of[name] = [whole(())]
            continue
        for of, boxes in zip(ranks, sharded(meta.shape, min(dim, len(meta.shape) - 1), parts), strict=True):
            of[name] = boxes
    return ranks


def stored(dim: int, parts: int) -> Manifest:
    ranks = layout(dim, parts)
    return manifest_of(
        SHAPES,
        [
            [(n, b) for n, boxes in of.items() for b in boxes if n != "s" or r == 0]
            for r, of in enumerate(ranks)
        ],
    )


CASES = [
    (stored(0, a), layout(d, b)) for a in (1, 2, 3) for d, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 4))
] + [(stored(1, 2), layout(0, 4)), (stored(0, 4), [dict.fromkeys(SHAPES, ()) | layout(0, 1)[0]] * 8)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_wanted_block_is_read_once_and_no_other(case: int) -> None:
    """CKP-43: for the whole job, whatever the layouts."""
    manifest, wants = CASES[case]
    plans = plans_of(manifest, wants)
    read = [(s.source, b) for _, s in segments_read(plans) for b in range(s.first, s.stop)]
    assert len(read) == len(set(read)), "a block is read twice"
    assert set(read) == wanted_blocks(manifest, wants)
    assert all(p.rounds == plans[0].rounds for p in plans), (
        "all ranks pass on the same segments in the same order"
    )


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_that_look_at_the_same_memory_divide_the_checking(case: int) -> None:
    """Every block is checked by one of those that want it; by each of them where they do not see the same."""
    manifest, wants = CASES[case]
    world = len(wants)
    everybody = (1 << world) - 1
    told = [(1 << r, w) for r, w in enumerate(wants)]
    for onlookers in ([everybody], [everybody & ~1], []):
        plans = [
            plan_reads(manifest, told, rank=r, world_size=world, neighbours=[everybody], onlookers=onlookers)
            for r in range(world)
        ]
        by: dict[tuple[int, int], list[int]] = {}
        checked: dict[tuple[int, int], list[int]] = {}
        for rank, plan in enumerate(plans):
            for block in (b for s in plan.private for b in plan.blocks(s)):
                by.setdefault((block.source, block.first), []).append(rank)
                if plan.checks(block):
                    checked.setdefault((block.source, block.first), []).append(rank)
        assert set(by) == wanted_blocks(manifest, wants)
        for block, members in by.items():
            together = any(set(members) <= {r for r in range(world) if o >> r & 1} for o in onlookers)
            assert checked[block] == members or (together and len(checked[block]) == 1)
        if onlookers == [everybody]:
            turns = [sum(checked[b] == [r] for b in by if len(by[b]) == world > 1) for r in range(world)]
            assert max(turns) - min(turns) <= 1


@pytest.mark.parametrize("case", range(len(CASES)))
def test_everything_a_rank_wants_reaches_it_exactly_once(case: int) -> None:
    manifest, wants = CASES[case]
    for rank, plan in enumerate(plans_of(manifest, wants)):
        got: dict[str, set[tuple[int, ...]]] = {}
        for s in (*plan.private, *(s for s in itertools.chain(*plan.rounds) if s.ranks >> rank & 1)):
            begin, end = plan.extent(s)
            for cut in plan.cuts(s):
                if not cut.ranks >> rank & 1:
                    continue
                assert begin <= cut.begin < cut.end <= end, "a cut lies within its segment"
                assert intersect(cut.box, cut.held) == cut.box
                for e in itertools.product(
                    *(range(o, o + n) for o, n in zip(cut.box.offset, cut.box.extent, strict=True))
                ):
                    assert e not in got.setdefault(cut.piece.name, set())
                    got[cut.piece.name].add(e)
        for name, boxes in wants[rank].items():
            assert len(got.get(name, ())) == sum(b.numel for b in boxes)


def test_equal_wants_may_be_told_together() -> None:
    manifest, wants = stored(0, 4), layout(0, 1)[0]
    together = plan_reads(manifest, [(0b1111, wants)], rank=2, world_size=4)
    apart = plan_reads(manifest, [(1 << r, wants) for r in range(4)], rank=2, world_size=4)
    assert (together.private, together.rounds) == (apart.private, apart.rounds)


def test_shared_reading_is_balanced_by_bytes() -> None:
    manifest = manifest_of(
        {
            "w": TensorMeta(dtype="uint8", shape=(BLOCK * 80,)),
            "mine": TensorMeta(dtype="uint8", shape=(BLOCK * 8,)),
        },
        [[("w", whole((BLOCK * 80,)))], [("mine", whole((BLOCK * 8,)))]],
    )
    wants: list[Wants] = [{"w": [whole((BLOCK * 80,))]} for _ in range(8)]
    wants[3] = {**wants[3], "mine": [whole((BLOCK * 8,))]}
    pace = NEARBY._replace(share_nbytes=BLOCK)
    read = [p.nbytes_read() // BLOCK for p in plans_of(manifest, wants, pace)]
    assert sum(read) == 88
    assert max(read) == 11, "what a rank reads for itself counts"
    assert min(read) == 11


@pytest.mark.parametrize("depth", [2, 4])
def test_what_is_read_ahead_has_room_of_its_own(depth: int) -> None:
    """A segment may be written while those of the `depth` - 1 rounds before it are still being taken in."""
    manifest = stored(0, 3)
    pace = NEARBY._replace(round_nbytes=5 * BLOCK, share_nbytes=2 * BLOCK, depth=depth)
    plan, *_ = plans_of(manifest, [layout(0, 1)[0]] * 3, pace)
    sizes, places = plan.places()
    assert len(plan.rounds) > 2 * depth
    for number in range(len(plan.rounds)):
        taken: dict[int, list[tuple[int, int]]] = {}
        for s in itertools.chain(*plan.rounds[number : number + depth]):
            begin, end = plan.extent(s)
            taken.setdefault(s.reader, []).append((places[s], places[s] + end - begin))
        for reader, spans in taken.items():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            assert spans[-1][1] <= sizes[reader] <= depth * 6 * BLOCK


def test_a_sharded_state_is_read_without_sharing() -> None:
    """The usual restart: the same layout again."""
    manifest, wants = stored(0, 2), layout(0, 2)
    shared = list(itertools.chain(*plans_of(manifest, wants)[0].rounds))
    assert [(s.source, s.stop - s.first) for s in shared] == [(0, 1)], (
        "the block of the 0-d tensor that both hold"
    )


@pytest.mark.parametrize("seed", range(20))
def test_clip_takes_what_lies_in_the_range(seed: int) -> None:
    rng = random.Random(seed)
    extent = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
    outer = Box(tuple(rng.randint(0, 3) for _ in extent), extent)
    inner = [sorted(rng.sample(range(o, o + e + 1), 2)) for o, e in zip(*outer, strict=True)]
    part = Box(tuple(a for a, _ in inner), tuple(b - a for a, b in inner))
    low, high = sorted(rng.randint(-2, outer.numel + 2) for _ in range(2))

    def elements(box: Box) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(o, o + e) for o, e in zip(*box, strict=True))))

    expected = [e for i, e in enumerate(elements(outer)) if low <= i < high and e in set(elements(part))]
    assert [e for box in clip(outer, part, low, high) for e in elements(box)] == expected


def test_an_eighth_of_a_tensor_takes_an_eighth_of_the_bytes() -> None:
    """CKP-10, planned: one rank of eight, alone."""
    shape = (BLOCK * 8, 16)
    manifest = manifest_of({"w": TensorMeta(dtype="float32", shape=shape)}, [[("w", whole(shape))]])
    eighth = slab(whole(shape), 0, BLOCK, 2 * BLOCK)
    plan = plan_reads(manifest, [(1, {"w": [eighth]})], rank=0, world_size=1)
    assert plan.nbytes_read() == BLOCK * 8 * 16 * 4 // 8


@pytest.mark.parametrize(
    "change",
    [
        {"checksums": ("x", "")},
        {"block_nbytes": 24},
        {"pieces": (Piece(name="w", offset=(0,), extent=(16,), at=4),)},
    ],
)
def test_what_cannot_be_read_in_blocks_is_damaged(change: dict[str, object]) -> None:
    """CKP-35: an empty checksum is none."""
    manifest = manifest_of({"w": TensorMeta(dtype="float64", shape=(16,))}, [[("w", whole((16,)))]])
    bad = msgspec.structs.replace(manifest.objects[0], **change)
    require_readable(manifest)
    with pytest.raises(DamagedError, match="o0") as e:
        require_readable(msgspec.structs.replace(manifest, objects=(bad,)))
    assert e.value.key == "o0"

"""Bytes dealt out among replicas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.ckpt.boxes import Box, stretch, whole
from surefoot.ckpt.manifest import BLOCK_NBYTES
from surefoot.ckpt.planning.dealing import SLABS_MIN, SPLIT_NBYTES, Bulk, deal, fill, unit_of

KIB = 2**10


def all_cuts(boxes: list[Bulk], given_loads: np.ndarray) -> np.ndarray:
    """Rank i gets bytes cuts[i, b] .. cuts[i + 1, b] - 1 of box b."""
    dealt = [deal(boxes, given_loads, at) for at in range(len(given_loads))]
    assert all((end == begin).all() for (_, end), (begin, _) in itertools.pairwise(dealt)), (
        "no gap, no overlap"
    )
    return np.array([dealt[0][0], *[end for _, end in dealt]])


loads = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(loads, st.integers(0, 200))
def test_filling_vessels_is_pouring_byte_by_byte(given_loads: list[int], nbytes: int) -> None:
    level = list(given_loads)
    for _ in range(nbytes):
        level[level.index(min(level))] += 1
    filled = np.array(given_loads) + fill(np.array(given_loads), nbytes)
    assert sorted(filled.tolist()) == sorted(level)
    assert filled.sum() == sum(given_loads) + nbytes


@given(loads, st.integers(0, 200), st.integers(1, 8))
def test_only_the_emptiest_get_anything(given_loads: list[int], nbytes: int, ranks: int) -> None:
    given_bytes = fill(np.array(given_loads), nbytes, ranks_max=ranks)
    assert given_bytes.sum() == nbytes
    assert np.count_nonzero(given_bytes) <= ranks


itemsizes = st.sampled_from([1, 2, 4, 8])
small_bulks = st.builds(
    Bulk, extent=st.lists(st.sampled_from([1, 2, 3, 7, 64, 1000]), max_size=3).map(tuple), itemsize=itemsizes
)
rows = st.sampled_from([768, 1000, 1024, 2048, 4096])
large_bulks = st.builds(
    Bulk,
    extent=st.one_of(
        st.tuples(st.integers(1, 10**9)),
        st.tuples(st.integers(1, 60_000), rows),
        st.tuples(st.integers(1, 64), st.integers(1, 60_000), rows),
    ),
    itemsize=itemsizes,
)
"""Up to units of whole blocks: no memory is needed to deal them out."""
bulks = st.one_of(small_bulks, large_bulks)
many_loads = st.lists(st.integers(0, 10**10), min_size=1, max_size=64) | st.integers(1, 64).map(
    lambda n: [0] * n
)


@given(
    st.lists(bulks, min_size=1, max_size=12), many_loads | loads.map(lambda ls: [n * 100 * KIB for n in ls])
)
@example([Bulk(extent=(60_000_000,), itemsize=4)], [0, 0])
@example([Bulk(extent=(50_257, 768), itemsize=4)] * 3, [0, 0])
@example([Bulk(extent=(33_000, 2048), itemsize=4)] * 2, [0, 0])
def test_every_box_is_dealt_out_once_and_evenly(boxes: list[Bulk], given_loads: list[int]) -> None:
    cuts = all_cuts(boxes, np.array(given_loads))
    nbytes = [b.nbytes for b in boxes]
    assert cuts[0].tolist() == [0] * len(boxes)
    assert cuts[-1].tolist() == nbytes
    assert (np.diff(cuts, axis=0) >= 0).all()
    for b, column in zip(boxes, cuts.T.tolist(), strict=True):
        assert all(c % b.itemsize == 0 for c in column)
        pieces = [
            stretch(whole(b.extent), a // b.itemsize, e // b.itemsize) for a, e in itertools.pairwise(column)
        ]
        assert sum(p.numel for ps in pieces for p in ps) == math.prod(b.extent)
    level = int((np.array(given_loads) + fill(np.array(given_loads), sum(nbytes))).max())
    share = sum(nbytes) // len(given_loads)
    got = np.array(given_loads) + np.diff(cuts.sum(axis=1))
    assert got.max() <= level + share // 16 + 2 * SPLIT_NBYTES + max(nbytes) * (
        max(nbytes) < 2 * SPLIT_NBYTES
    )


def test_a_large_box_goes_to_as_many_ranks_as_it_takes() -> None:
    cuts = all_cuts([Bulk(extent=(1024, 1024), itemsize=4)], np.zeros(4, np.int64))
    assert np.diff(cuts[:, 0]).tolist() == [2**20] * 4
    few = all_cuts([Bulk(extent=(256, 1024), itemsize=4)], np.zeros(1024, np.int64))
    assert np.count_nonzero(np.diff(few[:, 0])) == 2**20 // SPLIT_NBYTES, "no piece is a sliver"


def test_one_long_row_is_cut_as_well() -> None:
    """Three rows and two ranks: the middle row is divided."""
    cuts = all_cuts([Bulk(extent=(3, 2**20), itemsize=4)], np.zeros(2, np.int64))
    begin, middle, end = (c // 4 for c in cuts[:, 0].tolist())
    assert middle == 3 * 2**19
    assert stretch(Box((0, 0), (3, 2**20)), begin, middle) == [
        Box((0, 0), (1, 2**20)),
        Box((1, 0), (1, 2**19)),
    ]
    assert end == 3 * 2**20


def test_small_boxes_lie_together_in_few_slabs() -> None:
    """A thousand vectors of 4 KiB held by 512 ranks: not one object each, but neighbours in a few."""
    cuts = all_cuts([Bulk(extent=(KIB,), itemsize=4)] * 1000, np.zeros(512, np.int64))
    got = np.diff(cuts, axis=0) > 0
    writers = np.flatnonzero(got.any(axis=1))
    assert len(writers) == max(SLABS_MIN, 1000 * 4 * KIB // SPLIT_NBYTES)
    for mine in got[writers]:
        held = np.flatnonzero(mine)
        assert held.tolist() == list(range(held[0], held[-1] + 1))


@pytest.mark.parametrize(
    ("extent", "stretch_nbytes", "unit"),
    [
        ((8192, 8192), 2**30, BLOCK_NBYTES),  # 32 KiB rows: whole blocks of 128 of them
        ((8192, 8192), 2**22, 32 * KIB),
        ((8192, 8192), 2**18, 4),  # rows are too coarse for so short a stretch
        ((4, 5000), 2**30, 20_000),  # rows meet blocks only every 2.6 GB
        ((4, 5000), 2**25, 20_000),
        ((), 2**20, 4),
    ],
)
def test_where_boxes_are_cut(extent: tuple[int, ...], stretch_nbytes: int, unit: int) -> None:
    assert unit_of(Bulk(extent=extent, itemsize=4), stretch_nbytes) == unit

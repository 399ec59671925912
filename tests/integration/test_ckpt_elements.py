"""No element is lost, doubled or misplaced, and a save that would do it is refused before it is committed (section A)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_url") if request.param == "s3" else (tmp_path / "root").as_uri()


def test_rows_split_twice(ranks: Ranks, root: str) -> None:
    """CKP-01: 7 rows over 2 x 4 ranks, of which some have none."""
    rows = ranks(8, "ckpt_elements:save_grid", root)
    assert sum(rows) == 7
    assert 0 in rows
    ranks(1, "ckpt_elements:load_rows", root)
    ranks(3, "ckpt_elements:load_rows", root)


def test_boxes_that_leave_a_hole_or_overlap(ranks: Ranks, root: str) -> None:
    """CKP-01: refused on all ranks, naming the tensor and the boxes."""
    ranks(2, "ckpt_elements:save_wrong_boxes", root)


def test_a_large_replica(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-01: what does not end with a whole block is written to the end, by plain data-parallel ranks with nothing declared."""
    root = (tmp_path / "root").as_uri()
    assert ranks(2, "ckpt_elements:save_large_replica", root) == [34_000] * 2
    ranks(2, "ckpt_elements:load_large_replica", root)
    ranks(1, "ckpt_elements:load_large_replica", root)


def test_hops_over_ranks_without_rows(ranks: Ranks, root: str) -> None:
    """CKP-02, CKP-04."""
    hops = {"fsdp2tp2": 4, "tp4": 4, "fsdp8": 8, "1": 1}
    rows: dict[str, list[int]] = {}
    came_from = ""
    for layout, n in hops.items():
        rows[layout] = ranks(n, "ckpt_elements:hop", came_from, layout, f"{root}/{layout}")
        came_from = f"{root}/{layout}"
    assert {k: sum(v) for k, v in rows.items()} == dict.fromkeys(hops, 5)
    assert 0 in rows["tp4"]
    assert rows["fsdp8"].count(0) == 3


def test_flat_buffers_with_padding(ranks: Ranks, root: str) -> None:
    """CKP-03: not one byte of padding is stored, or written to by a load."""
    assert ranks(4, "ckpt_elements:save_flat", root) == [(4 * 50, 4 * 50)] * 4
    for n in (3,) if root.startswith("s3:") else (4, 3, 1, 5):
        boxes = ranks(n, "ckpt_elements:load_flat", root)
        assert max(boxes) > 1, "several to a rank"


def test_a_tensor_of_one_row(ranks: Ranks, root: str) -> None:
    """CKP-04: of 4 ranks 3 own nothing, and none of them misses anything; 4 -> 4, 4 -> 1, 1 -> 4."""
    for saved, loaded in ((4, (4, 1)), (1, (4,))):
        rows = ranks(saved, "ckpt_elements:save_one_row", f"{root}/{saved}")
        assert rows == [1] + [0] * (saved - 1)
        for n in loaded:
            assert ranks(n, "ckpt_elements:load_one_row", f"{root}/{saved}") == [1] + [0] * (n - 1)


def test_plain_tensors_that_are_shards(ranks: Ranks, root: str) -> None:
    """CKP-06, CKP-05: refused, and where the layout is declared the bytes are those of all distinct elements."""
    ranks(4, "ckpt_elements:save_plain_shards", root)


def test_the_write_of_one_rank_fails(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-07: no rank of 8 is told that the save is done. Rank 5 may write no large files any more."""
    told = ranks(8, "ckpt_elements:write_fails_on_one", (tmp_path / "root").as_uri(), True)
    require_told_of_rank_5(told, "File too large")


@pytest.mark.s3
def test_the_write_of_one_rank_fails_on_s3(ranks: Ranks, s3_proxy: Any, s3_faults: Any) -> None:
    """CKP-07: the store refuses the second object of rank 5."""
    denied = s3_faults.status(403, "AccessDenied")
    fault = s3_proxy.fault("PutObject", denied, key="step-0000000020/*/r00005")
    told = ranks(8, "ckpt_elements:write_fails_on_one", s3_proxy.root, False)
    assert fault.fired == 1
    require_told_of_rank_5(told, "AccessDenied|denied")


def require_told_of_rank_5(told: list[str], why: str) -> None:
    for rank, words in enumerate(told):
        assert re.search(why, words), told
        assert rank == 5 or "rank 5" in words, told


def test_some_of_the_ranks_save(ranks: Ranks, root: str) -> None:
    """CKP-07: a group that holds every element saves all of it; another is refused."""
    told = ranks(8, "ckpt_elements:some_of_them_save", root)
    assert [t.partition(":")[0] for t in told[::2]] == ["CoverageError"] * 4
    assert ranks(1, "ckpt_layouts:load_in", root, ["1"], {"hsdp2x2tp2": 20}) == [1]


def test_shards_that_lie_by_coordinate(ranks: Ranks, root: str) -> None:
    """CKP-08: where torch's own collectives would not find them, nothing is guessed."""
    ranks(4, "ckpt_elements:by_coordinate", root)

"""Any layout into any other: saved once in each, loaded in each from all of them, bit for bit.

The layouts and the model are those of ckpt_layouts.py, where every element is its own index.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

RANKS = {
    "1": 1,
    "dp3": 3,
    "dp4": 4,
    "dp5": 5,
    "hsdp2x2": 4,
    "tp4": 4,
    "dp2tp2": 4,
    "pp2dp2": 4,
    "pp2tp2": 4,
    "ep4": 4,
}
MORE_RANKS = {"ddp2": 2, "dp4permuted": 4, "ep5permuted": 5, "dp3tp2": 6, "hsdp2x2tp2": 8}

Ranks = Callable[..., list[Any]]


def save_all(ranks: Ranks, layouts: dict[str, int], folder: Path) -> dict[str, str]:
    """Returns the roots. Each holds the bytes of all distinct elements and not one more, whoever held how many copies."""
    (distinct,) = ranks(1, "ckpt_layouts:distinct_nbytes")
    roots = {name: (folder / name).as_uri() for name in layouts}
    for name, n in layouts.items():
        assert ranks(n, "ckpt_layouts:save", roots[name], name) == [distinct] * n
    return roots


def test_every_ordered_pair_of_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-09, CKP-08, CKP-04: parameters and optimizer state are exact, also in optimizers without state."""
    roots = save_all(ranks, RANKS, tmp_path)
    for name, n in RANKS.items():
        assert ranks(n, "ckpt_layouts:load_all", roots, name) == [len(RANKS)] * n


def test_layouts_of_rarer_kinds(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-08: DDP, meshes that list their ranks out of order, FSDP over tensor parallelism that divides nothing, HSDP over it."""
    roots = save_all(ranks, MORE_RANKS, tmp_path)
    roots |= save_all(ranks, {"1": 1}, tmp_path)
    assert ranks(1, "ckpt_layouts:load_all", roots, "1") == [len(roots)]
    for name, n in MORE_RANKS.items():
        several = {k: roots[k] for k in ("1", name)}
        assert ranks(n, "ckpt_layouts:load_all", several, name) == [len(several)] * n


@pytest.mark.soak
def test_every_ordered_pair_of_all_layouts(ranks: Ranks, tmp_path: Path) -> None:
    roots = save_all(ranks, RANKS | MORE_RANKS, tmp_path)
    for name, n in (RANKS | MORE_RANKS).items():
        assert ranks(n, "ckpt_layouts:load_all", roots, name, timeout_s=100) == [len(roots)] * n


@pytest.mark.s3
def test_layouts_on_s3(ranks: Ranks, s3_url: str) -> None:
    """CKP-09 on S3: the pair that lost keys elsewhere, both ways, and back to one process."""
    roots = {name: f"{s3_url}/{name}" for name in ("dp4", "tp4")}
    for name, root in roots.items():
        ranks(4, "ckpt_layouts:save", root, name)
    for name, n in {"dp4": 4, "tp4": 4, "1": 1}.items():
        assert ranks(n, "ckpt_layouts:load_all", roots, name) == [2] * n

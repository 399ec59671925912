"""Any layout into any other: saved once in each, loaded in each from all of them, bit for bit.

The layouts and the model are those of ckpt_layouts.py, where every element is its own index.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LAYOUTS = {
    1: ["1"],
    3: ["dp3"],
    5: ["dp5"],
    4: ["dp4", "hsdp2x2", "tp4", "dp2tp2", "pp2dp2", "pp2tp2", "ep4"],
}
"""By the number of ranks."""
RARER_LAYOUTS = {2: ["ddp2"], 4: ["dp4permuted"], 5: ["ep5permuted"]}
MORE_LAYOUTS = RARER_LAYOUTS | {6: ["dp3tp2"], 8: ["hsdp2x2tp2"]}

Ranks = Callable[..., list[Any]]


def numbered(layouts: dict[int, list[str]]) -> dict[str, int]:
    """The step under which each is saved, all in one root."""
    return {name: 10 * (k + 1) for k, name in enumerate(n for names in layouts.values() for n in names)}


def test_every_ordered_pair_of_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-09, CKP-08, CKP-04: parameters and optimizer state are exact, and nothing was stored twice."""
    root, saved = tmp_path.as_uri(), numbered(LAYOUTS)
    *fewer, most = LAYOUTS
    for n in fewer:
        ranks(n, "ckpt_layouts:save_in", root, {k: saved[k] for k in LAYOUTS[n]})
    mine = {k: saved[k] for k in LAYOUTS[most]}
    done = ranks(most, "ckpt_layouts:save_and_load_in", root, mine, saved, timeout_s=100)
    assert done == [len(mine) * len(saved)] * most
    for n in fewer:
        done = ranks(n, "ckpt_layouts:load_in", root, LAYOUTS[n], saved)
        assert done == [len(LAYOUTS[n]) * len(saved)] * n


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_layouts_of_rarer_kinds(
    ranks: Ranks, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKP-08: DDP, and meshes that list their ranks out of order."""
    root = request.getfixturevalue("s3_url") if where == "s3" else tmp_path.as_uri()
    saved = numbered({1: ["1"]} | RARER_LAYOUTS)
    ranks(1, "ckpt_layouts:save_in", root, {"1": saved["1"]})
    for n, layouts in RARER_LAYOUTS.items():
        mine = {k: saved[k] for k in layouts}
        some = mine | {"1": saved["1"]}
        assert ranks(n, "ckpt_layouts:save_and_load_in", root, mine, some) == [len(mine) * len(some)] * n
    assert ranks(1, "ckpt_layouts:load_in", root, ["1"], saved) == [len(saved)]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_ordered_pair_of_all_layouts(ranks: Ranks, tmp_path: Path) -> None:
    layouts = {n: LAYOUTS.get(n, []) + MORE_LAYOUTS.get(n, []) for n in (1, 2, 3, 4, 5, 6, 8)}
    root, saved = tmp_path.as_uri(), numbered(layouts)
    for n, names in layouts.items():
        ranks(n, "ckpt_layouts:save_in", root, {k: saved[k] for k in names}, timeout_s=100)
    for n, names in layouts.items():
        done = ranks(n, "ckpt_layouts:load_in", root, names, saved, timeout_s=200)
        assert done == [len(names) * len(saved)] * n


@pytest.mark.s3
@pytest.mark.parametrize(
    "layouts",
    [
        ["dp4", "pp2dp2"],
        pytest.param(
            ["dp4", "tp4", "dp2tp2", "pp2dp2", "pp2tp2"], marks=[pytest.mark.soak, pytest.mark.timeout(600)]
        ),
    ],
)
def test_layouts_on_s3(ranks: Ranks, s3_url: str, layouts: list[str]) -> None:
    """CKP-09, CKP-04 on S3: every ordered pair of these and a single rank."""
    saved = numbered({1: ["1"], 4: layouts})
    mine = {k: saved[k] for k in layouts}
    ranks(1, "ckpt_layouts:save_in", s3_url, {"1": saved["1"]})
    done = ranks(4, "ckpt_layouts:save_and_load_in", s3_url, mine, saved, timeout_s=300)
    assert done == [len(mine) * len(saved)] * 4
    assert ranks(1, "ckpt_layouts:load_in", s3_url, ["1"], saved) == [len(saved)]

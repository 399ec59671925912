"""Real ranks over gloo: what goes wrong on one is everybody's, and what each holds is where torch put it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]


def test_agents_ranks_save_on_4_and_load_on_3(ranks: Ranks, tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    ranks(4, "ckpt_ranks:save_as_agents_do", root)
    ranks(3, "ckpt_ranks:restore_as_agents_do", root)


def test_boxes_are_where_torch_puts_them(ranks: Ranks) -> None:
    """CKP-08."""
    ranks(4, "ckpt_ranks:check_placements")
    ranks(6, "ckpt_ranks:check_fsdp_over_tp")


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_checkpointer_on_plain_ranks(
    where: str, ranks: Ranks, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = request.getfixturevalue("s3_url") if where == "s3" else (tmp_path / "root").as_uri()
    ranks(3, "ckpt_ranks:checkpointer", root)


def test_all_ranks_fall_back_to_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, "ckpt_ranks:fall_back_together", (tmp_path / "root").as_uri())


def test_a_failure_on_one_rank_is_everybodys_and_the_next_save_works(ranks: Ranks, tmp_path: Path) -> None:
    """CKP-07, CKP-05."""
    ranks(2, "ckpt_ranks:failures", (tmp_path / "root").as_uri())

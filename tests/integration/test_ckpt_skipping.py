"""Loads of a part, by real ranks over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]


def test_another_head_at_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """The body's weights and moments come along, the head and its state stay as they are."""
    root = (tmp_path / "root").as_uri()
    body = ranks(2, "ckpt_skipping:save", root)[0]
    for n in (2, 1, 3):
        assert ranks(n, "ckpt_skipping:load_with_another_head", root) == [body] * n


def test_a_lenient_load_that_finds_nothing(ranks: Ranks, tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    ranks(2, "ckpt_skipping:save", root)
    ranks(2, "ckpt_skipping:find_nothing", root)

"""`Checkpointer` on a store that creates only without conditions: ranks and their uploaders do without, alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surefoot.ckpt.record import list_manifests
from surefoot.ckpt.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(120)]


def test_ranks_save_on_a_store_without_conditions(
    ranks: Any, s3_url: str, knows_no_conditions: Callable[[], list[str]]
) -> None:
    """Rank 0 finds it out; what data objects, parts and manifest are created by is other processes, on other ranks too."""
    ranks(2, "loading_acts:save", s3_url, "fsdp", 20, 40)
    assert [m.step for m in list_manifests(open_store(s3_url))] == [20, 40]
    assert ranks(2, "loading_acts:load_plainly", s3_url, "tp") == [40, 40]
    created = [key.rpartition("/")[2] for key in knows_no_conditions()]
    assert created.count("manifest.json") == 2
    assert {"0001.json", "r00000-0.safetensors", "r00001-0.safetensors"} <= set(created)

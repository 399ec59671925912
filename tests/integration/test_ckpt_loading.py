"""Loads by several ranks: what is read, how it is shared, and how they fall back together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.ckpt.inspect import find
from surefoot.ckpt.store import ObjectStore, open_store

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def data_read(told: list[dict[str, Any]], store: ObjectStore, step: int = 20) -> tuple[int, int]:
    """Bytes of data objects read by all ranks together, and how many there are."""
    manifest, _ = find(store, step)
    total = sum((Counter(t["read"]) for t in told), Counter())
    return sum(total[o.key] for o in manifest.objects), sum(o.data_nbytes for o in manifest.objects)


@pytest.mark.parametrize(
    ("saved", "by", "loaded", "on"),
    [
        ("ddp", 1, "ddp", 8),
        ("fsdp", 2, "fsdp", 2),
        ("fsdp", 4, "fsdp", 3),
        ("fsdp", 2, "tp", 4),
        ("tp", 2, "hsdp", 4),
        ("ddp", 2, "fsdp", 4),
    ],
)
def test_every_byte_is_read_once_per_job(
    ranks: Ranks, root: str, saved: str, by: int, loaded: str, on: int
) -> None:
    """CKP-43 (8 data-parallel ranks), and its siblings: whatever the layouts, and float8 as well."""
    ranks(by, "loading_acts:save", root, saved, 20)
    told = ranks(on, "loading_acts:load", root, loaded)
    assert [t["error"] for t in told] == [""] * on
    read, stored = data_read(told, open_store(root))
    assert read == stored
    manifests = [sum(n for key, n in t["read"].items() if key.endswith("manifest.json")) for t in told]
    assert manifests[1:] == [0] * (on - 1), "rank 0 reads the manifest for all"
    if on == 8:
        by_rank = [sum(n for key, n in t["read"].items() if key.endswith(".safetensors")) for t in told]
        assert max(by_rank) < stored, "the reading is divided"

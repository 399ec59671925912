"""A job is started hundreds of times and keeps thousands of checkpoints: what a commit costs must not grow with that."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.keeping.cleaning import sweep_orphans
from surefoot.ckpt.keeping.retention import Retention
from surefoot.ckpt.manifest import Manifest, encode, manifest_key, object_key
from surefoot.ckpt.record import Record, StartRef, create_record, read_records
from surefoot.ckpt.saving import flight
from surefoot.ckpt.saving.uploader import tidy
from surefoot.ckpt.store import (
    READERS,
    MemoryObjectStore,
    ObjectInfo,
    ObjectStoreUnavailableError,
    Unfinished,
    each_of,
)


class CountingStore(MemoryObjectStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.asked["read a record" if key.startswith("generations/") else "read"] += 1
        return super().read(key, start, length)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self.asked["list"] += 1
        return super().list(prefix)

    def unfinished(self, prefix: str) -> list[Unfinished]:
        self.asked["unfinished"] += 1
        return super().unfinished(prefix)


def history(starts: int) -> CountingStore:
    """So many starts, each with one checkpoint."""
    store = CountingStore()
    for g in range(1, starts + 1):
        start = StartRef(generation=g - 1, step=g - 1)
        create_record(store, Record(generation=g, start=start, reason="start", created_by=f"t{g}"))
        store.create(object_key(g, g, "a", 0), b"data")
        store.create(manifest_key(g, g), encode(Manifest(generation=g, step=g, attempt="a", world_size=1)))
    return store


def test_records_are_read_once_by_whoever_asks_after_each_commit() -> None:
    store, known = history(50), dict[int, Record]()
    for _ in range(3):
        tidy(store, Retention(newest=1000), 50, sweep=False, known=known)
    assert store.asked["read a record"] == 50
    assert read_records(store, known) == read_records(store)


def test_a_record_that_was_deleted_is_known_no_longer() -> None:
    store, known = history(3), dict[int, Record]()
    read_records(store, known)
    store.delete("generations/0002.json")
    assert sorted(read_records(store, known)) == [1, 3]


def test_what_a_sweep_asks_does_not_grow_with_the_past() -> None:
    asked: list[Counter[str]] = []
    for starts in (3, 60):
        store = history(starts)
        store.create(object_key(1, 1, "dead", 0), b"data")
        store.upload(object_key(2, 2, "dead", 0), 5, deadline_s=5)
        assert [o.attempt.attempt for o in sweep_orphans(store)] == ["dead"]
        assert store.unfinished("") == []
        asked.append(store.asked)
    assert asked[0] == asked[1]


def test_many_small_reads_go_some_at_a_time() -> None:
    together = threading.Barrier(READERS)

    def act(i: int) -> int:
        together.wait(30)  # broken, if they came one after the other
        return -i

    assert each_of(act, range(4 * READERS)) == [-i for i in range(4 * READERS)]
    assert each_of(lambda i: -i, range(3)) == [0, -1, -2]
    assert each_of(act, []) == []


def test_the_first_small_read_that_fails_is_the_error() -> None:
    def act(i: int) -> None:
        if i in (7, 30):
            raise ObjectStoreUnavailableError(str(i))

    with pytest.raises(ObjectStoreUnavailableError, match=r"^7$"):
        each_of(act, range(4 * READERS))


def test_nobody_waits_for_deletions_after_a_blocking_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come once for each commit, when the save's outcome is known."""
    tidied: list[bool] = []

    def watched(*args: Any, **named: Any) -> None:
        assert c._latest is not None
        tidied.append(c._latest.done())
        tidy(*args, **named)

    monkeypatch.setattr(flight, "tidy", watched)
    with ckpt.Checkpointer(tmp_path, keep=2) as c:
        for step in (1, 2, 3):
            c.save(step, {"w": torch.ones(3)}, blocking=True)
    assert tidied == [True] * 3
    assert ckpt.steps(tmp_path) == [2, 3]

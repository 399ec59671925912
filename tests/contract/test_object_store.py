"""One suite on every `ObjectStore`: the model in memory, files, and a real S3 server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStore,
    open_store,
)


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "memory":
            return MemoryObjectStore()
        case "file":
            return open_store((tmp_path / "root").as_uri())
        case _:
            return open_store(request.getfixturevalue("s3_url"))


def test_what_was_created_is_read(store: ObjectStore) -> None:
    store.create("a/b/c.bin", b"0123456789")
    assert store.read("a/b/c.bin") == b"0123456789"
    store.create("a/view", memoryview(b"0123456789")[2:5])
    assert store.read("a/view") == b"234"


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 3, b"012"),
        (3, None, b"3456789"),
        (3, 2, b"34"),
        (8, 99, b"89"),
        (10, None, b""),
        (99, 5, b""),
        (4, 0, b""),
    ],
)
def test_ranges(store: ObjectStore, start: int, length: int | None, expected: bytes) -> None:
    store.create("k", b"0123456789")
    assert store.read("k", start, length) == expected


def test_empty_object(store: ObjectStore) -> None:
    store.create("empty", b"")
    assert store.read("empty") == b""
    assert store.list("") == [ObjectInfo("empty", 0)]


def test_creation_never_overwrites(store: ObjectStore) -> None:
    store.create("k", b"first")
    for data in (b"second", b"first", b""):
        with pytest.raises(ObjectExistsError, match="k"):
            store.create("k", data)
    assert store.read("k") == b"first"


def test_missing_object(store: ObjectStore) -> None:
    store.create("there", b"x")
    with pytest.raises(ObjectMissingError, match="not/there"):
        store.read("not/there")
    store.delete("not/there")


def test_delete_then_create(store: ObjectStore) -> None:
    store.create("d/k", b"1")
    store.delete("d/k")
    with pytest.raises(ObjectMissingError):
        store.read("d/k")
    assert store.list("d/") == []
    store.create("d/k", b"2")
    assert store.read("d/k") == b"2"


def test_list_is_deep_sorted_and_by_prefix(store: ObjectStore) -> None:
    for key in ("gen-2/b", "gen-10/a", "gen-2/a/z", "other", "gen-2/a-", "gen-2/B"):
        store.create(key, key.encode())
    assert [o.key for o in store.list("gen-")] == ["gen-10/a", "gen-2/B", "gen-2/a-", "gen-2/a/z", "gen-2/b"]
    assert [o.key for o in store.list("gen-2/a/")] == ["gen-2/a/z"]
    assert store.list("nothing/") == []
    assert {o.key: o.size for o in store.list("")}["gen-10/a"] == 8


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", "a/./b", "", "a/", "a/.tmp-1"])
def test_keys_that_could_leave_the_root_are_refused(store: ObjectStore, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.create(key, b""),
        lambda: store.read(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="object key"):
            call()


def test_of_sixteen_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    # SeaweedFS makes racing clients wait for whole seconds now and then.
    for round_number in range(1 if store.root.startswith("s3") else 5):
        key, outcomes = f"race/{round_number}", race(store, f"race/{round_number}", 16)
        winners = [i for i, won in enumerate(outcomes) if won]
        assert len(winners) == 1
        assert store.read(key) == f"creator {winners[0]}".encode()


def race(store: ObjectStore, key: str, n: int) -> list[bool]:
    """n threads create the key at once; who won?"""
    barrier, won = threading.Barrier(n), [False] * n

    def create(i: int) -> None:
        barrier.wait()
        try:
            store.create(key, f"creator {i}".encode())
        except ObjectExistsError:
            return
        won[i] = True

    threads = [threading.Thread(target=create, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return won


def test_root_is_a_url_without_a_slash_at_its_end(store: ObjectStore) -> None:
    assert "://" in store.root
    assert not store.root.removesuffix("://").endswith("/")

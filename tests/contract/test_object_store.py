"""One suite on every `ObjectStore`: the model in memory, files, and a real S3 server."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.ckpt.objects.probe import Exclusion, ensure_exclusive, probe_conditional
from surefoot.ckpt.objects.s3 import S3ObjectStore
from surefoot.ckpt.objects.s3session import Session
from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreError,
    Upload,
    open_store,
)

SHARED = Session()
"""To make an S3 client takes longer than most tests."""


@pytest.fixture
def memory_fs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(
    params=["memory", "file", "tmpfs", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "memory":
            return MemoryObjectStore()
        case "file":
            return open_store((tmp_path / "root").as_uri())
        case "tmpfs":
            return open_store((request.getfixturevalue("memory_fs") / "root").as_uri())
        case _:
            bucket, _, prefix = request.getfixturevalue("s3_url").removeprefix("s3://").partition("/")
            return S3ObjectStore(bucket, prefix, deadline_s=30.0, part_nbytes=5 * 2**20, session=SHARED)


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


def test_a_listing_says_when_an_object_was_created(store: ObjectStore) -> None:
    begun = time.time()
    store.create("d/k", b"x")
    (listed,) = store.list("d/")
    # A store may count in whole seconds, and has a clock of its own.
    assert begun - 60 < listed.modified_at < time.time() + 60


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


def test_the_probe_finds_conditional_creation(store: ObjectStore) -> None:
    """Told typed, and nothing is left."""
    assert probe_conditional(store).exclusion is Exclusion.KEPT
    assert ensure_exclusive(store).exclusive
    assert store.list("") == []


# ---------------------------------------------------------------- read_into


@pytest.mark.parametrize(
    ("start", "sizes", "expected", "count"),
    [
        (0, (3,), b"012", 3),
        (2, (1, 0, 4), b"23456", 5),
        (7, (2, 5), b"789", 3),
        (10, (4,), b"", 0),
        (99, (1, 2), b"", 0),
        (0, (), b"", 0),
    ],
)
def test_read_into_fills_the_views_in_order(
    store: ObjectStore, start: int, sizes: tuple[int, ...], expected: bytes, count: int
) -> None:
    store.create("k", b"0123456789")
    buffers = [bytearray(b"-" * n) for n in sizes]
    assert store.read_into("k", start, [memoryview(b) for b in buffers]) == count
    assert b"".join(buffers)[:count] == expected
    assert set(b"".join(buffers)[count:]) <= set(b"-")


def test_read_into_of_a_missing_object(store: ObjectStore) -> None:
    store.create("k", b"x")
    buffer = bytearray(1)
    assert store.read_into("k", 0, [memoryview(buffer)]) == 1
    store.delete("k")
    with pytest.raises(ObjectMissingError, match="k"):
        store.read_into("k", 0, [memoryview(buffer)])
    with pytest.raises(ObjectMissingError, match="other"):
        store.read_into("other", 0, [memoryview(buffer)])


def test_what_can_be_looked_at_is_what_would_be_read(store: ObjectStore) -> None:
    store.create("k", b"0123456789")
    assert store.sight() == store.sight()
    for start, nbytes in ((0, 10), (2, 5), (10, 0)):
        found = store.look("k", start, nbytes)
        assert (found is None) == (not store.sight())
        assert found is None or bytes(found) == b"0123456789"[start : start + nbytes]
    assert store.look("k", 3, 8) is None, "the object ends before"
    assert store.look("k", -1, 2) is None
    assert store.look("other", 0, 1) is None
    store.release()


# ---------------------------------------------------------------- upload


@pytest.mark.parametrize("nbytes", [0, 1000, 12 * 2**20 + 5])
def test_an_upload_is_there_when_it_is_finished_and_not_before(store: ObjectStore, nbytes: int) -> None:
    """With parts of 5 MiB the last one is several of them, put in pieces that fit none."""
    data = bytes(range(251)) * (nbytes // 251 + 1)
    view = memoryview(data)[:nbytes]
    upload = store.upload("d/k", nbytes, deadline_s=60.0)
    for at in range(0, nbytes, 7 * 2**20 + 3):
        upload.put(view[at : at + 7 * 2**20 + 3])
    assert store.list("") == []
    upload.finish()
    upload.abort()
    assert store.list("") == [ObjectInfo("d/k", nbytes)]
    assert store.read("d/k") == view
    assert store.unfinished("") == []


def test_after_draining_the_buffers_may_change(store: ObjectStore) -> None:
    buffer = bytearray(b"a" * (6 * 2**20))
    upload = store.upload("k", 4 * len(buffer), deadline_s=60.0)
    for letter in b"abcd":
        buffer[:] = bytes([letter]) * len(buffer)
        upload.put(memoryview(buffer))
        upload.drain()
    buffer[:] = bytes(len(buffer))
    upload.finish()
    data = store.read("k")
    assert [data.count(letter) for letter in b"abcd"] == [len(buffer)] * 4
    assert data[: len(buffer)].count(b"a") == len(buffer)


@pytest.mark.parametrize("nbytes", [10, 11 * 2**20])
def test_an_upload_never_overwrites(store: ObjectStore, nbytes: int) -> None:
    store.create("k", b"first")
    upload = store.upload("k", nbytes, deadline_s=60.0)
    with pytest.raises(ObjectExistsError, match="k"):
        finish_with(upload, bytes(nbytes))
    upload.abort()
    assert store.read("k") == b"first"
    assert store.unfinished("") == []


@pytest.mark.parametrize("nbytes", [10, 11 * 2**20])
def test_an_aborted_upload_leaves_nothing(store: ObjectStore, nbytes: int) -> None:
    upload = store.upload("d/k", nbytes, deadline_s=60.0)
    upload.put(memoryview(bytes(nbytes)))
    upload.abort()
    upload.abort()
    assert store.list("") == []
    assert store.unfinished("") == []


@pytest.mark.parametrize("put", [9, 11])
def test_an_upload_of_another_size_than_announced_is_the_callers_mistake(
    store: ObjectStore, put: int
) -> None:
    upload = store.upload("k", 10, deadline_s=60.0)
    with pytest.raises(ValueError, match=f"{put} bytes"):
        finish_with(upload, bytes(put))
    upload.abort()
    assert store.list("") == []


def test_unfinished_uploads_are_found_by_prefix_and_discarded(store: ObjectStore) -> None:
    for key in ("a/1", "a/b/2", "c/3"):
        store.create(f"{key}.done", b"x")
    going = [store.upload(key, 11 * 2**20, deadline_s=60.0) for key in ("a/1", "a/b/2", "c/3")]
    for upload in going:
        upload.put(memoryview(bytes(6 * 2**20)))
    found = store.unfinished("a/")
    assert [u.key for u in found] == ["a/1", "a/b/2"]
    assert all(abs(u.begun_at - time.time()) < 60 for u in found)
    for u in found:
        store.discard(u)
        store.discard(u)
    assert [u.key for u in store.unfinished("")] == ["c/3"]
    with pytest.raises(ObjectStoreError, match="a/1"):
        finish_with(going[0], bytes(5 * 2**20))
    finish_with(going[2], bytes(5 * 2**20))
    assert [o.key for o in store.list("")] == ["a/1.done", "a/b/2.done", "c/3", "c/3.done"]
    for upload in going:
        upload.abort()


def finish_with(upload: Upload, data: bytes) -> None:
    upload.put(memoryview(data))
    upload.finish()

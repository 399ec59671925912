"""What is particular to files: temporaries, folders, and what stands in the way."""

from __future__ import annotations

import errno
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from surefoot import failpoint
from surefoot.ckpt.objects.files import OPEN_READERS, FileObjectStore
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    Unfinished,
    open_store,
)


@pytest.fixture
def store(tmp_path: Path) -> FileObjectStore:
    return FileObjectStore(tmp_path / "root")


def test_a_creation_that_dies_leaves_only_a_temporary(store: FileObjectStore, tmp_path: Path) -> None:
    failpoint.arm(failpoint.parse("store.before_link=error"))
    try:
        with pytest.raises(failpoint.FailpointError):
            store.create("a/k", b"data")
    finally:
        failpoint.arm(None)
    assert store.list("") == []
    store.create("a/k", b"data")


def test_leftover_temporaries_are_never_listed_nor_read(store: FileObjectStore, tmp_path: Path) -> None:
    store.create("a/k", b"data")
    (tmp_path / "root" / "a" / ".tmp-123-abc").write_bytes(b"half")
    assert [o.key for o in store.list("")] == ["a/k"]
    with pytest.raises(ValueError, match="object key"):
        store.read("a/.tmp-123-abc")


@pytest.fixture
def in_memory() -> Iterator[FileObjectStore]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield FileObjectStore(Path(folder) / "root")


def test_whoever_looks_at_an_object_cannot_change_it(in_memory: FileObjectStore) -> None:
    in_memory.create("k", b"0123456789")
    found = in_memory.look("k", 4, 3)
    assert found is not None
    found[:] = b"---"
    assert in_memory.read("k") == b"0123456789"


def test_of_an_object_that_was_emptied_nothing_is_seen(in_memory: FileObjectStore) -> None:
    """Whoever reads it says what is missing."""
    in_memory.create("k", b"0")
    (Path(unquote(urlsplit(in_memory.root).path)) / "k").write_bytes(b"")
    assert in_memory.look("k", 0, 1) is None
    assert in_memory.read_into("k", 0, [memoryview(bytearray(1))]) == 0


def test_what_is_looked_at_outlives_its_deletion(in_memory: FileObjectStore) -> None:
    in_memory.create("k", b"0123456789")
    found = in_memory.look("k", 4, 3)
    in_memory.delete("k")
    in_memory.release()
    assert found is not None
    assert bytes(found) == b"456"
    assert in_memory.look("k", 4, 3) is None


def test_a_file_that_was_cut_short_is_no_bus_error(in_memory: FileObjectStore) -> None:
    """Somebody cuts it after it was opened: touching what is no longer there would kill this process."""
    in_memory.create("k", bytes(3 * 2**20))
    assert in_memory.look("k", 0, 2**20) is not None
    os.truncate(Path(unquote(urlsplit(in_memory.root).path), "k"), 2**20)
    assert in_memory.look("k", 2 * 2**20, 2**20) is None
    assert in_memory.read_into("k", 2 * 2**20, [memoryview(bytearray(2**20))]) == 0


def test_no_temporary_is_left(store: FileObjectStore, tmp_path: Path) -> None:
    store.create("a/k", b"1")
    with pytest.raises(ObjectExistsError):
        store.create("a/k", b"2")
    assert os.listdir(tmp_path / "root" / "a") == ["k"]


def test_empty_folders_go_with_their_last_object(store: FileObjectStore, tmp_path: Path) -> None:
    store.create("a/b/k", b"1")
    store.create("a/l", b"1")
    store.delete("a/b/k")
    assert os.listdir(tmp_path / "root" / "a") == ["l"]
    store.delete("a/l")
    assert (tmp_path / "root").is_dir()
    assert os.listdir(tmp_path / "root") == []


def test_a_file_where_a_folder_should_stand(store: FileObjectStore) -> None:
    store.create("a", b"1")
    with pytest.raises(ObjectStoreDeniedError, match="file stands where a folder should"):
        store.create("a/k", b"2")
    with pytest.raises(ObjectStoreDeniedError):
        store.read("a/k")


def test_a_folder_where_an_object_should_stand(store: FileObjectStore) -> None:
    store.create("a/k", b"1")
    with pytest.raises(ObjectExistsError):
        store.create("a", b"2")
    with pytest.raises(ObjectStoreDeniedError):
        store.read("a")


def test_a_read_only_file_system() -> None:
    with pytest.raises((ObjectStoreDeniedError, ObjectStoreUnavailableError), match="proc"):
        FileObjectStore(Path("/proc/surefoot")).create("k", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch, store: FileObjectStore) -> None:
    real_open = os.open

    def open_full(path: object, flags: int, *mode: int, **more: int) -> int:
        full = ".tmp-" in str(path) and flags & os.O_CREAT
        return real_open("/dev/full", os.O_WRONLY) if full else real_open(path, flags, *mode, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "open", open_full)
    with pytest.raises(ObjectStoreUnavailableError, match="free some space"):
        store.create("k", b"x" * 100)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_memory_is_not_claimed_before_it_is_written(tmp_path: Path) -> None:
    """On a tmpfs that only costs time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        upload = FileObjectStore(Path(folder) / "root").upload("a/k", 2**21, deadline_s=1.0)
        (temporary,) = (Path(folder) / "root" / "a").iterdir()
        assert temporary.stat().st_blocks == 0
        upload.abort()


def test_a_file_size_limit_says_so(store: FileObjectStore, tmp_path: Path) -> None:
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, was[1]))
    try:
        with pytest.raises(ObjectStoreDeniedError, match="ulimit -f"):
            store.create("a/k", bytes(2**21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert store.unfinished("") == []


def test_a_writer_whose_temporary_was_discarded_learns_it(store: FileObjectStore) -> None:
    upload = store.upload("a/k", 4, deadline_s=1.0)
    for left in store.unfinished("a/"):
        store.discard(left)
    upload.put(memoryview(b"data"))
    with pytest.raises(ObjectStoreError, match=r"a/k: its temporary .* taken for dead"):
        upload.finish()
    upload.abort()
    assert store.list("") == store.unfinished("") == []


def test_only_temporaries_are_discarded(store: FileObjectStore) -> None:
    store.create("a/k", b"data")
    for token in ("a/k", "../.tmp-x", "k"):
        with pytest.raises(ValueError, match="is no"):
            store.discard(Unfinished(key="a/k", token=token, begun_at=0.0))
    assert store.read("a/k") == b"data"


def test_descriptors_of_a_reader_are_few_and_know_what_was_deleted(
    store: FileObjectStore, tmp_path: Path
) -> None:
    found = bytearray(3)
    for i in range(3 * OPEN_READERS):
        store.create(f"a/{i}", b"%03d" % i)
        assert store.read_into(f"a/{i}", 0, [memoryview(found)]) == 3
        assert found == b"%03d" % i
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if still_open(fd)]
    assert sum(str(tmp_path) in path for path in held) == OPEN_READERS
    newest = f"a/{3 * OPEN_READERS - 1}"
    (tmp_path / "root" / newest).unlink()
    with pytest.raises(ObjectMissingError):
        store.read_into(newest, 0, [memoryview(found)])
    store.release()
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if still_open(fd)]
    assert not any(str(tmp_path) in path for path in held)


def still_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_links_are_followed_but_for_those_that_lead_nowhere_or_in_a_circle(
    store: FileObjectStore, tmp_path: Path
) -> None:
    store.create("gen-0001/k", b"data")
    elsewhere = tmp_path / "another-disk"
    elsewhere.mkdir()
    (elsewhere / "moved").write_bytes(b"moved")
    here = tmp_path / "root" / "gen-0001"
    for name, target in (
        *(("itself", "itself"), ("gone", "nowhere"), ("up", "..")),
        *(("one", "two"), ("two", "one"), ("disk", elsewhere)),
    ):
        (here / name).symlink_to(target)
    assert [o.key for o in store.list("")] == ["gen-0001/disk/moved", "gen-0001/k"]
    assert store.unfinished("") == []


def test_a_missing_root_is_empty(store: FileObjectStore) -> None:
    assert store.list("") == []
    store.delete("k")
    with pytest.raises(ObjectMissingError):
        store.read("k")


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "", "file://otherhost/x", "http://x"])
def test_urls_that_are_no_roots(url: str) -> None:
    with pytest.raises(ValueError, match="is no root"):
        open_store(url)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("data/gpt").root == f"file://{tmp_path}/data/gpt"
    assert open_store(f"file://{tmp_path}/a%20b").root == f"file://{tmp_path}/a%20b"
    assert open_store(str(tmp_path)).root == f"file://{tmp_path}"
    assert open_store("s3://bucket/a/b/").root == "s3://bucket/a/b"
    assert open_store("s3://bucket").root == "s3://bucket"


@pytest.mark.parametrize(
    ("what", "number", "said"),
    [
        ("list", errno.EACCES, "give this user read permission to /data/gen-0001, or"),
        ("read", errno.EACCES, "give this user read permission to /data/gen-0001, or"),
        ("create", errno.EACCES, "give this user read and write permission to /data/gen-0001, or"),
        ("create", errno.ENOSPC, "it needs room for N + 1 checkpoints"),
    ],
)
def test_what_stands_in_the_way_is_said_with_what_to_do(
    store: FileObjectStore, what: str, number: int, said: str
) -> None:
    with pytest.raises(ObjectStoreError, match=re.escape(said)), store.mapped(what, "gen-"):
        raise OSError(number, os.strerror(number), "/data/gen-0001")

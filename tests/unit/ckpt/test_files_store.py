"""What is particular to files: temporaries, folders, and what stands in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot import failpoint
from surefoot.ckpt.files import FileObjectStore
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreUnavailableError,
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

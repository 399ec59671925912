"""The object store on a file system. Conditional creation is link(2).

An object is written to a temporary beside its place, fsynced, `link`ed to its name and the directory fsynced: a name is
either absent or leads to all the bytes, also after a kill or a power cut, and of any number of racing creators exactly one
succeeds. (O_EXCL would leave a torn object after a kill; rename would overwrite.)
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.ckpt.store import (
    TEMPORARY_PREFIX,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    check_key,
)
from surefoot.failpoint import failpoint

_TRIES = 5
"""Deleting removes folders that became empty, and may take one away between its making and its first file."""


class FileObjectStore:
    """See the module and `ObjectStore`. `folder` is made by the first creation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def root(self) -> str:
        return self._folder.as_uri()

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        path = self._path(key)
        with self._mapped("create", key):
            for _ in range(_TRIES - 1):
                try:
                    return _create(path, data)
                except FileNotFoundError:
                    continue  # the folder went away: see _TRIES
            return _create(path, data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._mapped("read", key), open(self._path(key), "rb") as f:
            f.seek(start)
            return f.read(-1 if length is None else length)

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        with self._mapped("list", prefix):
            found = _walk(os.path.join(self._folder, folder), folder + "/" if folder else "")
            return sorted((o for o in found if o.key.startswith(prefix)), key=lambda o: o.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._mapped("delete", key):
            try:
                path.unlink()
                _fsync_folder(path.parent)
            except FileNotFoundError:
                return
        for folder in path.parents:
            if folder == self._folder:
                break
            try:
                folder.rmdir()
            except OSError:
                break  # it is not empty, or somebody else was faster

    def _path(self, key: str) -> Path:
        return self._folder / check_key(key)

    @contextmanager
    def _mapped(self, what: str, key: str) -> Iterator[None]:
        """Turn an OSError into the typed error that says what to do."""
        try:
            yield
        except OSError as e:
            raise _typed(
                e, f"{self.root}: cannot {what} {key}: {e.strerror or e}", creates=what == "create"
            ) from e


def _typed(e: OSError, said: str, *, creates: bool) -> ObjectStoreError:
    match e.errno:
        case errno.ENOENT if creates:
            return ObjectStoreDeniedError(f"{said}; no folder can be made there: choose another root")
        case errno.EEXIST:
            return ObjectExistsError(said)
        case errno.ENOENT:
            return ObjectMissingError(said)
        case errno.EACCES | errno.EROFS:
            return ObjectStoreDeniedError(
                f"{said}; give this user read and write permission, or choose another root"
            )
        case errno.EPERM | errno.EOPNOTSUPP | errno.EMLINK | errno.EXDEV:
            return ObjectStoreDeniedError(f"{said}; the file system has no hard links: choose another root")
        case errno.ENOTDIR | errno.EISDIR | errno.ENAMETOOLONG:
            return ObjectStoreDeniedError(
                f"{said}; a file stands where a folder should, or the reverse: choose another root"
            )
        case errno.ENOSPC | errno.EDQUOT:
            return ObjectStoreUnavailableError(f"{said}; free some space (retention: keep=)")
        case _:
            return ObjectStoreUnavailableError(said)


def _create(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Raises FileExistsError, or FileNotFoundError where the folder was taken away meanwhile."""
    _make_folder(path.parent)
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(fd, data)
        os.fsync(fd)
        failpoint("store.before_link")
        os.link(temporary, path)
        failpoint("store.after_link")
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)
    _fsync_folder(path.parent)


def _write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _make_folder(folder: Path) -> None:
    """Like mkdir -p, and every new name is durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        return
    _fsync_folder(folder.parent)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _walk(folder: str, prefix: str) -> Iterator[ObjectInfo]:
    """All finished objects below; what vanishes while we look was being deleted, and is passed over."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield ObjectInfo(prefix + entry.name, entry.stat().st_size)
        except FileNotFoundError:
            continue

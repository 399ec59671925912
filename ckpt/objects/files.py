"""The object store on a file system. Conditional creation is link(2).

An object is written to a temporary beside its place, fsynced, `link`ed to its name and the directory fsynced: a name is
either absent or leads to all the bytes, also after a kill or a power cut, and of any number of racing creators exactly one
succeeds. (O_EXCL would leave a torn object after a kill; rename would overwrite.)
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from surefoot.ckpt.objects.linuxfiles import (
    fsync_folder,
    make_folder,
    preallocate,
    room_on_tmpfs,
    start_flushing,
    walk,
)
from surefoot.ckpt.store import (
    TEMPORARY_PREFIX,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    Unfinished,
    check_key,
    require_size,
)
from surefoot.failpoint import failpoint

FLUSH_NBYTES = 16 * 2**20
"""So often a long write is pushed on to the disk."""
OPEN_READERS = 16
"""How many descriptors a store keeps for `read_into`: a load reads few objects at a time, each in many steps."""
NAME_MAX, IOV_MAX = 255, 1024
"""Linux' limits: bytes of a file's name, buffers of one preadv."""
_TRIES = 5
"""Deleting removes folders that became empty, and may take one away between its making and its first file."""


class FileObjectStore:
    """See the module and `ObjectStore`. `folder` is made by the first creation."""

    nearby = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._folder.as_uri()

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        upload = self.upload(key, memoryview(data).nbytes, deadline_s=0.0)
        try:
            upload.put(memoryview(data))
            upload.finish()
        finally:
            upload.abort()

    def upload(self, key: str, size: int, *, deadline_s: float) -> FileUpload:
        """No deadline is kept: the kernel gives a process no way out of a file system that hangs."""
        path = self._path(key)
        with self.mapped("create", key):
            return FileUpload(self, key, path, size)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self.mapped("read", key), open(self._path(key), "rb") as f:
            f.seek(start)
            return f.read(-1 if length is None else length)

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        try:
            return _read_into(self._reader(key).fd, start, views)
        except OSError as e:
            raise self._error(e, "read", key) from e

    def sight(self) -> str:
        """Of a tmpfs its number, and the root's in it."""
        try:
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            here = os.fstat(fd)
            return f"{here.st_dev}:{here.st_ino}" if room_on_tmpfs(fd) is not None else ""
        finally:
            os.close(fd)

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        """Of what lies in a tmpfs. Files on a disk are read: of a mapped one, a disk that fails kills whoever touches it (SIGBUS).

        So does whoever cuts an object off in place while its bytes are touched (``cp`` over it). Nobody does who keeps to the contract:
        objects are created once, and deleted.
        """
        try:
            return self._reader(key).look(start, nbytes)
        except (OSError, ValueError):  # of an empty file there is no mapping
            return None

    def release(self) -> None:
        with self._lock:
            self._readers.clear()

    def list(self, prefix: str) -> list[ObjectInfo]:
        found = [
            ObjectInfo(folder + name, status.st_size, status.st_mtime)
            for folder, name, status in self._files(prefix)
            if not name.startswith(TEMPORARY_PREFIX) and (folder + name).startswith(prefix)
        ]
        return sorted(found, key=lambda o: o.key)

    def unfinished(self, prefix: str) -> list[Unfinished]:
        found = [
            Unfinished(key=folder + _intended(name), token=folder + name, begun_at=status.st_mtime)
            for folder, name, status in self._files(prefix)
            if name.startswith(TEMPORARY_PREFIX)
        ]
        return sorted((u for u in found if u.key.startswith(prefix)), key=lambda u: (u.key, u.token))

    def discard(self, unfinished: Unfinished) -> None:
        folder, _, name = unfinished.token.rpartition("/")
        if not name.startswith(TEMPORARY_PREFIX):
            raise ValueError(f"{unfinished.token!r} is no temporary file")
        self._remove(self._folder / (check_key(folder) if folder else "") / name, unfinished.key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._readers.pop(key, None)
        self._remove(self._path(key), key)

    def _remove(self, path: Path, key: str) -> None:
        """The file, and folders that become empty."""
        with self.mapped("delete", key):
            try:
                path.unlink()
                fsync_folder(path.parent)
            except FileNotFoundError:
                return
        for folder in path.parents:
            if folder == self._folder:
                break
            try:
                folder.rmdir()
            except OSError:
                break  # it is not empty, or somebody else was faster

    def _files(self, prefix: str) -> list[tuple[str, str, os.stat_result]]:
        """Of the folder that holds whatever starts with `prefix`: see `walk`."""
        folder, _, begin = prefix.rpartition("/")
        with self.mapped("list", prefix):
            if self._folder.is_file():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self._folder))
            where = os.path.join(self._folder, folder)
            return list(walk(where, folder + "/" if folder else "", (begin, TEMPORARY_PREFIX)))

    def _path(self, key: str) -> Path:
        return self._folder / check_key(key)

    def _reader(self, key: str) -> _Reader:
        """The object's descriptor, kept while it is among the last few. Objects never change; one may be deleted."""
        with self._lock:
            reader = self._readers.pop(key, None)
            if reader is None or os.fstat(reader.fd).st_nlink == 0:
                reader = _Reader(self._path(key))
            self._readers[key] = reader
            if len(self._readers) > OPEN_READERS:
                self._readers.popitem(last=False)
            return reader

    @contextmanager
    def mapped(self, what: str, key: str) -> Iterator[None]:
        """Turn an OSError into the typed error that says what to do."""
        try:
            yield
        except OSError as e:
            raise self._error(e, what, key) from e

    def _error(self, e: OSError, what: str, key: str) -> ObjectStoreError:
        return _typed(e, what, f"{self.root}: cannot {what} {key}: {e.strerror or e}")


def _typed(e: OSError, what: str, said: str) -> ObjectStoreError:
    """`what` could not be done: create, read, list, delete."""
    match e.errno:
        case errno.ENOENT if what == "create":
            return ObjectStoreDeniedError(f"{said}; no folder can be made there: choose another root")
        case errno.EEXIST:
            return ObjectExistsError(said)
        case errno.ENOENT:
            return ObjectMissingError(said)
        case errno.EROFS:
            return ObjectStoreDeniedError(
                f"{said}; it is mounted read-only: mount it for writing, or choose another root"
            )
        case errno.EACCES:
            rights = "read" if what in ("read", "list") else "read and write"
            there = f" to {os.fsdecode(e.filename)}" if isinstance(e.filename, str | bytes) else ""
            return ObjectStoreDeniedError(
                f"{said}; give this user {rights} permission{there}, or choose another root"
            )
        case errno.EPERM | errno.EOPNOTSUPP | errno.EMLINK | errno.EXDEV:
            return ObjectStoreDeniedError(f"{said}; the file system has no hard links: choose another root")
        case errno.ENOTDIR | errno.EISDIR | errno.ENAMETOOLONG:
            return ObjectStoreDeniedError(
                f"{said}; a file stands where a folder should, or the reverse: choose another root"
            )
        case errno.EFBIG:
            return ObjectStoreDeniedError(
                f"{said}; the file system or `ulimit -f` allows no file of this size: choose another root, or raise the limit"
            )
        case errno.ENOSPC | errno.EDQUOT:
            return ObjectStoreUnavailableError(
                f"{said}; free some space (what keep=N lets go is deleted after a commit, so it needs room for N + 1 checkpoints)"
            )
        case _:
            return ObjectStoreUnavailableError(said)


# ---------------------------------------------------------------- temporaries


def _begin(path: Path) -> tuple[int, Path]:
    """A new temporary beside `path`, open for writing: descriptor and path. Its name tells what it was to become."""
    for attempt in range(_TRIES):
        try:
            make_folder(path.parent)
            name = f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"
            if len(os.fsencode(name)) > NAME_MAX:
                name = name[: len(TEMPORARY_PREFIX) + 12]
            temporary = path.parent / name
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise  # else the folder went away: see _TRIES
    raise AssertionError("unreachable")


def _finish(fd: int, temporary: Path, path: Path) -> None:
    """Make the temporary durable and give it its name. Raises FileExistsError."""
    os.fsync(fd)
    failpoint("store.before_link")
    os.link(temporary, path)
    failpoint("store.after_link")
    temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _intended(name: str) -> str:
    """The name that the temporary `name` was to get; its own where it does not tell."""
    _, _, rest = name.removeprefix(TEMPORARY_PREFIX).partition("-")
    return rest or name


MADV_POPULATE_READ = 22
"""Linux 5.14; older kernels refuse it (EINVAL)."""


class FileUpload:
    """See `Upload`. Bytes are taken as they are put."""

    def __init__(self, store: FileObjectStore, key: str, path: Path, size: int) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._size = size
        self._written = 0
        self._flushed = 0
        self._fd, self._temporary = _begin(path)
        try:
            preallocate(self._fd, size)
        except OSError:
            self.abort()
            raise

    def put(self, data: memoryview) -> None:
        with self._store.mapped("create", self._key):
            _write_all(self._fd, data)
        self._written += data.nbytes
        if self._written - self._flushed >= FLUSH_NBYTES:
            start_flushing(self._fd, self._flushed, self._written - self._flushed)
            self._flushed = self._written

    def drain(self) -> None:
        """Nothing is kept: see the class."""

    def finish(self) -> None:
        require_size(self._store.root, self._key, self._written, self._size)
        with self._store.mapped("create", self._key):
            try:
                _finish(self._fd, self._temporary, self._path)
            except FileNotFoundError as e:
                raise ObjectStoreError(
                    f"{self._store.root}: cannot create {self._key}: its temporary {self._temporary.name} is gone; somebody ended "
                    f"the upload: was this writer taken for dead?"
                ) from e
        self.abort()

    def abort(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._temporary.unlink(missing_ok=True)
        except OSError:
            return  # it is found by `unfinished`


def _write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- reading


class _Reader:
    """A descriptor that closes when nobody uses it any more: whoever reads holds a reference."""

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self._in_memory = room_on_tmpfs(self.fd) is not None

    def look(self, start: int, nbytes: int) -> memoryview | None:
        """See `ObjectStore.look`. Raises OSError; ValueError where the file is empty.

        Every page is asked for before it is touched: what is not there is an error then (EFAULT) instead of a signal. The mapping is a
        private one, so that nothing can write to the file through it.
        """
        if not self._in_memory:
            return None
        if self._mapped is None:
            self._mapped = mmap.mmap(
                self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        if not 0 <= start <= start + nbytes <= len(self._mapped):
            return None
        first = start - start % mmap.PAGESIZE
        self._mapped.madvise(MADV_POPULATE_READ, first, start + nbytes - first)
        return memoryview(self._mapped)[start : start + nbytes]

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _read_into(fd: int, start: int, views: Sequence[memoryview]) -> int:
    """preadv until the views are full or the file ends; returns how many bytes came."""
    if len(views) == 1 and (n := os.preadv(fd, views, start)) == views[0].nbytes:
        return n  # as nearly always
    left = [view.cast("B") for view in views if view.nbytes]
    done = 0
    while left:
        n = os.preadv(fd, left[:IOV_MAX], start + done)
        if n == 0:
            return done
        done += n
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if n:
            left[0] = left[0][n:]
    return done

"""`ObjectStore`: what checkpoints and records ask of storage, and the two that answer (``file://`` and ``s3://``).

Torch-free. Keys are relative to the root, separated by slashes. Nothing here renames, copies or appends: objects are
created once, by *conditional creation*, and read or deleted after that.
"""

from __future__ import annotations

import os
import reprlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from surefoot.history import UnknownOutcomeError

READERS = 16
"""How many small objects are read at a time: of a store far away each is a round trip."""

_A = TypeVar("_A")
_R = TypeVar("_R")


class ObjectStoreError(Exception):
    """The object store failed; the message names root, key, what was tried, and what to do."""


class ObjectExistsError(ObjectStoreError):
    """Conditional creation found the key taken. Read it back: it may be one's own, if an earlier try got through."""


class ObjectMissingError(ObjectStoreError):
    """No object has that key."""


class ObjectStoreDeniedError(ObjectStoreError):
    """Wrong keys or no permission: the operator's to mend, no retry helps."""


class ObjectStoreUnavailableError(ObjectStoreError):
    """No answer, or a failure of the store's own; nothing was read. Worth a retry."""


class ObjectUnknownError(ObjectStoreError, UnknownOutcomeError):
    """A creation timed out or broke off: it may have taken effect, now or later. Read back and compare."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object: its key, its size in bytes, and when it was created, by the clock of whoever keeps it (seconds since
    1970)."""

    key: str
    size: int
    modified_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What a creation that was never finished left behind, or one that is still going on; no reader sees it."""

    key: str
    """The key it was to have."""
    token: str
    """What tells it from others of the same key: the id of a multipart upload, the name of a temporary file."""
    begun_at: float
    """When it was begun, or last written to: seconds since 1970 by the clock of whoever keeps it."""


class Upload(Protocol):
    """One large object on its way, from one thread. Nothing is visible before `finish`. Made by `ObjectStore.upload`."""

    def put(self, data: memoryview) -> None:
        """Append bytes. May return before they are taken: `data` must not change until `drain`, `finish` or `abort` returns.

        Raises: as `finish`. After an error only `abort` may be called.
        """
        ...

    def drain(self) -> None:
        """All bytes put so far are taken over, and their buffers may change. Raises as `finish`."""
        ...

    def finish(self) -> None:
        """Create the object, conditionally and durably. Raises: as `ObjectStore.create`; ValueError where the bytes put are
        not as many as were announced. After an error call `abort`."""
        ...

    def abort(self) -> None:
        """Leave nothing behind, as well as that can be done now. Never raises; may be repeated; after `finish` it does nothing."""
        ...


class ObjectStore(Protocol):
    """See the module. Safe to use from several threads. Never used across a fork."""

    nearby: bool
    """Small reads cost little: a file system, not a service."""

    @property
    def root(self) -> str:
        """The URL everything is relative to, without a trailing slash."""
        ...

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Create the object if no other has the key; durable when it returns.

        Raises: ObjectExistsError, ObjectUnknownError, ObjectStoreDeniedError, ObjectStoreUnavailableError.
        """
        ...

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes start .. start + length - 1, or to the end. Raises: ObjectMissingError, ObjectStore…Error."""
        ...

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill the views (writable, contiguous, one byte per item) in order with the bytes from `start` on.

        Returns how many bytes there were: fewer than the views hold where the object ends. After an error the views hold anything.
        Raises: as `read`.
        """
        ...

    def sight(self) -> str:
        """Names what `look` shows, the same for all processes of this machine that see the same; '' where nothing can be seen."""
        ...

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        """Bytes start .. start + nbytes - 1 where they lie, if that is memory: a copy would take longer. Nobody may write to them.

        None where they cannot be seen: `read_into` then brings them, or says why not.
        """
        ...

    def release(self) -> None:
        """Let go of what `read_into` and `look` keep open from one call to the next; called when a reading is over. An object that is
        deleted meanwhile takes its room for as long."""
        ...

    def upload(self, key: str, size: int, *, deadline_s: float) -> Upload:
        """Begin to create an object of `size` bytes piece by piece; all of it must be done within `deadline_s` from now.

        Raises: ObjectStoreDeniedError, ObjectStoreUnavailableError. (That the key is taken may be found only by `finish`.)
        """
        ...

    def unfinished(self, prefix: str) -> list[Unfinished]:
        """Creations below `prefix` (as `list`) that were begun and not finished, others' and live ones included."""
        ...

    def discard(self, unfinished: Unfinished) -> None:
        """Do away with one of them; whoever is still at it will fail. One that is gone is no error."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix` (it should end in a slash), at any depth, sorted by key."""
        ...

    def delete(self, key: str) -> None:
        """A missing object is no error."""
        ...


def until(store: ObjectStore, deadline: float) -> ObjectStore:
    """The same store, for calls that are not to outlast `deadline` (on the monotonic clock), whatever they may take elsewhere; the store
    itself where its calls wait for nobody (files, memory)."""
    bounded = getattr(store, "until", None)
    return store if bounded is None else bounded(deadline)


def each_of(act: Callable[[_A], _R], items: Iterable[_A]) -> list[_R]:
    """`act`, a small read, of each item; in their order, where there are many some at a time. Raises what the first that fails raises."""
    todo = list(items)
    if len(todo) < 2 * READERS:
        return [act(item) for item in todo]
    with ThreadPoolExecutor(READERS, thread_name_prefix="ckpt-small-reads") as pool:
        return list(pool.map(act, todo))


# ---------------------------------------------------------------- keys and roots

TEMPORARY_PREFIX = ".tmp-"
"""How the name of an unfinished file begins. Such files are never listed, and no key may look like one."""


def check_key(key: str) -> str:
    """Returns the key; it becomes part of a path, so whatever could leave the root is refused.

    Raises ValueError.
    """
    for part in key.split("/"):
        if part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) or "\0" in part or "\\" in part:
            raise ValueError(
                f"{key!r} is no object key: parts may not be empty, '.', '..' or begin with {TEMPORARY_PREFIX!r}"
            )
    return key


Root: TypeAlias = str | os.PathLike[str]
"""Where checkpoints lie: ``file:///path``, a path, or ``s3://bucket/prefix``."""


def open_store(root: Root, *, deadline_s: float = 30.0) -> ObjectStore:
    """The object store at `root`: ``file:///path``, a plain path, or ``s3://bucket[/prefix]``.

    Does no IO: the first call finds out whether anybody answers. Endpoint and keys of S3 come from the usual AWS variables
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION) and files.

    Args:
        deadline_s: how long one call may take, retries included (S3; large objects get time by their size on top).

    Raises:
        ValueError: no URL of ours.
    """
    url = os.fspath(root) if isinstance(root, str | os.PathLike) else None
    if not isinstance(url, str):
        raise ValueError(
            f"{reprlib.repr(root)} (of type {type(root).__name__}) is no root for checkpoints, which comes first: give a path (text or "
            f"pathlib.Path), file:///path or s3://bucket/prefix, and the state to save and load"
        )
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.ckpt.objects.s3 import S3ObjectStore

        return S3ObjectStore(parts.netloc, parts.path.strip("/"), deadline_s=deadline_s)
    if parts.scheme in ("", "file") and parts.netloc in ("", "localhost") and parts.path:
        from surefoot.ckpt.objects.files import FileObjectStore

        path = unquote(parts.path, errors="surrogateescape") if parts.scheme else url
        return FileObjectStore(Path(path).absolute())
    raise ValueError(f"{url!r} is no root for checkpoints: give file:///path, a path, or s3://bucket/prefix")


class MemoryObjectStore:
    """A model of an object store, for tests and for one process only."""

    nearby = True

    def __init__(self, root: str = "memory://") -> None:
        self._root = root
        self._objects: dict[str, bytes] = {}
        self._times: dict[str, float] = {}
        self._uploads: dict[str, Unfinished] = {}
        self._begun = 0
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._root

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExistsError(f"{self._root}: {key} exists")
            self._objects[key] = bytes(data)
            self._times[key] = time.time()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            if (data := self._objects.get(check_key(key))) is None:
                raise ObjectMissingError(f"{self._root}: there is no {key}")
            return data[start : None if length is None else start + length]

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        data = memoryview(self.read(key, start, sum(map(len, views))))
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at

    def sight(self) -> str:
        return ""

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        return None

    def release(self) -> None:
        """Nothing is kept."""

    def upload(self, key: str, size: int, *, deadline_s: float) -> Upload:
        with self._lock:
            self._begun += 1
            begun = Unfinished(key=check_key(key), token=str(self._begun), begun_at=time.time())
            self._uploads[begun.token] = begun
        return _MemoryUpload(self, begun, size)

    def unfinished(self, prefix: str) -> list[Unfinished]:
        with self._lock:
            return [u for u in self._uploads.values() if u.key.startswith(prefix)]

    def discard(self, unfinished: Unfinished) -> None:
        with self._lock:
            self._uploads.pop(unfinished.token, None)

    def list(self, prefix: str) -> list[ObjectInfo]:
        with self._lock:
            held = sorted((k, len(v)) for k, v in self._objects.items() if k.startswith(prefix))
            return [ObjectInfo(k, size, self._times[k]) for k, size in held]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)


class _MemoryUpload:
    """See `Upload`. It keeps the views until `drain`, so that a test finds a caller who changes them too early."""

    def __init__(self, store: MemoryObjectStore, begun: Unfinished, size: int) -> None:
        self._store = store
        self._begun = begun
        self._size = size
        self._data = bytearray()
        self._kept: list[memoryview] = []

    def put(self, data: memoryview) -> None:
        self._kept.append(data)

    def drain(self) -> None:
        for view in self._kept:
            self._data += view
        self._kept.clear()

    def finish(self) -> None:
        self.drain()
        require_size(self._store.root, self._begun.key, len(self._data), self._size)
        if self._begun not in self._store.unfinished(""):
            raise ObjectStoreUnavailableError(
                f"{self._store.root}: the upload of {self._begun.key} was discarded"
            )
        self._store.create(self._begun.key, self._data)
        self.abort()

    def abort(self) -> None:
        self._kept.clear()
        self._store.discard(self._begun)


def require_size(root: str, key: str, found: int, announced: int) -> None:
    """Raises ValueError: an upload was given other bytes than were announced."""
    if found != announced:
        raise ValueError(f"{root}: {found} bytes were put to {key}, and {announced} announced")

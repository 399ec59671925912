"""`ObjectStore`: what checkpoints and records ask of storage, and the two that answer (``file://`` and ``s3://``).

Torch-free. Keys are relative to the root, separated by slashes. Nothing here renames, copies or appends: objects are
created once, by *conditional creation*, and read or deleted after that.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from surefoot.history import UnknownOutcomeError


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
    """One listed object: its key and its size in bytes."""

    key: str
    size: int


class ObjectStore(Protocol):
    """See the module. Safe to use from several threads. Never used across a fork."""

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

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix` (it should end in a slash), at any depth, sorted by key."""
        ...

    def delete(self, key: str) -> None:
        """A missing object is no error."""
        ...


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


def open_store(url: str, *, deadline_s: float = 30.0) -> ObjectStore:
    """The object store at `url`: ``file:///path``, a plain path, or ``s3://bucket[/prefix]``.

    Does no IO: the first call finds out whether anybody answers. Endpoint and keys of S3 come from the usual AWS variables
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION) and files.

    Args:
        deadline_s: how long one call may take, retries included (S3; large objects get time by their size on top).

    Raises:
        ValueError: no URL of ours.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.ckpt.s3 import S3ObjectStore

        return S3ObjectStore(parts.netloc, parts.path.strip("/"), deadline_s=deadline_s)
    if parts.scheme in ("", "file") and parts.netloc in ("", "localhost") and parts.path:
        from surefoot.ckpt.files import FileObjectStore

        return FileObjectStore(Path(unquote(parts.path) if parts.scheme else url).absolute())
    raise ValueError(f"{url!r} is no root for checkpoints: give file:///path, a path, or s3://bucket/prefix")


class MemoryObjectStore:
    """A model of an object store, for tests and for one process only."""

    def __init__(self, root: str = "memory://") -> None:
        self._root = root
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._root

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExistsError(f"{self._root}: {key} exists")
            self._objects[key] = bytes(data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            if (data := self._objects.get(check_key(key))) is None:
                raise ObjectMissingError(f"{self._root}: there is no {key}")
            return data[start : None if length is None else start + length]

    def list(self, prefix: str) -> list[ObjectInfo]:
        with self._lock:
            return [ObjectInfo(k, len(v)) for k, v in sorted(self._objects.items()) if k.startswith(prefix)]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

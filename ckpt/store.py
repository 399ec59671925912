"""`ObjectStore`: what checkpoints and records ask of storage, and the two that answer (``file://`` and ``s3://``).

Torch-free. Keys are relative to the root, separated by slashes. Nothing here renames, copies or appends: objects are
created once, by *conditional creation*, and read or deleted after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    def create(self, key: str, data: bytes | memoryview) -> None:
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

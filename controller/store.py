"""`CoordStore`: the few things Surefoot asks of etcd, and the two that answer.

`EtcdStore` talks to etcd (the only door to etcd3 and gRPC in the project), `MemoryStore` is a model of it for pure tests.
One contract suite runs on both (tests/contract/test_coord_store.py).

Every call has a deadline. A call that passed it raises `CoordUnknownError`: it may have taken effect, now or later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from surefoot.history import UnknownOutcomeError


class CoordError(Exception):
    """The coordination store answered with a failure, or did not answer; the message says which and what to do."""


class CoordUnavailableError(CoordError):
    """Nothing was done: no connection, no leader. Worth a retry."""


class CoordUnknownError(CoordError, UnknownOutcomeError):
    """The deadline passed or the connection broke in mid-call: the operation may have taken effect."""


class LeaseLostError(CoordError):
    """The lease has ended; what stood under it is gone."""


class CompactedError(CoordError):
    """A watch asked for revisions that were compacted away: list again, then watch from there."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as stored. Revisions are etcd's: `create_revision` of this life of the key, `mod_revision` of its last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under a prefix, sorted by key, as they stood together at `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """One watch event: the key after a put, or None as `value` after a delete (also by the end of a lease)."""

    key: str
    value: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Holds if the key exists and was created at `revision`; revision 0: if it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Holds if the key's last change was at `revision`; revision 0: if it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`revision` is the store's after the transaction, whether it succeeded or its conditions failed."""

    succeeded: bool
    revision: int


class Watch(Protocol):
    """An open watch. Iterate it (it blocks) in a thread of its own; `close` from another thread ends the iteration."""

    def __iter__(self) -> Iterator[tuple[Change, ...]]:
        """Batches in order of revision; an empty batch is a sign of life (progress).

        Raises: CompactedError, CoordUnavailableError (the stream broke or went silent: list and watch again).
        """
        ...

    def close(self) -> None: ...


class CoordStore(Protocol):
    """See the module. Every method may raise CoordUnavailableError; those that write also CoordUnknownError."""

    def get(self, key: str) -> KeyValue | None: ...

    def list(self, prefix: str) -> Listing: ...

    def txn(self, conditions: Sequence[CreatedAt | ModifiedAt], actions: Sequence[Put | Delete]) -> TxnResult:
        """All actions at once if all conditions hold, nothing otherwise. An action under a dead lease raises LeaseLostError."""
        ...

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Returns the revision of the change. Raises LeaseLostError if the lease is dead."""
        ...

    def delete(self, key: str) -> bool:
        """True if the key existed."""
        ...

    def grant(self, ttl_s: int) -> int:
        """A new lease; its time counts from the moment *before* this call."""
        ...

    def refresh(self, lease: int) -> float:
        """Renew; returns the granted TTL in seconds. Raises LeaseLostError where etcd would answer TTL 0."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease and delete what stands under it. A lease that is gone is no error."""
        ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """All changes under `prefix` from `from_revision` on, inclusive."""
        ...

    def close(self) -> None: ...

"""`CoordStore`: the few things Surefoot asks of etcd, and the two that answer.

`EtcdStore` (in etcdstore.py, the only door to etcd3 and gRPC in the project; `connect` opens it) talks to etcd,
`MemoryStore` is a model of it for pure tests. One contract suite runs on both (tests/contract/test_coord_store.py).

Every call has a deadline. A write that passed it raises `CoordUnknownError`: it may have taken effect, now or later. A
read that passed it was simply not answered: `CoordUnavailableError`.

The errors::

    CoordError                   refused as it stands: too large, malformed; a retry changes nothing
    ├── CoordDeniedError         the operator's to mend
    ├── CoordUnavailableError    nothing was done; worth a retry
    │   └── CoordFullError       writes are refused until the operator makes room
    ├── CoordUnknownError        may have been done
    ├── LeaseLostError
    └── CompactedError
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.history import UnknownOutcomeError


class CoordError(Exception):
    """The coordination store answered with a failure, or did not answer; the message says which and what to do."""


class CoordDeniedError(CoordError):
    """etcd knows us and refuses, or wants to know us: users and rights are the operator's to mend."""


class CoordUnavailableError(CoordError):
    """Nothing was done: no connection, no leader. Worth a retry."""


class CoordFullError(CoordUnavailableError):
    """etcd's database is full: it refuses writes until it is compacted, defragmented and its alarm disarmed."""


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


def connect(endpoints: str | Sequence[str], deadline_s: float = 3.0) -> CoordStore:
    """An `EtcdStore` that has been answered once, tried until `deadline_s`, which is also the deadline of every later call.

    Args:
        endpoints: "HOST:PORT", several separated by commas, or a sequence of them: members of one cluster.
        deadline_s: Seconds; below a third of the lease TTL, or a lease ends while a renewal waits.

    Raises:
        CoordUnavailableError: no etcd answers there; the message says where and what to do.
        CoordDeniedError: it answers and refuses.
    """
    from surefoot.controller.etcdstore import (
        EtcdStore,
    )  # gRPC is loaded by those who talk to etcd, and nobody else

    return EtcdStore.connect(endpoints, deadline_s)


# ---------------------------------------------------------------- the model

REQUEST_BYTES_MAX = 1_572_864
"""etcd's default ``--max-request-bytes``."""

TXN_ACTIONS_MAX = 128
"""etcd's default ``--max-txn-ops``."""


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    ends: float
    keys: set[str] = field(default_factory=set[str])


class MemoryStore:
    """etcd, as far as `CoordStore` goes, in one process: revisions, leases, transactions, watches, history, compaction.

    Leases run on `clock` (seconds); whoever moves a clock of his own calls `tick` after it, and an idle watch looks again
    every 50 ms anyway. It is stricter than etcd in one point: a watch that has not yet handed out what was compacted gets
    CompactedError, where etcd may still have it in flight.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, progress_s: float = 2.0) -> None:
        self._clock = clock
        self._progress_s = progress_s
        self._changed = threading.Condition()
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._revision = 1  # as etcd: an empty store stands at revision 1
        self._first = 1  # the revision of _batches[0]; what lies before it was compacted
        self._batches: list[tuple[Change, ...]] = [()]
        self._closed = False

    # -- CoordStore

    def get(self, key: str) -> KeyValue | None:
        with self._changed:
            self._begin()
            return self._items.get(key)

    def list(self, prefix: str) -> Listing:
        with self._changed:
            self._begin()
            items = tuple(self._items[key] for key in sorted(self._items) if key.startswith(prefix))
            return Listing(items, self._revision)

    def txn(self, conditions: Sequence[CreatedAt | ModifiedAt], actions: Sequence[Put | Delete]) -> TxnResult:
        _check_actions(actions)
        with self._changed:
            self._begin()
            if not all(map(self._holds, conditions)):
                return TxnResult(False, self._revision)
            for action in actions:
                if isinstance(action, Put):
                    self._check_lease(action.lease)
            self._commit(actions)
            return TxnResult(True, self._revision)

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return self.txn([], [Put(key, value, lease)]).revision

    def delete(self, key: str) -> bool:
        with self._changed:
            self._begin()
            existed = key in self._items
            self._commit([Delete(key)])
            return existed

    def grant(self, ttl_s: int) -> int:
        if ttl_s <= 0:
            raise CoordError(f"a lease lasts at least 1 s, not {ttl_s}")
        with self._changed:
            self._begin()
            lease = next(self._lease_ids)
            self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
            return lease

    def refresh(self, lease: int) -> float:
        with self._changed:
            self._begin()
            self._check_lease(lease)
            held = self._leases[lease]
            held.ends = self._clock() + held.ttl_s
            return float(held.ttl_s)

    def revoke(self, lease: int) -> None:
        with self._changed:
            self._begin()
            self._end_lease(lease)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        with self._changed:
            self._begin()
            return MemoryWatch(self, prefix, from_revision or self._revision + 1)

    def close(self) -> None:
        """End all watches; later calls raise CoordUnavailableError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- what only the model and its etcd twin have

    def compact(self, revision: int) -> None:
        """Forget what happened before `revision`. Raises: CompactedError, CoordError (a revision yet to come)."""
        with self._changed:
            self._begin()
            if revision > self._revision:
                raise CoordError(
                    f"revision {revision} has not happened yet; the store is at {self._revision}"
                )
            if revision < self._first:
                raise CompactedError(f"revision {revision} is compacted already")
            del self._batches[: revision - self._first]
            self._first = revision
            self._changed.notify_all()

    def tick(self) -> None:
        """The clock was moved: end the leases that ran out, and wake the watches."""
        with self._changed:
            self._expire()
            self._changed.notify_all()

    # -- inside, under the lock

    def _begin(self) -> None:
        if self._closed:
            raise CoordUnavailableError("this store is closed")
        self._expire()

    def _expire(self) -> None:
        now = self._clock()
        over = [(lease.ends, number) for number, lease in self._leases.items() if lease.ends <= now]
        for _, number in sorted(over):
            self._end_lease(number)

    def _end_lease(self, number: int) -> None:
        if lease := self._leases.pop(number, None):
            self._commit([Delete(key) for key in sorted(lease.keys)])

    def _check_lease(self, number: int) -> None:
        if number and number not in self._leases:
            raise LeaseLostError(f"lease {number:x} has ended; what stood under it is gone")

    def _holds(self, condition: CreatedAt | ModifiedAt) -> bool:
        item = self._items.get(condition.key)
        if item is None:
            return condition.revision == 0
        actual = item.create_revision if isinstance(condition, CreatedAt) else item.mod_revision
        return actual == condition.revision

    def _commit(self, actions: Sequence[Put | Delete]) -> None:
        """Carry out `actions` at one new revision; nothing that changes nothing makes one."""
        revision = self._revision + 1
        batch: list[Change] = []
        for action in actions:
            old = self._items.pop(action.key, None)
            if old is not None and old.lease in self._leases:
                self._leases[old.lease].keys.discard(action.key)
            if isinstance(action, Put):
                created = old.create_revision if old is not None else revision
                item = KeyValue(action.key, action.value, created, revision, action.lease)
                self._items[action.key] = item
                if action.lease:
                    self._leases[action.lease].keys.add(action.key)
                batch.append(Change(action.key, item, revision))
            elif old is not None:
                batch.append(Change(action.key, None, revision))
        if batch:
            self._revision = revision
            self._batches.append(tuple(batch))
            self._changed.notify_all()

    def next_batch(self, watch: MemoryWatch) -> tuple[Change, ...] | None:
        """What `watch` hands out next (blocks), or None when it was closed. For `MemoryWatch` alone."""
        quiet_since = self._clock()
        with self._changed:
            while not watch.closed:
                self._begin()
                if watch.next_revision < self._first:
                    raise CompactedError(
                        f"revision {watch.next_revision} is compacted away; list and watch again"
                    )
                while watch.next_revision <= self._revision:
                    batch = self._batches[watch.next_revision - self._first]
                    watch.next_revision += 1
                    if mine := tuple(change for change in batch if change.key.startswith(watch.prefix)):
                        return mine
                if self._clock() - quiet_since >= self._progress_s:
                    return ()
                self._changed.wait(0.05)
        return None

    def close_watch(self, watch: MemoryWatch) -> None:
        """For `MemoryWatch` alone."""
        with self._changed:
            watch.closed = True
            self._changed.notify_all()


class MemoryWatch:
    """A `Watch` on a `MemoryStore`."""

    def __init__(self, store: MemoryStore, prefix: str, next_revision: int) -> None:
        self._store = store
        self.prefix = prefix
        self.next_revision = next_revision
        self.closed = False

    def __iter__(self) -> Iterator[tuple[Change, ...]]:
        while (batch := self._store.next_batch(self)) is not None:
            yield batch

    def close(self) -> None:
        self._store.close_watch(self)


def _check_actions(actions: Sequence[Put | Delete]) -> None:
    """Refuse what etcd refuses."""
    if len(actions) > TXN_ACTIONS_MAX:
        raise CoordError(f"a transaction has at most {TXN_ACTIONS_MAX} actions, not {len(actions)}")
    puts = [action.key for action in actions if isinstance(action, Put)]
    deletes = {action.key for action in actions if isinstance(action, Delete)}
    if len(puts) != len(set(puts)) or not deletes.isdisjoint(puts):
        raise CoordError("a transaction changes a key once at most")
    if sum(len(action.value) for action in actions if isinstance(action, Put)) > REQUEST_BYTES_MAX:
        raise CoordError(f"a request may carry {REQUEST_BYTES_MAX} bytes; etcd is no place for large objects")

"""`EtcdStore`: `CoordStore` on a real etcd. The only module that knows etcd3 and gRPC.

Of etcd3 0.12.0 only the generated messages are used. Its client has no keepalive, no deadline by default, answers a dead
lease with TTL 0, and lets a watch end in silence; all of that is done here, on a channel of our own:

* Every call has a deadline, and is sent with ``hasleader``: a member cut off from its cluster says so instead of waiting.
* A write that may have left this process and was not answered is *unknown*, never "failed" (`classify`).
* A broken connection is noticed in less than 10 s, whatever TCP thinks of it: by keepalive pings, and, watch by watch, by
  asking for progress and counting the time until the answer.

gRPC and fork do not go together: a process that has loaded this module starts others by exec alone.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from surefoot.controller.store import (
    Change,
    CompactedError,
    CoordDeniedError,
    CoordError,
    CoordFullError,
    CoordUnavailableError,
    CoordUnknownError,
    CreatedAt,
    Delete,
    KeyValue,
    LeaseLostError,
    Listing,
    ModifiedAt,
    Put,
    TxnResult,
)

_METADATA = (("hasleader", "true"),)
"""etcd's WithRequireLeader: calls and watches fail where the member has no leader, instead of sitting there."""

_CHANNEL = (
    # etcd takes pings more often than every 5 s for an attack (--grpc-keepalive-min-time) and hangs up.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.max_pings_without_data", 0),
    # Back soon, but not in a loop: this is also how long a connection that is not accepted may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A listing of ten thousand nodes is larger than the 4 MB that is the default.
    ("grpc.max_receive_message_length", -1),
    # Channels do not share a connection: closing one must close its sockets.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

_PROGRESS_REQUEST = b"\x1a\x00"
"""WatchRequest{progress_request: {}} (etcd 3.4 or newer), which etcd3's messages are too old to know."""


@dataclass(frozen=True, slots=True)
class _Grpc:
    """The modules behind this one."""

    grpc: Any
    rpc: Any


_IMPORT_ENVIRONMENT = {
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",  # etcd3's messages were generated for protobuf 3
    "GRPC_VERBOSITY": "NONE",  # versions differ in what they say on stderr about each failed attempt to connect
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # this process starts others by exec alone
}


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Generator[None]:
    """Set variables for a while only: ranks inherit the environment, and their protobuf shall be the fast one."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _load() -> _Grpc:
    """Import gRPC and etcd3's messages; once, and when first needed.

    Raises:
        CoordError: another protobuf implementation is loaded in this process already.
    """
    with _environment(_IMPORT_ENVIRONMENT), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # one for each of some 600 descriptors
        try:
            import etcd3.etcdrpc as rpc
            import grpc
        except TypeError as e:
            raise CoordError(
                "etcd3 cannot be loaded: this process has loaded protobuf before, in another implementation than 'python'. "
                "Set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the environment of the process"
            ) from e
        grpc.insecure_channel(
            "ipv4:127.0.0.1:1"
        ).close()  # connects to nothing; gRPC's core reads its variables here
    return _Grpc(grpc, rpc)


def target(endpoints: str | Sequence[str]) -> str:
    """gRPC's name for one or several endpoints ("HOST:PORT", IPv4, "[IPv6]" or a name).

    A single name is left to gRPC, which looks it up at each reconnect. Several can only be given as addresses
    ("ipv4:h1:p1,h2:p2"): names among them are looked up now.

    Raises:
        CoordError: not of that form. CoordUnavailableError: a name that cannot be looked up.
    """
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    pairs = [_host_port(part.strip()) for part in parts]
    if not pairs:
        raise CoordError("no etcd endpoint is given; give HOST:PORT")
    if len(pairs) == 1 and not _is_address(pairs[0][0]):
        return f"dns:///{pairs[0][0]}:{pairs[0][1]}"
    found = [address for host, port in pairs for address in _addresses(host, port)]
    v4 = [f"{host}:{port}" for family, host, port in found if family == socket.AF_INET]
    v6 = [f"[{host}]:{port}" for family, host, port in found if family == socket.AF_INET6]
    return "ipv4:" + ",".join(dict.fromkeys(v4)) if v4 else "ipv6:" + ",".join(dict.fromkeys(v6))


def _host_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CoordError(f"{endpoint!r} is no etcd endpoint; give HOST:PORT, as in 127.0.0.1:2379")
    return host, int(port)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def _addresses(host: str, port: int) -> list[tuple[int, str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise CoordUnavailableError(f"the etcd host {host!r} cannot be looked up: {e.strerror}") from e
    return [(family, str(address[0]), port) for family, _, _, _, address in found]


# ---------------------------------------------------------------- what went wrong

_NOT_SENT = ("failed to connect to all addresses", "resolving", "dns resolution failed", "no leader")
"""Details of UNAVAILABLE that prove that etcd did not touch the request. All others (a reset in mid-call, "request timed
out, possibly due to previous leader failure", "server stopped") prove nothing."""


def classify(code: str, details: str, *, writes: bool) -> type[CoordError]:
    """Which error a failed call is, from the name of its gRPC status and etcd's words; `writes`: it would change something."""
    text = details.lower()
    if "lease not found" in text:
        return LeaseLostError
    if "compacted" in text:
        return CompactedError
    if "database space exceeded" in text:
        return CoordFullError
    if "too many requests" in text:
        return CoordUnavailableError
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") or "user name is empty" in text:
        return CoordDeniedError
    if code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "NOT_FOUND", "UNIMPLEMENTED"):
        return CoordError
    if code == "RESOURCE_EXHAUSTED":  # the message is larger than the server takes
        return CoordError
    if code == "UNAVAILABLE" and any(words in text for words in _NOT_SENT):
        return CoordUnavailableError
    return CoordUnknownError if writes else CoordUnavailableError


_ADVICE: dict[type[CoordError], str] = {
    CoordDeniedError: "give credentials that etcd accepts",
    CoordFullError: "compact and defragment it, then disarm its alarm (etcdctl alarm disarm)",
    CoordUnknownError: "it may have taken effect: read before trying again",
}


# ---------------------------------------------------------------- the store


class EtcdStore:
    """See `CoordStore`. `connect` makes one; safe to use from several threads, never across a fork.

    Args:
        channel: An open gRPC channel, owned from now on.
        where: The endpoints, for messages.
        deadline_s: Seconds each call may take.
        progress_s: An idle watch asks for a sign of life this often.
        stale_s: A watch whose question is not answered for this long is broken.
    """

    def __init__(
        self, channel: Any, where: str, deadline_s: float, *, progress_s: float = 2.0, stale_s: float = 5.0
    ) -> None:
        loaded = _load()
        self._grpc, self._rpc = loaded.grpc, loaded.rpc
        self._channel, self._where, self._deadline_s = channel, where, deadline_s
        self._progress_s, self._stale_s = progress_s, stale_s
        self._kv = self._rpc.KVStub(channel)
        self._leases = self._rpc.LeaseStub(channel)
        # As bytes, for the sake of _PROGRESS_REQUEST.
        self._open_watch = channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=bytes,
            response_deserializer=self._rpc.WatchResponse.FromString,
        )
        self._watches: set[EtcdWatch] = set()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def connect(
        cls,
        endpoints: str | Sequence[str],
        deadline_s: float = 3.0,
        *,
        progress_s: float = 2.0,
        stale_s: float = 5.0,
    ) -> EtcdStore:
        """See `store.connect`."""
        where = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
        channel = _load().grpc.insecure_channel(target(endpoints), options=_CHANNEL)
        store = cls(channel, where, deadline_s, progress_s=progress_s, stale_s=stale_s)
        try:
            store._wait_for_an_answer(time.monotonic() + deadline_s)
        except BaseException:
            store.close()
            raise
        return store

    def _wait_for_an_answer(self, until: float) -> None:
        while True:
            try:
                self._range(b"/surefoot/", timeout_s=max(0.1, until - time.monotonic()))
                return
            except CoordUnavailableError as e:
                if time.monotonic() + 0.1 >= until:
                    raise CoordUnavailableError(
                        f"no etcd answers at {self._where} within {self._deadline_s:g} s ({e}). "
                        "Start one there, or name the right endpoints (HOST:PORT, separated by commas)"
                    ) from e
            time.sleep(0.1)  # gRPC itself tries to connect at the pace of its backoff

    # -- keys

    def get(self, key: str) -> KeyValue | None:
        response = self._range(key.encode())
        return _key_value(response.kvs[0]) if response.kvs else None

    def list(self, prefix: str) -> Listing:
        start, end = _range_of(prefix)
        response = self._range(start, end)  # etcd answers in order of key
        return Listing(tuple(map(_key_value, response.kvs)), response.header.revision)

    def _range(self, start: bytes, end: bytes = b"", timeout_s: float | None = None) -> Any:
        request = self._rpc.RangeRequest(key=start, range_end=end)
        return self._call(self._kv.Range, request, writes=False, timeout_s=timeout_s)

    def txn(self, conditions: Sequence[CreatedAt | ModifiedAt], actions: Sequence[Put | Delete]) -> TxnResult:
        request = self._rpc.TxnRequest(
            compare=[self._compare(condition) for condition in conditions],
            success=[self._action(action) for action in actions],
        )
        response = self._call(self._kv.Txn, request, writes=True)
        return TxnResult(response.succeeded, response.header.revision)

    def _compare(self, condition: CreatedAt | ModifiedAt) -> Any:
        compare = self._rpc.Compare(key=condition.key.encode(), result=self._rpc.Compare.EQUAL)
        if isinstance(condition, CreatedAt):
            compare.target, compare.create_revision = self._rpc.Compare.CREATE, condition.revision
        else:
            compare.target, compare.mod_revision = self._rpc.Compare.MOD, condition.revision
        return compare

    def _action(self, action: Put | Delete) -> Any:
        if isinstance(action, Put):
            return self._rpc.RequestOp(request_put=self._put_request(action))
        return self._rpc.RequestOp(request_delete_range=self._rpc.DeleteRangeRequest(key=action.key.encode()))

    def _put_request(self, put: Put) -> Any:
        return self._rpc.PutRequest(key=put.key.encode(), value=put.value, lease=put.lease)

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        response = self._call(self._kv.Put, self._put_request(Put(key, value, lease)), writes=True)
        return response.header.revision

    def delete(self, key: str) -> bool:
        request = self._rpc.DeleteRangeRequest(key=key.encode())
        return self._call(self._kv.DeleteRange, request, writes=True).deleted > 0

    def compact(self, revision: int) -> None:
        """Forget what happened before `revision`. Raises: CompactedError, CoordError (a revision yet to come)."""
        self._call(self._kv.Compact, self._rpc.CompactionRequest(revision=revision), writes=True)

    # -- leases

    def grant(self, ttl_s: int) -> int:
        return self._call(self._leases.LeaseGrant, self._rpc.LeaseGrantRequest(TTL=ttl_s), writes=True).ID

    def refresh(self, lease: int) -> float:
        # A stream by etcd's design; here a stream of one, so that each renewal has its own deadline and its own fate.
        requests = iter([self._rpc.LeaseKeepAliveRequest(ID=lease)])
        stream = self._open(self._leases.LeaseKeepAlive, requests, timeout=self._deadline_s)
        try:
            response = next(stream)
        except self._grpc.RpcError as e:
            raise self._error(e, writes=True) from e
        except StopIteration:
            raise CoordUnknownError(f"etcd at {self._where} ended a renewal without an answer") from None
        finally:
            stream.cancel()
        if response.TTL <= 0:
            raise LeaseLostError(f"lease {lease:x} has ended; what stood under it is gone")
        return float(response.TTL)

    def revoke(self, lease: int) -> None:
        try:
            self._call(self._leases.LeaseRevoke, self._rpc.LeaseRevokeRequest(ID=lease), writes=True)
        except LeaseLostError:
            pass  # gone is what was wanted

    # -- watches

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        start, end = _range_of(prefix)
        create = self._rpc.WatchCreateRequest(
            key=start, range_end=end, start_revision=from_revision, progress_notify=True
        )
        request = self._rpc.WatchRequest(create_request=create).SerializeToString()
        watch = EtcdWatch(self, request, progress_s=self._progress_s, stale_s=self._stale_s)
        with self._lock:
            self._watches.add(watch)  # before it can end, and be forgotten
        try:
            watch.start()
        except BaseException:
            self.forget(watch)
            raise
        return watch

    def open_watch(self, requests: Iterator[bytes]) -> Any:
        """The stream of one watch. For `EtcdWatch` alone."""
        return self._open(self._open_watch, requests)

    def watch_error(self, error: Exception) -> CoordError:
        """What a broken stream means. For `EtcdWatch` alone."""
        if isinstance(error, self._grpc.RpcError):
            return self._error(error, writes=False)
        return CoordUnavailableError(f"the watch on etcd at {self._where} failed: {error!r}")

    def forget(self, watch: EtcdWatch) -> None:
        """For `EtcdWatch` alone."""
        with self._lock:
            self._watches.discard(watch)

    def close(self) -> None:
        """End all watches and the connection; later calls raise CoordUnavailableError."""
        with self._lock:
            self._closed = True
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        self._channel.close()

    # -- calls

    def _call(
        self, method: Callable[..., Any], request: Any, *, writes: bool, timeout_s: float | None = None
    ) -> Any:
        timeout = self._deadline_s if timeout_s is None else timeout_s
        try:
            return self._open(method, request, timeout=timeout)
        except self._grpc.RpcError as e:
            raise self._error(e, writes=writes) from e

    def _open(self, method: Callable[..., Any], request: Any, **options: Any) -> Any:
        if self._closed:
            raise CoordUnavailableError(f"the connection to etcd at {self._where} is closed")
        try:
            return method(request, metadata=_METADATA, **options)
        except ValueError as e:  # closed by another thread just now
            raise CoordUnavailableError(f"the connection to etcd at {self._where} is closed") from e

    def _error(self, error: Any, *, writes: bool) -> CoordError:
        code, details = error.code().name, error.details() or ""
        kind = classify(code, details, writes=writes)
        advice = _ADVICE.get(kind)
        return kind(f"etcd at {self._where}: {code}: {details}" + (f"; {advice}" if advice else ""))


def _range_of(prefix: str) -> tuple[bytes, bytes]:
    """First key and end (exclusive) of all keys under `prefix`, as etcd wants them."""
    start = prefix.encode()
    for at in range(len(start) - 1, -1, -1):
        if start[at] < 0xFF:
            return start, start[:at] + bytes([start[at] + 1])
    return b"\x00", b"\x00"  # etcd's spelling of "all keys"


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


# ---------------------------------------------------------------- a watch

_INBOX_MAX = 1_000
"""Batches that wait for a slow reader; beyond them the stream is left standing, and etcd holds the rest."""


class EtcdWatch:
    """A `Watch` on a stream of its own.

    A thread of its own receives (gRPC's streams have no timeout per message); the reader, who waits with one, is the one
    to ask for progress and to notice that there is none.
    """

    def __init__(self, store: EtcdStore, create: bytes, *, progress_s: float, stale_s: float) -> None:
        self._store, self._progress_s, self._stale_s = store, progress_s, stale_s
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._requests.put(create)
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Change, ...]] = deque()
        self._end: CoordError | None = None
        self._closed = False
        self._asked: float | None = (
            time.monotonic()
        )  # since when a question is open; the first is the watch itself
        self._stream: Any = None
        self._thread = threading.Thread(target=self._receive, name="etcd-watch", daemon=True)

    def start(self) -> None:
        """Open the stream. Raises: CoordUnavailableError (the store is closed)."""
        self._stream = self._store.open_watch(iter(self._requests.get, None))
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Change, ...]]:
        while (batch := self._next()) is not None:
            yield batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._stream.cancel()
            self._thread.join()

    # -- the reader's side

    def _next(self) -> tuple[Change, ...] | None:
        with self._changed:
            while True:
                if self._closed:
                    return None
                if self._inbox:
                    batch = self._inbox.popleft()
                    self._changed.notify_all()
                    return batch
                if self._end is not None:
                    raise self._end
                if self._asked is not None:
                    self._changed.wait(max(0.0, self._asked + self._stale_s - time.monotonic()))
                    self._check_answered()
                elif not self._changed.wait(self._progress_s):
                    self._asked = time.monotonic()
                    self._requests.put(_PROGRESS_REQUEST)

    def _check_answered(self) -> None:
        now = time.monotonic()
        if self._asked is not None and not self._inbox and now - self._asked >= self._stale_s:
            self._end = CoordUnavailableError(
                f"a watch on etcd went silent: no sign of life for {now - self._asked:.1f} s. List and watch again"
            )
            self._stream.cancel()

    # -- the receiving thread

    def _receive(self) -> None:
        end: CoordError = CoordUnavailableError("etcd ended a watch. List and watch again")
        try:
            for response in self._stream:
                if not self._deliver(_batch(response)):
                    break
        except CoordError as e:
            end = e
        except (
            Exception
        ) as e:  # whatever gRPC throws (an RpcError, as a rule) is the end of this watch, and is said there
            end = self._store.watch_error(e)
        finally:
            self._stream.cancel()
            self._requests.put(None)  # ends gRPC's thread that reads them
            self._store.forget(self)
            with self._changed:
                self._end = self._end or end
                self._changed.notify_all()

    def _deliver(self, batch: tuple[Change, ...]) -> bool:
        """Hand a batch to the reader, waiting for room; False when the watch was closed meanwhile."""
        with self._changed:
            self._asked = None
            self._changed.wait_for(
                lambda: len(self._inbox) < _INBOX_MAX or self._closed or self._end is not None
            )
            if self._closed or self._end is not None:
                return False
            self._inbox.append(batch)
            self._changed.notify_all()
            return True


def _batch(response: Any) -> tuple[Change, ...]:
    """The changes of one response; none for a sign of life.

    Raises:
        CompactedError, CoordUnavailableError: etcd ends the watch.
    """
    if response.compact_revision:
        raise CompactedError(
            f"etcd has compacted up to revision {response.compact_revision}. List and watch again"
        )
    if response.canceled:
        raise CoordUnavailableError(
            f"etcd ended a watch: {response.cancel_reason or 'no reason given'}. List and watch again"
        )
    return tuple(map(_change, response.events))


def _change(event: Any) -> Change:
    deleted = event.type == event.DELETE
    return Change(event.kv.key.decode(), None if deleted else _key_value(event.kv), event.kv.mod_revision)

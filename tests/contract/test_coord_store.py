"""What `CoordStore` promises, on the model and on a real etcd.

The raw side of each check goes through a second connection where there is one, so that a store cannot agree with itself
alone. Leases of the real etcd last 2 s, the least it grants.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.etcdstore import EtcdStore
from surefoot.controller.store import (
    Change,
    CompactedError,
    CoordError,
    CoordStore,
    CoordUnavailableError,
    CoordUnknownError,
    CreatedAt,
    Delete,
    LeaseLostError,
    MemoryStore,
    ModifiedAt,
    Put,
    Watch,
    connect,
)

TTL_S = 2


class Clock:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Backend:
    """One implementation: `store` is tested, `other` is a second way to the same keys."""

    store: Any
    other: Any
    root: str
    let_pass: Callable[[float], None]
    """Let so many seconds pass for leases."""

    def key(self, name: str) -> str:
        return self.root + name


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    root = f"/test/{uuid.uuid4().hex}/"
    if request.param == "memory":
        clock = Clock()
        store = MemoryStore(clock)

        def let_pass(seconds: float) -> None:
            clock.now += seconds
            store.tick()

        yield Backend(store, store, root, let_pass)
        store.close()
    else:
        etcd: EmbeddedEtcd = request.getfixturevalue("etcd")
        # Short, so that a test sees the first sign of life soon.
        store = EtcdStore.connect(etcd.endpoint, progress_s=0.2, stale_s=5.0)
        other = connect(etcd.endpoint)
        yield Backend(store, other, root, time.sleep)  # the passing of time is what is tested
        store.close()
        other.close()


class Reader:
    """Reads a watch in a thread of its own, as everybody does."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.changes: list[Change] = []
        self.batches = 0
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for batch in self.watch:
                self.changes += batch
                self.batches += 1
        except CoordError as e:
            self.error = e

    def close(self) -> None:
        self.watch.close()
        self.thread.join(5)
        assert not self.thread.is_alive(), "close ends the iteration"


@pytest.fixture
def reading(backend: Backend) -> Iterator[Callable[..., Reader]]:
    """Open watches that are closed at the end."""
    readers: list[Reader] = []

    def read(prefix: str, from_revision: int, store: CoordStore | None = None) -> Reader:
        readers.append(Reader((store or backend.store).watch(prefix, from_revision)))
        return readers[-1]

    yield read
    for reader in readers:
        reader.close()


class TestKeys:
    def test_a_key_that_does_not_exist_is_none(self, backend: Backend):
        assert backend.store.get(backend.key("a")) is None

    def test_what_was_put_is_read_with_its_revisions(self, backend: Backend):
        first = backend.store.put(backend.key("a"), b"1")
        second = backend.store.put(backend.key("a"), b"2")
        item = backend.other.get(backend.key("a"))
        assert (item.key, item.value) == (backend.key("a"), b"2")
        assert (item.create_revision, item.mod_revision, item.lease) == (first, second, 0)
        assert second == first + 1

    def test_a_key_that_comes_again_is_another_life_of_it(self, backend: Backend):
        first = backend.store.put(backend.key("a"), b"1")
        assert backend.store.delete(backend.key("a"))
        again = backend.store.put(backend.key("a"), b"1")
        assert backend.other.get(backend.key("a")).create_revision == again > first + 1

    def test_delete_says_whether_there_was_anything(self, backend: Backend):
        backend.store.put(backend.key("a"), b"")
        assert backend.store.delete(backend.key("a")) is True
        assert backend.store.delete(backend.key("a")) is False
        assert backend.other.get(backend.key("a")) is None

    @pytest.mark.parametrize("value", [b"", b"\x00\xff", bytes(1_000_000)], ids=["empty", "binary", "1 MB"])
    def test_values_are_bytes(self, backend: Backend, value: bytes):
        backend.store.put(backend.key("a"), value)
        assert backend.other.get(backend.key("a")).value == value

    @pytest.mark.parametrize("size", [1_600_000, 3_000_000])
    def test_values_that_are_too_large_are_refused_not_unknown(self, backend: Backend, size: int):
        with pytest.raises(CoordError) as refused:
            backend.store.put(backend.key("a"), bytes(size))
        assert type(refused.value) is CoordError
        assert backend.other.get(backend.key("a")) is None

    def test_keys_are_unicode(self, backend: Backend):
        names = ["ü", "日本", "a b", "z\U0001f9ae", "\uffff"]
        for name in names:
            backend.store.put(backend.key(name), name.encode())
        listing = backend.other.list(backend.root)
        assert [item.key for item in listing.items] == [backend.key(name) for name in sorted(names)]
        assert backend.other.get(backend.key("日本")).value == "日本".encode()


class TestList:
    def test_sorted_by_key_and_only_the_prefix(self, backend: Backend):
        for name in ("b/2", "b/10", "b", "b0", "a", "c", "b/"):
            backend.store.put(backend.key(name), name.encode())
        names = [item.value.decode() for item in backend.other.list(backend.key("b/")).items]
        assert names == ["b/", "b/10", "b/2"]

    def test_the_revision_is_the_stores_even_if_nothing_is_found(self, backend: Backend):
        revision = backend.store.put(backend.key("a"), b"")
        assert backend.store.list(backend.key("none/")) == backend.other.list(backend.key("none/"))
        assert backend.store.list(backend.key("none/")).revision >= revision
        assert backend.store.list(backend.key("none/")).items == ()

    def test_a_large_listing(self, backend: Backend):
        """Above gRPC's default of 4 MB for a received message."""
        for i in range(6):
            backend.store.put(backend.key(f"big/{i}"), bytes(1_000_000))
        assert sum(len(item.value) for item in backend.store.list(backend.key("big/")).items) == 6_000_000


class TestTransactions:
    def test_create_if_absent(self, backend: Backend):
        key = backend.key("a")
        assert backend.store.txn([CreatedAt(key, 0)], [Put(key, b"1")]).succeeded
        refused = backend.store.txn([CreatedAt(key, 0)], [Put(key, b"2")])
        assert not refused.succeeded
        assert refused.revision >= backend.other.get(key).mod_revision
        assert backend.other.get(key).value == b"1"

    def test_fencing_by_the_revision_of_creation(self, backend: Backend):
        leader, plan = backend.key("leader"), backend.key("plan")
        token = backend.store.txn([CreatedAt(leader, 0)], [Put(leader, b"a")]).revision
        assert backend.store.txn([CreatedAt(leader, token)], [Put(plan, b"1")]).succeeded
        backend.store.put(leader, b"a again")  # a change does not end a life of the key
        assert backend.store.txn([CreatedAt(leader, token)], [Put(plan, b"2")]).succeeded
        backend.other.delete(leader)
        assert not backend.store.txn([CreatedAt(leader, token)], [Put(plan, b"3")]).succeeded
        backend.other.put(leader, b"b")
        assert not backend.store.txn([CreatedAt(leader, token)], [Put(plan, b"3")]).succeeded
        assert backend.other.get(plan).value == b"2"

    def test_compare_and_change(self, backend: Backend):
        key = backend.key("a")
        assert backend.store.txn([ModifiedAt(key, 0)], [Put(key, b"1")]).succeeded
        seen = backend.store.get(key).mod_revision
        assert backend.store.txn([ModifiedAt(key, seen)], [Put(key, b"2")]).succeeded
        assert not backend.store.txn([ModifiedAt(key, seen)], [Put(key, b"3")]).succeeded
        assert not backend.store.txn([ModifiedAt(key, 0)], [Put(key, b"3")]).succeeded

    def test_all_conditions_must_hold_and_all_actions_happen_at_one_revision(self, backend: Backend):
        a, b, c = (backend.key(name) for name in "abc")
        backend.store.put(a, b"1")
        assert not backend.store.txn([CreatedAt(b, 0), CreatedAt(a, 0)], [Put(b, b""), Delete(a)]).succeeded
        assert backend.other.get(b) is None
        result = backend.store.txn([CreatedAt(b, 0)], [Put(b, b""), Put(c, b""), Delete(a)])
        assert result.succeeded
        assert backend.other.get(a) is None
        assert {item.mod_revision for item in backend.other.list(backend.root).items} == {result.revision}

    def test_one_key_twice_is_refused(self, backend: Backend):
        key = backend.key("a")
        for actions in ([Put(key, b"1"), Put(key, b"2")], [Put(key, b"1"), Delete(key)]):
            with pytest.raises(CoordError):
                backend.store.txn([], actions)
        assert backend.other.get(key) is None

    def test_more_actions_than_etcd_takes_are_refused(self, backend: Backend):
        with pytest.raises(CoordError):
            backend.store.txn([], [Put(backend.key(str(i)), b"") for i in range(129)])

    def test_of_concurrent_creators_one_wins(self, backend: Backend):
        def create(i: int) -> int:
            store = backend.store if i % 2 else backend.other
            key = backend.key(f"race/{i % 20}")
            return store.txn([CreatedAt(key, 0)], [Put(key, str(i).encode())]).succeeded

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(160)))
        assert sum(won) == 20
        for item in backend.store.list(backend.key("race/")).items:
            assert won[int(item.value)]


class TestLeases:
    def test_a_lease_that_ends_takes_its_keys_and_watches_see_it(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        lease = backend.store.grant(TTL_S)
        for name in ("a", "b"):
            revision = backend.store.put(backend.key(name), b"", lease)
        assert backend.other.get(backend.key("a")).lease == lease
        reader = reading(backend.root, revision + 1)
        backend.let_pass(TTL_S)
        eventually(lambda: len(reader.changes) == 2, what="two deletes")
        assert [(change.key, change.value) for change in reader.changes] == [
            (backend.key("a"), None),
            (backend.key("b"), None),
        ]
        assert len({change.revision for change in reader.changes}) == 1
        assert backend.other.list(backend.root).items == ()

    def test_a_refreshed_lease_lives_on(self, backend: Backend):
        lease = backend.store.grant(TTL_S)
        backend.store.put(backend.key("a"), b"", lease)
        for _ in range(3):
            backend.let_pass(TTL_S / 2)
            assert backend.store.refresh(lease) == TTL_S
        assert backend.other.get(backend.key("a")) is not None

    def test_every_use_of_a_dead_lease_says_so(self, backend: Backend):
        lease = backend.store.grant(TTL_S)
        backend.store.put(backend.key("a"), b"", lease)
        backend.other.revoke(lease)
        assert backend.other.get(backend.key("a")) is None
        for use in (
            lambda: backend.store.refresh(lease),
            lambda: backend.store.put(backend.key("a"), b"", lease),
            lambda: backend.store.txn([], [Put(backend.key("b"), b""), Put(backend.key("a"), b"", lease)]),
        ):
            with pytest.raises(LeaseLostError):
                use()
        assert backend.other.list(backend.root).items == ()
        backend.store.revoke(lease)  # gone is no error

    def test_a_dead_lease_of_a_refused_transaction_does_not_matter(self, backend: Backend):
        backend.store.put(backend.key("a"), b"")
        actions = [Put(backend.key("b"), b"", 12345)]
        assert not backend.store.txn([CreatedAt(backend.key("a"), 0)], actions).succeeded

    def test_a_key_put_again_follows_its_new_lease(self, backend: Backend):
        old, new = backend.store.grant(60), backend.store.grant(60)
        for name, lease in (("moved", new), ("freed", 0)):
            backend.store.put(backend.key(name), b"", old)
            backend.store.put(backend.key(name), b"", lease)
        backend.store.revoke(old)
        assert len(backend.other.list(backend.root).items) == 2
        backend.store.revoke(new)
        assert [item.key for item in backend.other.list(backend.root).items] == [backend.key("freed")]


class TestWatches:
    def test_changes_from_a_past_revision_on(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        backend.store.put(backend.key("a"), b"0")
        start = backend.store.put(backend.key("a"), b"1")
        backend.store.delete(backend.key("a"))
        backend.store.put(backend.root[:-1] + "-not-mine", b"")
        reader = reading(backend.root, start)
        backend.other.put(backend.key("b"), b"2")
        eventually(lambda: len(reader.changes) == 3)
        told = [(change.key, change.value and change.value.value) for change in reader.changes]
        assert told == [(backend.key("a"), b"1"), (backend.key("a"), None), (backend.key("b"), b"2")]
        assert [change.revision for change in reader.changes][:2] == [start, start + 1]
        assert reader.changes[2].value == backend.other.get(backend.key("b"))

    def test_list_then_watch_misses_and_repeats_nothing(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        watching = threading.Event()

        def write() -> None:
            for i in range(300):
                backend.other.put(backend.key(f"{i % 7}"), str(i).encode())
                if i == 200:  # the last ones come after the watch, the first ones before or beside it
                    watching.wait(10)

        writer = threading.Thread(target=write)
        writer.start()
        eventually(lambda: len(backend.store.list(backend.root).items) == 7)
        listing = backend.store.list(backend.root)
        reader = reading(backend.root, listing.revision + 1)
        watching.set()
        writer.join()
        eventually(lambda: reader.changes and reader.changes[-1].value.value == b"299")
        seen = {item.key: item.value for item in listing.items}
        for change in reader.changes:
            assert change.revision > listing.revision
            seen[change.key] = change.value.value
        assert seen == {item.key: item.value for item in backend.store.list(backend.root).items}
        told = [int(change.value.value) for change in reader.changes]
        assert told == list(range(told[0], 300)), "each change once, in order"

    def test_a_transaction_arrives_whole(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        start = backend.store.put(backend.key("c"), b"")
        reader = reading(backend.root, start + 1)
        backend.store.txn(
            [], [Put(backend.key("a"), b""), Put(backend.key("b"), b""), Delete(backend.key("c"))]
        )
        eventually(lambda: reader.changes)
        assert len(reader.changes) == 3

    def test_close_from_another_thread_ends_the_iteration(
        self, backend: Backend, reading: Callable[..., Reader]
    ):
        reader = reading(backend.root, 0)
        reader.close()
        assert reader.error is None
        reader.close()  # twice is no error

    def test_a_watch_from_a_compacted_revision_says_so(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        start = backend.store.put(backend.key("a"), b"1")
        end = [backend.store.put(backend.key("a"), b"2") for _ in range(3)][-1]
        backend.store.compact(end)
        reader = reading(backend.root, start)
        eventually(lambda: reader.error)
        assert isinstance(reader.error, CompactedError)
        assert backend.store.get(backend.key("a")).mod_revision == end, "the newest is still there"
        follow = reading(backend.root, end)
        eventually(lambda: follow.changes)
        assert follow.changes[0].revision == end

    def test_compaction_does_not_disturb_a_watch_that_is_up_to_date(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        revision = backend.store.put(backend.key("a"), b"1")
        reader = reading(backend.root, revision)
        eventually(lambda: reader.changes)
        backend.store.compact(backend.store.put(backend.key("a"), b"2"))
        eventually(lambda: len(reader.changes) == 2)
        backend.store.put(backend.key("a"), b"3")
        eventually(lambda: len(reader.changes) == 3)
        assert reader.error is None

    def test_compaction_of_what_is_gone_or_yet_to_come_is_refused(self, backend: Backend):
        revision = backend.store.put(backend.key("a"), b"1")
        backend.store.compact(revision)
        with pytest.raises(CompactedError):
            backend.store.compact(revision - 1)
        with pytest.raises(CoordError):
            backend.store.compact(revision + 1_000_000)

    def test_an_idle_watch_gives_signs_of_life(
        self, backend: Backend, reading: Callable[..., Reader], eventually: Callable[..., Any]
    ):
        reader = reading(backend.root, 0)
        backend.let_pass(2.5)
        eventually(lambda: reader.batches >= 1)
        assert reader.changes == []

    def test_closing_the_store_ends_its_watches(self, backend: Backend, reading: Callable[..., Reader]):
        reader = reading(backend.root, 0)
        backend.store.close()
        reader.thread.join(5)
        assert not reader.thread.is_alive()
        for use in (
            lambda: backend.store.get("a"),
            lambda: backend.store.put("a", b""),
            lambda: backend.store.refresh(1),
            lambda: backend.store.watch("a", 0),
        ):
            with pytest.raises(CoordUnavailableError):
                use()


# ---------------------------------------------------------------- a real etcd that misbehaves


def _stopped(pid: int) -> bool:
    """A signal reaches the threads of a process one after the other: on a busy machine the last may still answer."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.slow
class TestBrokenEtcd:
    def test_no_etcd_there_is_one_clear_error(self):
        began = time.monotonic()
        with pytest.raises(CoordUnavailableError, match=r"no etcd answers at 127\.0\.0\.1:1 .*HOST:PORT"):
            connect("127.0.0.1:1", deadline_s=1.0)
        assert time.monotonic() - began < 3

    def test_calls_to_a_frozen_etcd_end_at_their_deadline(
        self, own_etcd: EmbeddedEtcd, eventually: Callable[..., Any]
    ):
        store = EtcdStore.connect(own_etcd.endpoint, deadline_s=1.0, progress_s=0.3, stale_s=1.0)
        lease = store.grant(60)
        reader = Reader(store.watch("/", 0))
        eventually(lambda: reader.batches)
        os.kill(own_etcd.pid, signal.SIGSTOP)
        eventually(lambda: _stopped(own_etcd.pid), what="every thread of etcd stands still")
        try:
            for call, expected in (
                (lambda: store.get("/a"), CoordUnavailableError),
                (lambda: store.put("/a", b""), CoordUnknownError),
                (lambda: store.txn([], [Delete("/a")]), CoordUnknownError),
                (lambda: store.refresh(lease), CoordUnknownError),
            ):
                began = time.monotonic()
                with pytest.raises(expected):
                    call()
                assert 0.9 < time.monotonic() - began < 5.0
            reader.thread.join(3)
            assert isinstance(reader.error, CoordUnavailableError), "silence is not taken for peace"
            assert "silent" in str(reader.error)
        finally:
            os.kill(own_etcd.pid, signal.SIGCONT)
        eventually(lambda: _answers(store), what="the same store goes on")
        assert store.refresh(lease) == 60
        store.close()

    def test_a_killed_etcd_is_an_error_everywhere_at_once(self, own_etcd: EmbeddedEtcd):
        store = connect(own_etcd.endpoint)
        reader = Reader(store.watch("/", 0))
        own_etcd.process.kill()
        own_etcd.process.wait()
        reader.thread.join(5)
        assert isinstance(reader.error, CoordUnavailableError)
        for call in (lambda: store.get("/a"), lambda: store.put("/a", b""), lambda: store.refresh(1)):
            began = time.monotonic()
            with pytest.raises(CoordUnavailableError):  # a connection refused proves that nothing was sent
                call()
            assert time.monotonic() - began < 3.5
        store.close()

    def test_another_endpoint_takes_over(self, own_etcd: EmbeddedEtcd, etcd: EmbeddedEtcd):
        store = connect(f"{own_etcd.endpoint},{etcd.endpoint}")
        store.get("/a")
        own_etcd.process.kill()
        own_etcd.process.wait()
        until = time.monotonic() + 5
        while not _answers(store):
            assert time.monotonic() < until
        store.close()

    def test_two_hundred_reconnects_leave_threads_and_descriptors_as_they_were(
        self, etcd: EmbeddedEtcd, eventually: Callable[..., Any]
    ):
        def once() -> None:
            store = connect(etcd.endpoint)
            watch = store.watch("/", 0)
            next(iter(watch))
            store.refresh(store.grant(60))
            store.close()

        def counts() -> tuple[int, int]:
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        for _ in range(5):
            once()
        before = counts()
        for _ in range(200):
            once()
        eventually(
            lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), what="none left"
        )


def _answers(store: EtcdStore | CoordStore) -> bool:
    try:
        store.get("/a")
    except CoordUnavailableError:
        return False
    return True

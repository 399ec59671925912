"""The agent in etcd: a lease, two keys under it, and a few keys that it watches.

Calls block, so they run in threads: one for writes (one at a time, the newest status wins), one per watched key, and the
lease keeper's. What happens there reaches the event loop by `call_soon_threadsafe`. When etcd is away nothing else stops:
writes are repeated, watches are opened again, and a lost lease is replaced under the same incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from surefoot.agent import decide
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.store import (
    CompactedError,
    CoordError,
    CoordStore,
    KeyValue,
    LeaseLostError,
    Put,
    Watch,
)
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

RELIST_S = 15.0
"""A watch is checked against a fresh listing this often (CTL-21): an event that was swallowed is found."""

COMPLAINT_S = 10.0
"""An outage is logged at most once in so long (CTL-29)."""


class Complaints:
    """Logs the failures of one thing, at most once per `COMPLAINT_S`, and its recovery. For one thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0
        self._told = float("-inf")

    def failed(self, error: Exception) -> int:
        """Returns the number of failures in a row."""
        self._failures += 1
        if time.monotonic() - self._told >= COMPLAINT_S:
            self._told = time.monotonic()
            log.warning("%s: %s", self._what, error)
        return self._failures

    def worked(self) -> None:
        if self._failures:
            log.info("%s: works again after %d failures", self._what, self._failures)
        self._failures = 0
        self._told = float("-inf")


class KeyWatch:
    """Follows one key in a thread of its own.

    Args:
        deliver: called in the event loop with the key as it stands: once per look at the store and after each change, so
            the same value may come again; None where there is no such key.
    """

    def __init__(
        self, store: CoordStore, key: str, deliver: Callable[[KeyValue | None], None], rng: random.Random
    ) -> None:
        self._store = store
        self._key = key
        self._deliver = deliver
        self._relist_s = RELIST_S * rng.uniform(0.8, 1.2)
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"watch {key}", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends it; does not wait for the thread, which may be in a call with a deadline."""
        with self._lock:
            self._stopped.set()
            if self._watch is not None:
                self._watch.close()

    def _run(self) -> None:
        complaints = Complaints(f"watching {self._key}")
        while not self._stopped.is_set():
            try:
                revision = self._look()
                complaints.worked()
                self._follow(revision + 1)
            except CompactedError:
                continue
            except CoordError as e:
                if not self._stopped.is_set():
                    self._stopped.wait(decide.retry_delay_s(complaints.failed(e)))

    def _look(self) -> int:
        listing = self._store.list(
            self._key
        )  # the key as a prefix: a listing tells the revision to watch from
        self._tell(next((item for item in listing.items if item.key == self._key), None))
        return listing.revision

    def _follow(self, revision: int) -> None:
        """Until it is time to look again. Raises: CoordError."""
        look_again = time.monotonic() + self._relist_s
        watch = self._store.watch(self._key, revision)
        try:
            with self._lock:
                if self._stopped.is_set():
                    return
                self._watch = watch
            for changes in watch:
                for change in changes:
                    if change.key == self._key:
                        self._tell(change.value)
                if time.monotonic() >= look_again:
                    return
        finally:
            with self._lock:
                self._watch = None
            watch.close()

    def _tell(self, value: KeyValue | None) -> None:
        assert self._loop is not None
        if not self._stopped.is_set():
            try:
                self._loop.call_soon_threadsafe(self._deliver, value)
            except RuntimeError:
                self._stopped.set()  # the loop has ended


class Registration:
    """Keeps `nodes/<uid>` and `status/<uid>` as they should be.

    Args:
        info, status: make the values; called in the event loop.
        period_s: between heartbeats when nothing happens.
    """

    def __init__(
        self,
        store: CoordStore,
        keys: Keys,
        *,
        uid: str,
        ttl_s: int,
        period_s: float,
        info: Callable[[], wire.NodeInfo],
        status: Callable[[], wire.NodeStatus],
        rng: random.Random,
    ) -> None:
        self._store = store
        self._node_key = keys.node(uid)
        self._status_key = keys.status(uid)
        self._ttl_s = ttl_s
        self._period_s = period_s
        self._info = info
        self._status = status
        self._rng = rng
        self._io = ThreadPoolExecutor(1, "coord")
        self._bell = asyncio.Event()
        self._changed = True
        self._urgent = True
        self._complaints = Complaints("writing the heartbeat")
        # Only touched in the writing thread.
        self._keeper: LeaseKeeper | None = None
        self._registered: wire.NodeInfo | None = None

    def changed(self, *, urgent: bool = False) -> None:
        """The status has changed; `urgent` news is written at once."""
        self._changed = True
        if urgent and not self._urgent:
            self._urgent = True
        self._bell.set()

    async def run(self) -> None:
        """Write heartbeats until cancelled."""
        loop = asyncio.get_running_loop()
        written = float("-inf")
        while True:
            self._bell.clear()
            now = loop.time()
            due = decide.status_due_s(
                now, written_s=written, period_s=self._period_s, changed=self._changed, urgent=self._urgent
            )
            if due > now:
                await self._wait_for_bell(due - now)
                continue
            pause = await self.write_now()
            written = loop.time() if not pause else written
            if pause:
                self._changed = True
                await asyncio.sleep(pause)

    async def write_now(self) -> float:
        """One write; returns 0, or the pause before the next try where it failed."""
        self._changed = self._urgent = False
        failpoint("heartbeat.before_put")
        info, status = self._info(), self._status()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._io, self._write, info, status, loop)
        except LeaseLostError as e:
            log.warning("registering again: %s", e)
            return decide.retry_delay_s(self._complaints.failed(e))
        except CoordError as e:
            return decide.retry_delay_s(self._complaints.failed(e))
        self._complaints.worked()
        return 0.0

    async def close(self, *, revoke: bool = True) -> None:
        """Give the lease back (the keys go with it), after `run` was cancelled."""
        await asyncio.get_running_loop().run_in_executor(self._io, self._leave, revoke)
        self._io.shutdown(wait=False)

    async def _wait_for_bell(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            pass

    # ------------------------------------------------------------ in the writing thread

    def _write(self, info: wire.NodeInfo, status: wire.NodeStatus, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if self._keeper is not None:
                self._keeper.check()
            else:
                self._keeper = self._new_lease(loop)
            self._put(info, status, self._keeper.lease)
        except LeaseLostError:
            self._leave(revoke=False)
            raise

    def _new_lease(self, loop: asyncio.AbstractEventLoop) -> LeaseKeeper:
        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(lambda: self.changed(urgent=True))

        keeper = LeaseKeeper(self._store, self._ttl_s, on_lost=lost, rng=self._rng)
        keeper.start()
        return keeper

    def _put(self, info: wire.NodeInfo, status: wire.NodeStatus, lease: int) -> None:
        put_status = Put(self._status_key, wire.encode(status), lease)
        if info == self._registered:
            self._store.put(put_status.key, put_status.value, lease)
        else:
            self._store.txn([], [Put(self._node_key, wire.encode(info), lease), put_status])
            self._registered = info

    def _leave(self, revoke: bool) -> None:
        if self._keeper is not None:
            self._keeper.stop(revoke=revoke)
        self._keeper = None
        self._registered = None

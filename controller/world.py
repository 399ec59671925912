"""Follows the job's keys: list, watch from there, list again every 15 s and whenever the watch came to an end.

A watch alone is not believed (events get lost: CTL-21, CTL-22, CTL-23). Every listing goes to the core, which compares it
with what it has and counts the difference. Values that cannot be read, a newer writer's perhaps, are left out and said once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from surefoot.controller import wire
from surefoot.controller.core.events import (
    Event,
    NodeAppeared,
    NodeListed,
    NodeVanished,
    PointerSeen,
    StatusReported,
    WorldListed,
)
from surefoot.controller.keys import Keys
from surefoot.controller.store import (
    Change,
    CompactedError,
    CoordError,
    CoordStore,
    KeyValue,
    Listing,
    Watch,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = (0.2, 2.0)
"""First and longest pause before etcd is asked again."""


class WorldReader:
    """From etcd's keys to the core's events."""

    def __init__(self, job: str) -> None:
        self.keys = Keys(job)
        self._unreadable: set[str] = set()

    def listed(self, listing: Listing) -> WorldListed:
        """A whole listing of the job's root."""
        items = {kv.key: kv for kv in listing.items}
        nodes = [(self._read(wire.NodeInfo, kv), kv) for kv in _under(items, self.keys.nodes)]
        statuses = [self._read(wire.NodeStatus, kv) for kv in _under(items, self.keys.statuses)]
        incidents = [self._read(wire.Incident, kv) for kv in _under(items, self.keys.incidents)]
        return WorldListed(
            revision=listing.revision,
            nodes=tuple(
                NodeListed(info=info, revision=kv.mod_revision) for info, kv in nodes if info is not None
            ),
            statuses=tuple(s for s in statuses if s is not None),
            pointer=self._read(wire.PlanPointer, items.get(self.keys.plan)),
            outcome=self._read(wire.Outcome, items.get(self.keys.outcome)),
            incidents=tuple(i for i in incidents if i is not None),
        )

    def changed(self, changes: Iterable[Change]) -> list[Event]:
        """A batch of watch events; keys that are no business of the core's give none."""
        return [event for change in changes if (event := self._event(change)) is not None]

    def _event(self, change: Change) -> Event | None:
        key, value = change.key, change.value
        if key.startswith(self.keys.nodes):
            if value is None:
                return NodeVanished(uid=key.removeprefix(self.keys.nodes), revision=change.revision)
            info = self._read(wire.NodeInfo, value)
            return NodeAppeared(info=info, revision=change.revision) if info is not None else None
        if key.startswith(self.keys.statuses) and value is not None:
            status = self._read(wire.NodeStatus, value)
            return StatusReported(status=status) if status is not None else None
        if key == self.keys.plan:
            return PointerSeen(pointer=self._read(wire.PlanPointer, value), revision=change.revision)
        return None

    def _read(self, kind: type[T], kv: KeyValue | None) -> T | None:
        if kv is None:
            return None
        try:
            return wire.decode(kind, kv.value)
        except (msgspec.ValidationError, msgspec.DecodeError) as e:
            if kv.key not in self._unreadable:
                self._unreadable.add(kv.key)
                log.warning("etcd key %s cannot be read and is left out: %s", kv.key, e)
            return None


def _under(items: dict[str, KeyValue], prefix: str) -> list[KeyValue]:
    return [kv for key, kv in items.items() if key.startswith(prefix)]


class WorldFollower:
    """Two threads for the length of one term: one watches, one lists again. `stop` ends both."""

    def __init__(
        self,
        store: CoordStore,
        reader: WorldReader,
        post: Callable[[Iterable[Event]], None],
        *,
        relist_s: float,
    ) -> None:
        self._store, self._reader, self._post, self._relist_s = store, reader, post, relist_s
        self._stopped = threading.Event()
        self._relisting = threading.Lock()
        self._watch: Watch | None = None
        self._threads = [
            threading.Thread(target=self._follow, name="world-watch", daemon=True),
            threading.Thread(target=self._relist, name="world-relist", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads soon; does not wait for them."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.close()

    def _list(self) -> int:
        """List and post; returns the revision to watch from."""
        with self._relisting:  # listings reach the core in the order of their revisions
            listing = self._store.list(self._reader.keys.root)
            self._post([self._reader.listed(listing)])
        return listing.revision + 1

    def _follow(self) -> None:
        pause_s, failed = RETRY_S[0], False
        while not self._stopped.is_set():
            try:
                revision = self._list()
                if failed:
                    log.info("etcd answers again")
                pause_s, failed = RETRY_S[0], False
                self._watch_from(revision)
            except CompactedError as e:
                log.info("the watch fell behind, listing again: %s", e)
            except CoordError as e:
                if not failed:
                    log.warning("etcd does not answer, trying on: %s", e)
                failed = True
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])

    def _watch_from(self, revision: int) -> None:
        watch = self._store.watch(self._reader.keys.root, revision)
        self._watch = watch
        try:
            if self._stopped.is_set():
                return
            for batch in watch:
                if events := self._reader.changed(batch):
                    self._post(events)
        finally:
            watch.close()

    def _relist(self) -> None:
        while not self._stopped.wait(self._relist_s):
            try:
                self._list()
            except CoordError as e:
                log.debug("relist failed: %s", e)  # the watching thread says so, once

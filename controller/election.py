"""Election: one key under a lease, created if it does not exist. Its creation revision is the token that fences every write.

A campaign is one transaction. Where the outcome is unknown the key is read back: its lease tells whose it is. Whoever
lost waits, watching the key, and campaigns again when it is gone, after a pause of random length so that standbys do not
all come at once (CTL-14). Leadership ends when the lease may have ended, counted on this process's monotonic clock from
before the last renewal was sent (leases.py); a process that was stopped meanwhile finds that out before it acts, for it asks
`Leadership.alive` first, and each of its fenced writes is refused anyway.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot import history
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.store import CoordError, CoordStore, CreatedAt, KeyValue, Put
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

PAUSE_S = (0.05, 0.5)
"""A campaign comes so long after the key was seen to be gone, drawn evenly."""

RETRY_S = (0.5, 5.0)
"""First and longest pause after etcd failed a campaign, jittered by half."""

LOOK_S = 2.0
"""The leader key and the outcome are read at least this often by whoever waits, whatever the watch says."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """A won election. `token`: the key's creation revision."""

    token: int
    keeper: LeaseKeeper
    over: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when it has ended, whoever ended it."""

    def resign(self) -> None:
        """Give it up; another campaign follows. What is late, and speaks of a leadership gone by, ends no later one."""
        self.over.set()

    def alive(self) -> bool:
        """Does the lease certainly live on? Never blocks, and is right also right after a stop of the process."""
        return self.keeper.remaining_s() > 0.0


class Election:
    """Campaigns, holds, loses, campaigns again, in a thread of its own, until `stop`.

    Args:
        store: etcd.
        name: this controller's, unique among those of the job.
        ttl_s: of the lease.
        on_elected: called with the `Leadership`, from the election's thread.
        on_deposed: called with the reason, at most once per leadership.
        on_outcome: called by whoever does not lead when the outcome of the job is found; the election is over then.
        is_ours: does an outcome speak of this run?
        rng: spreads pauses and renewals.
    """

    def __init__(
        self,
        store: CoordStore,
        keys: Keys,
        *,
        name: str,
        ttl_s: int,
        on_elected: Callable[[Leadership], None],
        on_deposed: Callable[[str], None],
        on_outcome: Callable[[wire.Outcome], None],
        is_ours: Callable[[wire.Outcome], bool],
        rng: random.Random,
    ) -> None:
        self._store, self._keys, self._name, self._ttl_s = store, keys, name, ttl_s
        self._on_elected, self._on_deposed = on_elected, on_deposed
        self._on_outcome, self._is_ours = on_outcome, is_ours
        self._rng = rng
        self._stopped = threading.Event()
        self._over = threading.Event()
        """Of the present campaign, and of the leadership that it won."""
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Resign for good: the key is gone when this returns, if etcd answers in time."""
        self._stopped.set()
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        pause_s, failed = RETRY_S[0], False
        while not self._stopped.is_set():
            try:
                if not self._await_vacancy():
                    return
                self._campaign_and_hold()
                pause_s, failed = RETRY_S[0], False
            except CoordError as e:
                if not failed:
                    log.warning("no election while etcd does not answer: %s", e)
                failed = True
                self._stopped.wait(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, RETRY_S[1])

    def _await_vacancy(self) -> bool:
        """Wait until nobody leads; False if the job is over or this election is stopped. Raises CoordError."""
        first = True
        while not self._stopped.is_set():
            outcome = self._outcome()
            if outcome is not None:
                self._on_outcome(outcome)
                return False
            holder = self._store.get(self._keys.leader)
            if holder is None:
                self._stopped.wait(0.0 if first else self._rng.uniform(*PAUSE_S))
                return not self._stopped.is_set()
            if first:
                log.info("controller %s leads, standing by", holder.value.decode("utf-8", "replace"))
            first = False
            self._watch_for_its_end(holder)
        return False

    def _outcome(self) -> wire.Outcome | None:
        kv = self._store.get(self._keys.outcome)
        if kv is None:
            return None
        outcome = wire.decode(wire.Outcome, kv.value)
        return outcome if self._is_ours(outcome) else None

    def _watch_for_its_end(self, holder: KeyValue) -> None:
        """Return when the key may have ended, or after `LOOK_S`."""
        watch = self._store.watch(self._keys.leader, holder.mod_revision + 1)
        timer = threading.Timer(LOOK_S, watch.close)
        timer.daemon = True
        timer.start()
        try:
            for batch in watch:
                if any(change.value is None for change in batch):
                    return
        finally:
            timer.cancel()
            watch.close()

    def _campaign_and_hold(self) -> None:
        over = self._over = threading.Event()
        if self._stopped.is_set():
            return
        keeper = LeaseKeeper(
            self._store, self._ttl_s, on_lost=lambda reason: self._lost(over, reason), rng=self._rng
        )
        keeper.start()
        try:
            token = self._campaign(keeper)
            if token is not None:
                failpoint("leader.after_win")
                history.note("elected", name=self._name, token=token)
                log.info("elected (token %d)", token)
                self._on_elected(Leadership(token, keeper, over))
                over.wait()
        finally:
            keeper.stop()

    def _lost(self, over: threading.Event, reason: str) -> None:
        history.note("deposed", name=self._name, reason=reason)
        self._on_deposed(reason)
        over.set()

    def _campaign(self, keeper: LeaseKeeper) -> int | None:
        """One transaction; the token if it was won. Raises CoordError."""
        with history.operation("campaign", name=self._name) as result:
            try:
                won = self._store.txn(
                    [CreatedAt(self._keys.leader, 0)],
                    [Put(self._keys.leader, self._name.encode(), keeper.lease)],
                )
                token = won.revision if won.succeeded else None
            except CoordError:
                # Refused, unanswered or unknown: the key tells. What takes effect later still ends with the lease.
                token = self._token_of(keeper)
                if token is None:
                    raise
            result["token"] = token
        return token

    def _token_of(self, keeper: LeaseKeeper) -> int | None:
        """The creation revision of the key, if it stands under this campaign's lease."""
        kv = self._store.get(self._keys.leader)
        return kv.create_revision if kv is not None and kv.lease == keeper.lease else None

"""`LeaseKeeper`: keeps one lease alive, and says so the moment it may not be alive any more.

Time counts from *before* a request was sent, on this process's monotonic clock: etcd's own count can only have begun
later, so by the time etcd ends the lease, its holder knows. A lease is renewed every third of its TTL, a little early by
chance (so that thousands of agents that started together do not stay together), and a renewal that failed is tried again
at the same pace under the same lease. Only etcd's word, or a whole TTL without success, ends it. A keeper that dies of
something else says that too: nothing here ends in silence.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from surefoot.controller.store import CoordError, CoordStore, LeaseLostError

log = logging.getLogger(__name__)

_EARLY = (0.8, 1.0)
"""A renewal comes after this part of a third of the TTL, drawn evenly: three tries fit into a TTL even so."""


class LeaseKeeper:
    """Holds a lease in a thread of its own from `start` until `stop`, or until it is lost.

    Args:
        store: Where. Each of its calls should take less than a third of `ttl_s` (see `connect`).
        ttl_s: Seconds.
        on_lost: Called once, from the keeper's thread, with the reason, when the lease has ended or must be taken for
            ended; later than that by one call of `store` at most (`remaining_s` and `check` are never late). Not called
            after `stop`. It must not call `stop`.
        rng: Spreads the renewals.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        store: CoordStore,
        ttl_s: int,
        *,
        on_lost: Callable[[str], None],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._ttl_s, self._on_lost = store, ttl_s, on_lost
        self._rng, self._clock = rng, clock
        self._stopped = threading.Event()
        self._lost: str | None = None
        self._lease = 0
        self._good_until = 0.0
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    @property
    def lease(self) -> int:
        """The lease, to put keys under. 0 before `start`."""
        return self._lease

    def start(self) -> int:
        """Grant the lease (blocks for one call) and begin to keep it; returns it. Raises: CoordError."""
        self.grant()
        self._thread.start()
        return self._lease

    def grant(self) -> None:
        """`start` without the thread, for those who call `renew` themselves. Raises: CoordError."""
        sent = self._clock()
        self._lease = self._store.grant(self._ttl_s)
        self._good_until = sent + self._ttl_s

    def remaining_s(self) -> float:
        """Seconds for which the lease certainly lives on; 0 when it may have ended. Any thread, never blocks."""
        return 0.0 if self._lost is not None else max(0.0, self._good_until - self._clock())

    def check(self) -> None:
        """For loops that rely on the lease.

        Raises:
            LeaseLostError: it is lost, its time has passed without a renewal, or the keeper is dead.
        """
        if self._lost is None and not self._stopped.is_set() and not self._thread.is_alive():
            self._lost = "its keeper is not running"
        if self._lost is not None:
            raise LeaseLostError(f"lease {self._lease:x} is lost: {self._lost}")
        if self.remaining_s() == 0.0:
            raise LeaseLostError(f"lease {self._lease:x} was not renewed for {self._ttl_s} s")

    def stop(self, *, revoke: bool = True) -> None:
        """End the keeper and, with `revoke`, the lease and what stands under it (one call, at best effort)."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if revoke and self._lease and self._lost is None:
            try:
                self._store.revoke(self._lease)
            except CoordError as e:
                log.info(
                    "lease %x was not revoked, it ends by itself within %d s: %s", self._lease, self._ttl_s, e
                )

    # -- the thread

    def _run(self) -> None:
        reason = "its keeper ended"
        try:
            # The first renewal at any moment of the interval: keepers that started together part here.
            delay = self._rng.uniform(0.0, self._ttl_s / 3)
            while not self._stopped.wait(delay):
                delay = self.renew()
        except LeaseLostError as e:
            reason = str(e)
        except BaseException as e:
            reason = f"its keeper died of {e!r}"
            raise
        finally:
            if not self._stopped.is_set():
                self._lost = reason
                log.warning("lease %x is lost: %s", self._lease, reason)
                self._on_lost(reason)

    def renew(self) -> float:
        """Try once to renew; returns the seconds to wait before the next try.

        Raises:
            LeaseLostError: etcd says so, or the whole TTL has passed without success.
        """
        sent = self._clock()
        try:
            self._store.refresh(self._lease)
        except LeaseLostError:
            raise
        except CoordError as e:
            self._note_failure(e)
        else:
            self._good_until = sent + self._ttl_s
            self._failures = 0
        now = self._clock()
        if now >= self._good_until:
            raise LeaseLostError(f"lease {self._lease:x} was not renewed for {self._ttl_s} s")
        pace = self._ttl_s / 3 * self._rng.uniform(*_EARLY)
        return max(0.0, min(sent + pace, self._good_until) - now)

    def _note_failure(self, error: CoordError) -> None:
        self._failures += 1
        if self._failures == 1:  # once per outage; its end, good or bad, is told elsewhere
            left = self.remaining_s()
            log.warning(
                "lease %x was not renewed, %.1f s are left, trying again: %s", self._lease, left, error
            )

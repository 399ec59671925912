"""The lease keeper on a real etcd: it keeps, and it knows when it does not."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.store import CoordStore, LeaseLostError, connect

pytestmark = pytest.mark.slow

TTL_S = 2
"""The least that etcd grants. A job's is 10 s at least."""


class Told:
    """What a keeper said, and when."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.at = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.at.set()


def test_a_key_lives_as_long_as_its_keeper(coord: CoordStore, job: str, eventually: Callable[..., Any]):
    told = Told()
    keeper = LeaseKeeper(coord, TTL_S, on_lost=told, rng=random.Random(0))
    coord.put(f"/{job}/a", b"", keeper.start())
    assert not told.at.wait(2 * TTL_S), told.reasons
    keeper.check()
    assert coord.get(f"/{job}/a") is not None
    keeper.stop()
    eventually(lambda: coord.get(f"/{job}/a") is None)
    assert told.reasons == []


def test_a_lease_revoked_by_somebody_else_is_told_at_the_next_renewal(coord: CoordStore, job: str):
    told = Told()
    keeper = LeaseKeeper(coord, TTL_S, on_lost=told, rng=random.Random(0))
    coord.revoke(keeper.start())
    assert told.at.wait(TTL_S)
    with pytest.raises(LeaseLostError):
        keeper.check()
    keeper.stop()


def test_an_etcd_that_is_silent_for_a_moment_costs_nothing_and_for_a_ttl_the_lease(own_etcd: EmbeddedEtcd):
    store = connect(own_etcd.endpoint, deadline_s=0.5)
    told = Told()
    keeper = LeaseKeeper(store, 3, on_lost=told, rng=random.Random(0))
    lease = keeper.start()
    os.kill(own_etcd.pid, signal.SIGSTOP)
    assert not told.at.wait(1.5), "single failures are tried again"
    os.kill(own_etcd.pid, signal.SIGCONT)
    assert not told.at.wait(1.5), told.reasons
    assert keeper.lease == lease
    os.kill(own_etcd.pid, signal.SIGSTOP)
    frozen = time.monotonic()
    assert told.at.wait(5)
    assert time.monotonic() - frozen < 3 + 0.5 + 0.3, "one TTL, and at most one call that was on its way"
    assert keeper.remaining_s() == 0
    keeper.stop()
    os.kill(own_etcd.pid, signal.SIGCONT)
    store.close()

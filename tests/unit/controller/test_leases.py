"""The lease keeper on a model of etcd and a clock of the test's own."""

import random
import threading

import pytest

from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.store import CoordUnavailableError, LeaseLostError, MemoryStore

TTL_S = 10


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Flaky(MemoryStore):
    """A model whose renewals fail on cue: `failures` holds what each next refresh raises, or None; `slow_s` each takes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.failures: list[Exception | None] = []
        self.slow_s = 0.0
        self.refreshed = threading.Event()

    def refresh(self, lease: int) -> float:
        self.refreshed.set()
        try:
            if self.failures and (failure := self.failures.pop(0)):
                raise failure
            return super().refresh(lease)
        finally:
            self.clock.now += self.slow_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Flaky:
    return Flaky(clock)


def keeper(store: MemoryStore, clock: Clock, lost: list[str] | None = None, seed: int = 0) -> LeaseKeeper:
    on_lost = (lost if lost is not None else []).append
    return LeaseKeeper(store, TTL_S, on_lost=on_lost, rng=random.Random(seed), clock=clock)


class TestRenewal:
    def test_it_goes_on_for_ever_at_a_third_of_the_ttl(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        delays = []
        for _ in range(100):
            delays.append(kept.renew())
            clock.now += delays[-1]
        assert 0.8 * TTL_S / 3 <= min(delays) < max(delays) <= TTL_S / 3
        assert len(set(delays)) == 100, "each renewal has a jitter of its own"

    def test_time_counts_from_before_the_request(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        store.slow_s = 2.0
        sent = clock.now
        delay = kept.renew()
        assert kept.remaining_s() == pytest.approx(TTL_S - 2.0)
        assert clock.now + delay <= sent + TTL_S / 3

    def test_single_failures_are_tried_again_under_the_same_lease(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        lease = kept.lease
        for _ in range(10):
            store.failures = [CoordUnavailableError("reset"), None]
            clock.now += kept.renew()
            clock.now += kept.renew()
        assert kept.lease == lease
        assert kept.remaining_s() > 0

    def test_a_whole_ttl_without_success_is_the_end(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        granted = clock.now
        store.failures = [CoordUnavailableError("away")] * 10
        for _ in range(3):
            clock.now += kept.renew()
        clock.now = granted + TTL_S - 0.01
        assert kept.renew() == pytest.approx(0.01), "waits for the end, not for the next try after it"
        clock.now = granted + TTL_S
        with pytest.raises(LeaseLostError):
            kept.renew()

    def test_etcds_word_is_the_end_at_once(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        store.revoke(kept.lease)
        with pytest.raises(LeaseLostError):
            kept.renew()


def test_renewals_of_many_agents_do_not_stay_together(clock: Clock):
    """CTL-26 in small: 512 keepers start at once; after the first interval no 100 ms hold more than 3 times the mean."""
    moments = []
    for seed in range(512):
        at = random.Random(seed).uniform(0, TTL_S / 3)
        rng = random.Random(seed + 10_000)
        while at < 60:
            moments.append(at)
            at += TTL_S / 3 * rng.uniform(0.8, 1.0)
    windows = [0] * 600
    for at in moments:
        windows[int(at * 10)] += 1
    assert max(windows[40:]) <= 3 * len(moments) / 600


class TestThread:
    """Short TTLs in real time are the model's: nothing here waits for one to pass."""

    def test_stop_revokes_and_is_not_a_loss(self, store: Flaky, clock: Clock):
        lost: list[str] = []
        kept = keeper(store, clock, lost)
        lease = kept.start()
        store.put("/a", b"", lease)
        kept.check()
        kept.stop()
        assert store.get("/a") is None
        assert lost == []

    def test_stop_can_leave_the_lease_to_end_by_itself(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        store.put("/a", b"", kept.start())
        kept.stop(revoke=False)
        assert store.get("/a") is not None

    @pytest.mark.parametrize(
        ("failure", "reason"),
        [(LeaseLostError("gone"), "gone"), (ZeroDivisionError("a bug"), "ZeroDivisionError")],
    )
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_loss_and_the_keepers_own_death_are_told(
        self, store: Flaky, clock: Clock, failure: Exception, reason: str
    ):
        told = threading.Event()
        lost: list[str] = []

        def on_lost(why: str) -> None:
            lost.append(why)
            told.set()

        store.failures = [failure]
        kept = LeaseKeeper(store, 1, on_lost=on_lost, rng=random.Random(1), clock=clock)
        kept.start()
        assert told.wait(5)
        assert len(lost) == 1
        assert reason in lost[0]
        assert kept.remaining_s() == 0
        with pytest.raises(LeaseLostError, match=reason):
            kept.check()
        kept.stop()

    def test_check_sees_a_time_that_ran_out_before_the_keeper_says_so(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.start()
        clock.now += TTL_S
        with pytest.raises(LeaseLostError, match="not renewed"):
            kept.check()
        kept.stop()

    def test_check_sees_a_keeper_that_is_not_running(self, store: Flaky, clock: Clock):
        kept = keeper(store, clock)
        kept.grant()
        with pytest.raises(LeaseLostError, match="not running"):
            kept.check()

    def test_an_etcd_that_is_away_fails_the_start(self, store: Flaky, clock: Clock):
        store.close()
        with pytest.raises(CoordUnavailableError):
            keeper(store, clock).start()

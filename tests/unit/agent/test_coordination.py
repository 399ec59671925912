"""The agent in the model of etcd: registration, a lost lease, outages, watches that end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from surefoot.agent.coordination import KeyWatch, Registration
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.store import (
    CoordUnavailableError,
    CreatedAt,
    Delete,
    KeyValue,
    MemoryStore,
    ModifiedAt,
    Put,
    TxnResult,
)

KEYS = Keys("gpt")


class MoodyStore(MemoryStore):
    """Fails calls while `away`."""

    away = False

    def _mood(self) -> None:
        if self.away:
            raise CoordUnavailableError("away")

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        self._mood()
        return super().put(key, value, lease)

    def txn(self, conditions: Sequence[CreatedAt | ModifiedAt], actions: Sequence[Put | Delete]) -> TxnResult:
        self._mood()
        return super().txn(conditions, actions)


class Told:
    """What the agent would tell, made here."""

    def __init__(self) -> None:
        self.seq = 0
        self.port = 1

    def status(self) -> wire.NodeStatus:
        self.seq += 1
        return wire.NodeStatus(uid="n0", incarnation="i", seq=self.seq, state="parked")

    def info(self) -> wire.NodeInfo:
        return wire.NodeInfo(
            uid="n0",
            incarnation="i",
            host="h",
            control_port=2,
            flight_port=self.port,
            pid=1,
            slots=2,
            code_version="",
        )


@asynccontextmanager
async def registered(
    store: MemoryStore, told: Told, *, period_s: float = 30.0
) -> AsyncIterator[Registration]:
    registration = Registration(
        store,
        KEYS,
        uid="n0",
        ttl_s=10,
        period_s=period_s,
        info=told.info,
        status=told.status,
        rng=random.Random(1),
    )
    task = asyncio.create_task(registration.run())
    try:
        await until(lambda: store.get(KEYS.status("n0")) is not None)
        yield registration
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await registration.close()


async def until(condition: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 10
    while not condition():
        assert loop.time() < end
        await asyncio.sleep(0.005)


def seq(store: MemoryStore) -> int:
    found = store.get(KEYS.status("n0"))
    return wire.decode(wire.NodeStatus, found.value).seq if found is not None else 0


def flight_port(store: MemoryStore) -> int:
    found = store.get(KEYS.node("n0"))
    return wire.decode(wire.NodeInfo, found.value).flight_port if found is not None else 0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # pyright: ignore[reportArgumentType]


def test_both_keys_stand_under_one_lease_and_go_with_it() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with registered(store, Told()):
            node, status = store.get(KEYS.node("n0")), store.get(KEYS.status("n0"))
            assert node is not None
            assert status is not None
            assert node.lease == status.lease != 0
        assert store.list(KEYS.root).items == ()

    run(scenario)


def test_urgent_news_is_written_at_once_progress_is_coalesced_and_silence_broken() -> None:
    async def scenario() -> None:
        store, told = MemoryStore(), Told()
        async with registered(store, told) as registration:
            first = seq(store)
            registration.changed(urgent=True)
            await until(lambda: seq(store) > first)
            urgent = seq(store)
            loop = asyncio.get_running_loop()
            began = loop.time()
            while loop.time() - began < 0.5:
                registration.changed()
                await asyncio.sleep(0.005)
            assert 1 <= seq(store) - urgent <= 4
        store, told = MemoryStore(), Told()
        async with registered(store, told, period_s=0.05):
            await until(lambda: seq(store) > 3)

    run(scenario)


def test_a_lost_lease_is_replaced_under_the_same_incarnation() -> None:
    async def scenario() -> None:
        store, told = MemoryStore(), Told()
        async with registered(store, told) as registration:
            before = store.get(KEYS.node("n0"))
            assert before is not None
            store.revoke(before.lease)
            registration.changed()  # in life: the next heartbeat, or the lease keeper
            await until(lambda: store.get(KEYS.node("n0")) is not None)
            after = store.get(KEYS.node("n0"))
            assert after is not None
            assert after.lease != before.lease
            assert after.value == before.value

    run(scenario)


def test_an_outage_loses_no_news() -> None:
    async def scenario() -> None:
        store, told = MoodyStore(), Told()
        async with registered(store, told) as registration:
            store.away = True
            told.port = 7
            registration.changed(urgent=True)
            await asyncio.sleep(0.3)
            assert flight_port(store) == 1
            store.away = False
            await until(lambda: flight_port(store) == 7)

    run(scenario)


def test_a_watch_tells_what_stands_and_what_changes_and_survives_compaction_and_outages() -> None:
    async def scenario() -> None:
        store = MemoryStore(progress_s=0.02)
        seen: list[bytes | None] = []

        def deliver(value: KeyValue | None) -> None:
            seen.append(value.value if value is not None else None)

        store.put(KEYS.plan + "-not-this-one", b"x")
        watch = KeyWatch(store, KEYS.plan, deliver, random.Random(1))
        watch.start()
        await until(lambda: seen == [None])
        store.put(KEYS.plan, b"1")
        await until(lambda: seen[-1] == b"1")
        store.put(KEYS.plan + "-not-this-one", b"y")
        store.put(KEYS.plan, b"2")
        await until(lambda: seen[-1] == b"2")
        store.delete(KEYS.plan)
        await until(lambda: seen[-1] is None)
        for n in range(20):
            store.put(KEYS.plan, b"%d" % n)
        store.compact(store.list("").revision)  # in the middle of it: what was not handed out yet is gone
        await until(lambda: seen[-1] == b"19")
        watch.stop()

    run(scenario)


def test_what_a_watch_swallowed_is_found_by_looking_again() -> None:
    class DeafStore(MemoryStore):
        deaf = False

        def next_batch(self, watch: object) -> object:
            batch = super().next_batch(watch)  # pyright: ignore[reportArgumentType]
            return () if self.deaf and batch else batch

    async def scenario() -> None:
        store = DeafStore(progress_s=0.02)
        seen: list[bytes | None] = []
        watch = KeyWatch(store, KEYS.plan, lambda v: seen.append(v.value if v else None), random.Random(1))
        watch._relist_s = 0.2
        watch.start()
        await until(lambda: seen == [None])
        store.deaf = True
        store.put(KEYS.plan, b"1")
        await until(lambda: seen[-1] == b"1")
        watch.stop()

    run(scenario)

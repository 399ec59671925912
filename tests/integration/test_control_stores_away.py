"""The real controller loop, in this process, while a store is away: changes of generation wait, ranks go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.control_agents import TOKEN, ToyJob, until

from surefoot.ckpt.record import list_records
from surefoot.ckpt.store import MemoryObjectStore, ObjectStoreUnavailableError
from surefoot.controller.core.settings import Settings
from surefoot.controller.daemon import Controller, ControllerConfig
from surefoot.controller.etcd import start_etcd
from surefoot.controller.keys import Keys
from surefoot.controller.store import MemoryStore, connect

pytestmark = pytest.mark.slow


class Outage(MemoryObjectStore):
    """An object store that can be away for the controller alone."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    def _there(self) -> None:
        if self.away and threading.current_thread().name.startswith(("effects", "journal")):
            raise ObjectStoreUnavailableError("memory://: away, as the test wants it")

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._there()
        super().create(key, data)

    def list(self, prefix: str) -> list[Any]:
        self._there()
        return super().list(prefix)


class InProcess:
    """A controller in a thread."""

    def __init__(self, store: Any, objects: Any, folder: Path, job: str) -> None:
        settings = Settings(
            job=job,
            run_id="run1",
            controller="a",
            code_version="t",
            spec_hash="h",
            steps=3000,
            nodes=2,
            ranks_per_node=2,
            mesh={"dp": 4},
        )
        config = ControllerConfig(settings=settings, token=TOKEN, state_dir=folder, lease_ttl_s=10, seed=1)
        self.controller = Controller(config, store, objects)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.controller.run()

    def close(self) -> None:
        self.controller.interrupt()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[ToyJob, Outage]]:
    store, objects = MemoryStore(), Outage()
    toy = ToyJob(store, objects, "j", steps=3000)
    toy.add("n0", "n1")
    inside = InProcess(store, objects, tmp_path, "j")
    until(lambda: toy.generation == 1 and toy.step > 5, 10, "it runs")
    yield toy, objects
    inside.close()
    toy.close()


def test_object_store_away(running: tuple[ToyJob, Outage]) -> None:
    toy, objects = running
    objects.away = True
    toy.agent_of(1).end_rank(1, signal=9)
    threading.Event().wait(1.5)  # the length of the outage
    assert toy.generation == 1
    objects.away = False
    until(lambda: toy.generation == 2, 10, "generation 2")
    assert list_records(objects) == [1, 2]
    assert toy.plan is not None
    assert toy.plan.reason.cause == "infrastructure"


def test_interrupt_leaves_in_good_order(tmp_path: Path) -> None:
    store = MemoryStore()
    inside = InProcess(store, MemoryObjectStore(), tmp_path, "j")
    until(lambda: store.get(Keys("j").leader), 5, "it leads")
    inside.close()
    assert inside.code == 130
    assert store.get(Keys("j").leader) is None


def test_etcd_away_for_longer_than_the_lease(tmp_path: Path, job: str) -> None:
    """etcd stands still for 13 s, all leases end: the leader steps down, is elected again, and leaves the generation as it
    is; a rank that dies later is answered as ever."""
    with start_etcd(tmp_path / "etcd", tmp_path / "etcd.log") as etcd:
        store, objects = connect(etcd.endpoint), MemoryObjectStore()
        toy = ToyJob(store, objects, job, steps=3000)
        toy.add("n0", "n1")
        inside = InProcess(store, objects, tmp_path / "c", job)
        try:
            until(lambda: toy.generation == 1 and toy.step > 5, 10, "it runs")
            first = store.get(Keys(job).leader)
            assert first is not None
            os.kill(etcd.pid, signal.SIGSTOP)
            threading.Event().wait(13)  # the length of the outage: longer than the TTL
            os.kill(etcd.pid, signal.SIGCONT)

            def led_again() -> bool:
                kv = store.get(Keys(job).leader)
                return kv is not None and kv.create_revision > first.create_revision

            until(led_again, 15, "a leader again")
            at = toy.step
            until(lambda: toy.step > at + 10, 15, "steps")
            assert list_records(objects) == [1]
            toy.agent_of(1).end_rank(1, signal=9)
            until(lambda: toy.generation == 2, 15, "generation 2")
        finally:
            inside.close()
            toy.close()
            store.close()

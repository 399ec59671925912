"""Opening a generation without a controller, with another start getting in between at every point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ckpt_faulty import FaultyStore

from surefoot.ckpt.errors import CkptWorldError
from surefoot.ckpt.manifest import manifest_key
from surefoot.ckpt.record import (
    Record,
    StartRef,
    create_record,
    lineage,
    list_manifests,
    read_record,
    read_records,
)
from surefoot.ckpt.saving.generation import TRIES, StaleStartError, open_generation
from surefoot.ckpt.store import MemoryObjectStore


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def commits(store: FaultyStore, generation: int, step: int) -> None:
    """Somebody's manifest appears."""
    MemoryObjectStore.create(store, manifest_key(generation, step), b"{}")


def opens(store: FaultyStore, generation: int, start: tuple[int, int] = (0, 0)) -> None:
    point = StartRef(generation=start[0], step=start[1])
    create_record(
        store, Record(generation=generation, start=point, reason="other", created_by=f"other{generation}")
    )


def start(generation: int = 0, step: int = 0) -> StartRef:
    return StartRef(generation=generation, step=step)


def counting(store: FaultyStore) -> list[tuple[int, int]]:
    return [(m.generation, m.step) for m in lineage(read_records(store), list_manifests(store))]


def test_the_first(store: FaultyStore) -> None:
    assert open_generation(store, start(), seen=(), created_by="me") == 1
    record, _ = read_record(store, 1)
    assert (record.start, record.rollback, record.plan) == (start(), False, None)


def test_the_next_continues(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    assert open_generation(store, start(1, 20), seen=list_manifests(store), created_by="me") == 2
    assert counting(store) == [(1, 20)]


def test_nothing_loaded_although_the_root_holds_steps(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    with pytest.raises(StaleStartError, match="load first"):
        open_generation(store, start(), seen=(), created_by="me")
    assert list(read_records(store)) == [1], "nobody was fenced for it"


def test_starting_over_leaves_everything_behind(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    assert open_generation(store, start(), seen=None, created_by="me") == 2
    assert read_record(store, 2)[0].rollback
    assert counting(store) == []


def test_an_older_step_was_loaded_on_purpose(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    commits(store, 1, 40)
    assert open_generation(store, start(1, 20), seen=list_manifests(store), created_by="me") == 2
    assert read_record(store, 2)[0].rollback
    assert counting(store) == [(1, 20)]


def test_another_start_has_committed_since_the_load(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    seen = list_manifests(store)
    opens(store, 2, (1, 20))
    commits(store, 2, 40)
    with pytest.raises(StaleStartError) as caught:
        open_generation(store, start(1, 20), seen=seen, created_by="me")
    assert caught.value.newest.step == 40
    assert counting(store) == [(1, 20), (2, 40)]


def test_a_number_that_was_taken_meanwhile(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    store.before["0002.json"] = lambda: opens(store, 2, (1, 20))
    assert open_generation(store, start(1, 20), seen=list_manifests(store), created_by="me") == 3


def test_a_manifest_between_the_listings_burns_the_number(store: FaultyStore) -> None:
    """The worked race: it may have been acknowledged, so the next record brings it back onto the lineage."""
    opens(store, 1)
    commits(store, 1, 20)
    seen = list_manifests(store)
    store.before["0002.json"] = lambda: commits(store, 1, 40)
    with pytest.raises(StaleStartError):
        open_generation(store, start(1, 20), seen=seen, created_by="me")
    assert counting(store) == [(1, 20), (1, 40)]
    mending, _ = read_record(store, 3)
    assert (mending.start, mending.reason) == (start(1, 40), "burnt")


def test_a_manifest_after_the_second_listing_is_off_the_lineage(store: FaultyStore) -> None:
    opens(store, 1)
    commits(store, 1, 20)
    assert open_generation(store, start(1, 20), seen=list_manifests(store), created_by="me") == 2
    commits(store, 1, 40)
    assert counting(store) == [(1, 20)]


def test_an_endless_race_is_called_a_fault(store: FaultyStore) -> None:
    def take(number: int) -> Callable[[], None]:
        return lambda: opens(store, number)

    for number in range(1, TRIES + 1):
        store.before[f"generations/{number:04d}.json"] = take(number)
    with pytest.raises(CkptWorldError, match="how many jobs"):
        open_generation(store, start(), seen=None, created_by="me")

"""What may be deleted, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.keeping.cleaning import apply_retention, judge_line
from surefoot.ckpt.keeping.retention import Retention, held_of, judge, objects_of
from surefoot.ckpt.manifest import (
    LedgerRef,
    Manifest,
    ManifestRef,
    encode,
    ledger_key,
    manifest_key,
    object_key,
    part_key,
)
from surefoot.ckpt.record import Record, StartRef, create_record, list_manifests
from surefoot.ckpt.store import MemoryObjectStore


def deletable(of: list[ManifestRef], retention: Retention) -> list[ManifestRef]:
    return [v.ref for v in judge(held_of(of, {}), retention.rules()) if not v.keep]


def line(*steps: int) -> list[ManifestRef]:
    return [ManifestRef(step=s, generation=1, key=manifest_key(1, s)) for s in steps]


@pytest.mark.parametrize(
    ("steps", "retention", "gone"),
    [
        ((20,), Retention(newest=2), []),
        ((20, 40), Retention(newest=2), []),
        ((20, 40, 60, 80), Retention(newest=2), [20, 40]),
        ((20, 40, 60, 80), Retention(newest=2, every_steps=40), [20]),
        ((20, 40, 60, 80), Retention(newest=9), []),
        ((), Retention(newest=2), []),
    ],
)
def test_deletable(steps: tuple[int, ...], retention: Retention, gone: list[int]) -> None:
    assert [m.step for m in deletable(line(*steps), retention)] == gone


@given(st.sets(st.integers(1, 200)), st.integers(2, 6), st.none() | st.integers(1, 50))
def test_the_newest_always_stay(steps: set[int], newest: int, every: int | None) -> None:
    all_of_it = line(*sorted(steps))
    gone = deletable(all_of_it, Retention(newest=newest, every_steps=every))
    assert not set(gone) & set(all_of_it[-newest:])
    assert gone == sorted(gone)
    assert len(all_of_it) - len(gone) >= min(newest, len(all_of_it))


@pytest.mark.parametrize(("newest", "every"), [(1, None), (0, None), (2, 0)])
def test_refused_with_the_reason(newest: int, every: int | None) -> None:
    with pytest.raises(ValueError, match="at least"):
        Retention(newest=newest, every_steps=every)


def manifest(step: int, attempt: str = "a") -> Manifest:
    ledger = LedgerRef(key=ledger_key(1, step, attempt), size=1, checksum="")
    return Manifest(generation=1, step=step, attempt=attempt, world_size=1, ledger=ledger)


class Watching(MemoryObjectStore):
    """Notes deletions in order."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        super().delete(key)


@pytest.fixture
def store() -> Watching:
    store = Watching()
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="t"))
    for step in (20, 40, 60):
        store.create(object_key(1, step, "a", 0), b"data")
        store.create(part_key(1, step, "a", 0), b"part")
        store.create(ledger_key(1, step, "a"), b"ledger")
        store.create(object_key(1, step, "other", 0), b"of an attempt that somebody may still work on")
        store.create(manifest_key(1, step), encode(manifest(step)))
    return store


def test_the_manifest_goes_first_and_only_its_attempt_after_it(store: Watching) -> None:
    gone = apply_retention(store, Retention(newest=2), generation=1)
    assert [m.step for m in gone] == [20]
    assert store.deleted == [manifest_key(1, 20), part_key(1, 20, "a", 0), object_key(1, 20, "a", 0)]
    left = [o.key for o in store.list("gen-0001/step-0000000020/")]
    assert left == [ledger_key(1, 20, "a"), object_key(1, 20, "other", 0)]


def test_twice_does_nothing_more(store: Watching) -> None:
    apply_retention(store, Retention(newest=2), generation=1)
    store.deleted.clear()
    assert apply_retention(store, Retention(newest=2), generation=1) == []
    assert store.deleted == []


def test_what_is_off_the_lineage_stays(store: Watching) -> None:
    """Generation 2 went back to step 20: 40 and 60 of generation 1 are nobody's to delete here."""
    start = StartRef(generation=1, step=20)
    create_record(store, Record(generation=2, start=start, rollback=True, reason="test", created_by="t"))
    assert apply_retention(store, Retention(newest=2), generation=2) == []


def test_rules_count_what_the_same_writer_left(store: Watching) -> None:
    """A script left three; a job goes on from there, twice, and then a script again: each cleans up after itself alone."""
    for generation, start, plan in (
        (2, StartRef(generation=1, step=60), {"job": "gpt"}),
        (3, StartRef(generation=2, step=80), {"job": "gpt"}),
        (4, StartRef(generation=3, step=100), None),
    ):
        record = Record(generation=generation, start=start, reason="test", created_by="t", plan=plan)
        create_record(store, record)
    for generation, step in ((2, 70), (2, 80), (3, 90), (3, 100)):
        left = Manifest(generation=generation, step=step, attempt="a", world_size=1)
        store.create(manifest_key(generation, step), encode(left))
    assert [m.step for m in apply_retention(store, Retention(newest=2), generation=3)] == [70, 80]
    assert [m.step for m in list_manifests(store)] == [20, 40, 60, 90, 100]
    assert [m.step for m in apply_retention(store, Retention(newest=2), generation=4)] == [20]
    judged = judge_line(store, Retention(newest=3))
    assert [v.ref.step for v in judged if not v.keep] == [40], "gc counts all"


def test_a_key_outside_the_attempt_is_never_returned() -> None:
    keys = [
        object_key(1, 20, "a", 0),
        object_key(1, 20, "ab", 0),
        object_key(2, 20, "a", 0),
        "generations/0001.json",
    ]
    assert objects_of(manifest(20), keys) == keys[:1]

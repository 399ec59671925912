"""What may be swept, and what gc says and does."""

from __future__ import annotations

import pytest

from surefoot.ckpt.format.flags import flag_key, raise_flag
from surefoot.ckpt.keeping.cleaning import apply_retention, carry_out, plan_gc, sweep_orphans
from surefoot.ckpt.keeping.orphans import orphans, sort_out
from surefoot.ckpt.keeping.retention import EveryHours, HeldStep, Newest, Retention, judge
from surefoot.ckpt.manifest import (
    Ledger,
    LedgerRef,
    Manifest,
    ManifestRef,
    Previous,
    encode,
    ledger_key,
    manifest_key,
    object_key,
    part_key,
)
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import MemoryObjectStore, ObjectStore


def ref(generation: int, step: int) -> ManifestRef:
    return ManifestRef(step=step, generation=generation, key=manifest_key(generation, step))


def put(store: ObjectStore, generation: int, step: int, attempt: str) -> None:
    """What an attempt leaves that was never committed."""
    store.create(object_key(generation, step, attempt, 0), b"d" * 10)
    store.create(part_key(generation, step, attempt, 0), b"part")
    store.create(ledger_key(generation, step, attempt), encode(Ledger(generation=generation, step=step)))


def commit(store: ObjectStore, generation: int, step: int, attempt: str = "a", **facts: float) -> None:
    put(store, generation, step, attempt)
    ledger = LedgerRef(key=ledger_key(generation, step, attempt), size=1, checksum="")
    manifest = Manifest(
        generation=generation, step=step, attempt=attempt, world_size=1, ledger=ledger, facts=facts
    )
    store.create(manifest_key(generation, step), encode(manifest))


def open_generation(store: ObjectStore, generation: int, start: StartRef | None = None) -> None:
    start = start or StartRef()
    create_record(store, Record(generation=generation, start=start, reason="t", created_by=f"t{generation}"))


@pytest.fixture
def store() -> MemoryObjectStore:
    store = MemoryObjectStore()
    open_generation(store, 1)
    commit(store, 1, 20)
    put(store, 1, 20, "other")
    put(store, 1, 40, "dead")
    store.upload(object_key(1, 60, "begun", 0), 5, deadline_s=5)
    store.create("notes/readme.txt", b"of the user")
    store.create("gen-0001/step-0000000020/a/mine.bin", b"of the user")
    return store


def swept(store: ObjectStore) -> list[tuple[int, int, str]]:
    return [(o.attempt.generation, o.attempt.step, o.attempt.attempt) for o in sweep_orphans(store)]


def test_nothing_of_a_generation_in_force_whatever_its_step(store: MemoryObjectStore) -> None:
    """Somebody may be uploading it: that another attempt has committed the step is not known there yet."""
    assert swept(store) == []
    plan = plan_gc(store, None)
    assert (plan.orphans, plan.waiting) == ((), 2)
    assert store.read(object_key(1, 40, "dead", 0)) == b"d" * 10
    assert store.read(object_key(1, 20, "other", 0)) == b"d" * 10


def test_a_higher_record_alone_does_not_end_a_generation(store: MemoryObjectStore) -> None:
    """The old one's manifest may still appear, and the number is burnt then: see record.py."""
    open_generation(store, 2, StartRef(generation=1, step=20))
    assert swept(store) == []
    commit(store, 2, 25)
    put(store, 2, 30, "in-flight")
    store.upload(object_key(2, 30, "in-flight", 1), 5, deadline_s=5)
    assert len(store.unfinished("")) == 2
    assert swept(store) == [(1, 20, "other"), (1, 40, "dead")]
    assert store.read(object_key(2, 30, "in-flight", 0))
    assert [u.key for u in store.unfinished("")] == [object_key(2, 30, "in-flight", 1)]


def test_a_manifest_without_a_record_ends_nothing(store: MemoryObjectStore) -> None:
    commit(store, 7, 25)
    assert swept(store) == []


def test_a_step_whose_manifest_cannot_be_read_keeps_everything() -> None:
    holdings = sort_out([(object_key(1, 20, "a", 0), 1), (object_key(1, 20, "b", 0), 1)])
    assert orphans(holdings, {(1, 20): None}, over_below=5, ledgers=set()) == []


def test_gc_says_first_and_then_does(store: MemoryObjectStore) -> None:
    open_generation(store, 2, StartRef(generation=1, step=20))
    commit(store, 2, 25)
    put(store, 2, 30, "in-flight")
    store.upload(object_key(2, 30, "in-flight", 1), 5, deadline_s=5)
    raise_flag(store, ref(1, 10), "verified")
    before = store.list("")
    plan = plan_gc(store, None)
    assert store.list("") == before
    assert [o.attempt.attempt for o in plan.orphans] == ["other", "dead"]
    assert plan.stale_flags == (flag_key(1, 10, "verified"),)
    assert plan.foreign == ("gen-0001/step-0000000020/a/mine.bin", "notes/readme.txt")
    assert len(plan.unfinished) == 1
    assert plan.nbytes == 2 * sum(o.size for o in before if "/other/" in o.key)
    carry_out(store, plan)
    assert plan_gc(store, None).nbytes == 0
    assert [u.key for u in store.unfinished("")] == [object_key(2, 30, "in-flight", 1)]
    left = [o.key for o in store.list("")]
    assert set(left) == {o.key for o in before} - {k for o in plan.orphans for k in o.keys} - set(
        plan.stale_flags
    )
    assert {"notes/readme.txt", "gen-0001/step-0000000020/a/mine.bin"} < set(left)


def test_a_ledger_that_the_chain_names_outlives_its_checkpoint(store: MemoryObjectStore) -> None:
    old = LedgerRef(key=ledger_key(1, 20, "a"), size=1, checksum="")
    open_generation(store, 2, StartRef(generation=1, step=20))
    put(store, 2, 30, "b")
    store.delete(ledger_key(2, 30, "b"))
    previous = Previous(generation=1, step=20, ledger=old)
    store.create(ledger_key(2, 30, "b"), encode(Ledger(generation=2, step=30, previous=previous)))
    mine = LedgerRef(key=ledger_key(2, 30, "b"), size=1, checksum="")
    manifest = Manifest(generation=2, step=30, attempt="b", world_size=1, ledger=mine)
    store.create(manifest_key(2, 30), encode(manifest))
    store.delete(manifest_key(1, 20))  # a retention that was killed right after the manifest
    plan = plan_gc(store, None)
    assert {o.attempt.attempt for o in plan.orphans} == {"a", "other", "dead"}
    carry_out(store, plan)
    ledgers = [o.key for o in store.list("gen-") if o.key.endswith("/ledger.json")]
    assert ledgers == [ledger_key(1, 20, "a"), ledger_key(2, 30, "b")]


def test_gc_by_rules_and_off_the_lineage(store: MemoryObjectStore) -> None:
    commit(store, 1, 50)
    open_generation(store, 2, StartRef(generation=1, step=20))
    for step in (25, 30, 35):
        commit(store, 2, step)
    plan = plan_gc(store, Retention(newest=2), off_lineage=True)
    assert [(c.ref.generation, c.ref.step) for c in plan.checkpoints] == [(1, 20), (2, 25), (1, 50)]
    raise_flag(store, ref(1, 20), "kept")  # exempt, between the two looks
    carry_out(store, plan)
    assert [
        m for m in (20, 25, 30, 35, 50) if any(f"-{m:010d}/manifest" in o.key for o in store.list("gen-"))
    ] == [
        *(20, 30, 35),
    ]


# ---------------------------------------------------------------- rules


def held(*steps: int, **flags: tuple[int, ...]) -> list[HeldStep]:
    return [HeldStep(ref=ref(1, s), **{name: s in which for name, which in flags.items()}) for s in steps]


def kept(line: list[HeldStep], retention: Retention) -> list[int]:
    return [v.ref.step for v in judge(line, retention.rules()) if v.keep]


def test_the_newest_verified_stays_whatever_the_rules() -> None:
    """CKP-41: the newer ones may turn out damaged."""
    line = held(10, 20, 30, 40, 50, verified=(10, 20))
    assert kept(line, Retention(newest=2)) == [20, 40, 50]


def test_one_set_aside_stays_as_evidence_and_counts_for_nothing() -> None:
    line = held(10, 20, 30, 40, 50, aside=(40, 50), verified=(50,))
    assert kept(line, Retention(newest=2)) == [20, 30, 40, 50]


def test_exempt_by_flag_and_by_number() -> None:
    line = held(10, 20, 30, 40, 50, exempt=(20,))
    assert kept(line, Retention(newest=2, exempt=(10,))) == [10, 20, 40, 50]


def test_by_hours_the_first_of_each_span_and_what_is_not_known() -> None:
    times = {10: 0.0, 20: 1800.0, 30: 3600.0, 40: 7100.0, 50: None, 60: 9000.0, 70: 9001.0}
    line = [HeldStep(ref=ref(1, s), committed_at=at) for s, at in times.items()]
    assert [v.ref.step for v in judge(line, [EveryHours(hours=1)]) if v.keep] == [10, 30, 50, 60, 70]
    assert "newest committed" in judge(line, [Newest(count=2)])[-1].why


@pytest.mark.parametrize("hours", [0, -1])
def test_hours_must_be_positive(hours: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Retention(newest=2, every_hours=hours)


def test_times_come_from_manifests(store: MemoryObjectStore) -> None:
    for step, at in ((120, 10.0), (140, 20.0), (160, 4000.0), (180, 4010.0), (200, 4020.0)):
        commit(store, 1, step, committed_at=at)
    gone = apply_retention(store, Retention(newest=2, every_hours=1), generation=1)
    assert [m.step for m in gone] == [140]  # 20 does not say when


def test_a_manifest_that_cannot_be_read_keeps_its_data_and_stops_nobody(store: MemoryObjectStore) -> None:
    for step in (21, 22, 23):
        commit(store, 1, step)
    store.delete(manifest_key(1, 20))
    store.create(manifest_key(1, 20), b"\x80\x04 no manifest")
    assert [m.step for m in apply_retention(store, Retention(newest=2), generation=1)] == [21]
    assert store.read(object_key(1, 20, "a", 0))

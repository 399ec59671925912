"""CKP-30, CKP-31, CKP-32 in a store that fails on cue: at every operation of a save by four uploaders and a committer, before
it and after it took effect, once or for good. The operations come from a recorded run.

Whatever the moment: what was committed before is untouched, the newest committed step is whole, what was acknowledged is
committed, and the next generation neither needs nor meets what was left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from ckpt_boundaries import CREATES, Fault, Op, Track
from ckpt_images import a_row, arrays, make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.keeping.cleaning import carry_out, plan_gc, sweep_orphans
from surefoot.ckpt.manifest import ledger_key, manifest_key
from surefoot.ckpt.record import Record, StartRef, create_record, lineage, list_manifests, read_records
from surefoot.ckpt.saving import commit as commit_module
from surefoot.ckpt.store import MemoryObjectStore, ObjectStore, ObjectStoreError
from surefoot.ckpt.tools.verifying import verify_step

WORLD = 4
COMMITTER = "committer"
LATE_S = 0.03
"""How long a committer waits for a part that never comes."""


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "FIRST_POLL_S", 0.001)
    monkeypatch.setattr(commit_module, "LONGEST_POLL_S", 0.005)


def start(store: ObjectStore, generation: int, begin: tuple[int, int] = (0, 0)) -> None:
    point = StartRef(generation=begin[0], step=begin[1])
    record = Record(generation=generation, start=point, reason="test", created_by=f"t{generation}")
    create_record(store, record)


def upload(store: ObjectStore, rank: int, image: memoryview, step: int, generation: int, attempt: str) -> str:
    """As the uploaders do it, beside what they hold; returns what went wrong."""
    what = {"generation": generation, "step": step, "attempt": attempt, "writer": rank}
    try:
        tiers.upload_images(store, [image], deadline_s=10, **what)  # type: ignore[arg-type]
    except (CkptError, ObjectStoreError) as e:
        try:
            tiers.report_failure(store, reason=str(e), **what)  # type: ignore[arg-type]
        except ObjectStoreError:
            pass  # its silence tells the committer
        return str(e)
    return ""


@cache
def images_of(step: int, generation: int) -> list[memoryview]:
    return make_images(arrays(), WORLD, step=step, generation=generation, ledger=a_row(step, generation))


def save(
    inner: ObjectStore, track: Track, step: int, generation: int = 1, attempt: str = ""
) -> tuple[list[str], tiers.CommitOutcome | str]:
    """One save by four ranks. Returns what each uploader had to say, and how the commit ended (a text: it raised)."""
    attempt = attempt or f"a{generation}-{step}"
    troubles = [
        upload(track.store(inner, f"rank{rank}"), rank, image, step, generation, attempt)
        for rank, image in enumerate(images_of(step, generation))
    ]
    what = {"generation": generation, "step": step, "attempt": attempt, "writers": WORLD}
    try:
        return troubles, tiers.commit(
            track.store(inner, COMMITTER),
            deadline_s=LATE_S,
            facts={},
            **what,  # type: ignore[arg-type]
        )
    except (CkptError, ObjectStoreError) as e:
        return troubles, f"{type(e).__name__}: {e}"


@cache
def objects_at_20() -> dict[str, bytes]:
    store = MemoryObjectStore()
    start(store, 1)
    assert isinstance(save(store, Track(), 20)[1], tiers.Committed)
    return {o.key: store.read(o.key) for o in store.list("")}


def committed_20() -> MemoryObjectStore:
    store = MemoryObjectStore()
    for key, data in objects_at_20().items():
        store.create(key, data)
    return store


def boundaries() -> list[Op]:
    """The operations of the save of step 40, from a recorded run."""
    track = Track()
    assert isinstance(save(committed_20(), track, 40)[1], tiers.Committed)
    return track.passed


def faults(*actors: str) -> Iterator[Fault]:
    """Of these actors; of all where none is named."""
    for op in (op for op in boundaries() if not actors or op.actor in actors):
        for after in (False, True):
            yield Fault(op=op, after=after, dead=False)
            yield Fault(op=op, after=after, dead=True)


def counting(store: ObjectStore) -> list[tuple[int, int]]:
    return [(m.generation, m.step) for m in lineage(read_records(store), list_manifests(store))]


def require_whole(store: ObjectStore, line: list[tuple[int, int]]) -> None:
    for generation, step in line:
        assert verify_step(store, step, generation).problems == ()


def hit(store: MemoryObjectStore, fault: Fault, generation: int = 1) -> bool:
    """Save step 40 with a fault on the way; returns whether it was committed."""
    before = {o.key: store.read(o.key) for o in store.list("")}
    track = Track(fault)
    troubles, outcome = save(store, track, 40, generation)
    assert track.fired, "the fault fired"
    line = counting(store)
    is_committed = (generation, 40) in line
    assert {key: store.read(key) for key in before} == before, "nothing that stood there was touched"
    require_whole(store, line)
    if isinstance(outcome, tiers.Committed):
        assert is_committed, "what is acknowledged is committed"
    if fault.op.actor != COMMITTER and not is_committed:
        assert any(troubles), "the rank that failed says so"
        assert isinstance(outcome, tiers.GivenUp), "and all hear of it from the committer"
    created_manifest = fault.op.what in CREATES and fault.op.key == manifest_key(generation, 40)
    if created_manifest and fault.after and not fault.dead:
        assert isinstance(outcome, tiers.Committed), "an answer that was lost is read back"
    return is_committed


def go_on(store: MemoryObjectStore, after: tuple[int, int], generation: int) -> None:
    """The next start comes to step 40 again, or to 60: it shares nothing with what was left behind, and all of that goes."""
    left = {o.key for o in store.list("")}
    start(store, generation, after)
    step = 40 if after[1] < 40 else 60
    track = Track()
    assert isinstance(save(store, track, step, generation)[1], tiers.Committed)
    line = counting(store)
    assert line[-1] == (generation, step)
    require_whole(store, line)
    touched = {op.key for op in track.passed if op.what in ("create", "finish", "put", "read", "read_into")}
    theirs = {
        key for key in left if key.startswith("gen-") and not key.endswith(("manifest.json", "ledger.json"))
    }
    assert not touched & theirs, "an attempt shares no object with another"
    sweep_orphans(store)
    carry_out(store, plan_gc(store, None, off_lineage=True))
    kept = {f"gen-{g:04d}/step-{s:010d}/" for g, s in line}
    stray = [o.key for o in store.list("gen-") if not o.key.startswith(tuple(kept))]
    assert [key for key in stray if not key.endswith("ledger.json")] == []
    assert store.unfinished("gen-") == []
    require_whole(store, line)


def test_a_recorded_run_passes_every_phase() -> None:
    passed = boundaries()
    for rank in range(WORLD):
        assert [op.what for op in passed if op.actor == f"rank{rank}" and op.what in CREATES], rank
    created = [op.key for op in passed if op.actor == COMMITTER and op.what == "create"]
    assert created == [ledger_key(1, 40, "a1-40"), manifest_key(1, 40)]
    assert len(passed) > 3 * WORLD


def test_every_boundary_of_a_first_save() -> None:
    """CKP-30 and the first series of CKP-31."""
    outcomes = set()
    for fault in faults():
        store = committed_20()
        is_committed = hit(store, fault)
        outcomes.add(is_committed)
        go_on(store, (1, 40) if is_committed else (1, 20), 2)
    assert outcomes == {True, False}, "there were faults on both sides of the commit"


def test_every_boundary_over_an_older_attempt_at_the_same_step() -> None:
    """The second series of CKP-31, and CKP-32: rank 3 of generation 1 died before its part; generation 2 comes to step 40
    again and is hit in turn, then generation 3."""
    died = Fault(op=next(op for op in boundaries() if op.actor == "rank3"), after=False, dead=True)
    for fault in faults("rank1", COMMITTER):
        store = committed_20()
        assert not hit(store, died)
        start(store, 2, (1, 20))
        moved = Fault(op=_of_generation(fault.op, 2), after=fault.after, dead=fault.dead)
        is_committed = hit(store, moved, 2)
        go_on(store, (2, 40) if is_committed else (1, 20), 3)


def _of_generation(op: Op, generation: int) -> Op:
    key = op.key.replace("gen-0001/step-0000000040", f"gen-{generation:04d}/step-0000000040")
    return Op(op.actor, op.what, key.replace("a1-40", f"a{generation}-40"), op.nth)


def test_a_complete_attempt_of_a_dead_committer_is_nobodys() -> None:
    """CKP-31: all parts of an older attempt lie there, only the manifest does not. It has no force, and does not complete the
    next attempt, which lacks a part."""
    store = committed_20()
    manifest = Op(COMMITTER, "create", manifest_key(1, 40))
    assert not hit(store, Fault(op=manifest, after=False, dead=True))
    start(store, 2, (1, 20))
    missing = Op("rank1", "create", f"gen-0002/step-0000000040/a2-40/n{1:05d}.part.json")
    assert not hit(store, Fault(op=missing, after=False, dead=True), 2)
    assert counting(store) == [(1, 20)]
    go_on(store, (1, 20), 3)

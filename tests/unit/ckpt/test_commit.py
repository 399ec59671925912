"""Upload and commit on a store that fails on cue, without torch: nothing is committed that is not whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from ckpt_faulty import FaultyStore
from ckpt_images import arrays, make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.errors import CommitError, CoverageError, DamagedError, ImageError
from surefoot.ckpt.format.merge import merge_parts
from surefoot.ckpt.format.sound import require_sound
from surefoot.ckpt.loading.restore import read_ledger, read_manifest
from surefoot.ckpt.manifest import (
    PAGE_NBYTES,
    DataObject,
    LedgerRow,
    Manifest,
    PartRecord,
    Piece,
    RankPart,
    TensorMeta,
    decode,
    encode,
    manifest_key,
    object_key,
    part_key,
)
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import (
    MemoryObjectStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectStoreDeniedError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
)

A, B = "attempt-a", "attempt-b"


@pytest.fixture
def store() -> FaultyStore:
    store = FaultyStore()
    open_generation(store, 1)
    return store


def open_generation(store: MemoryObjectStore, generation: int, start: tuple[int, int] = (0, 0)) -> None:
    point = StartRef(generation=start[0], step=start[1])
    create_record(
        store, Record(generation=generation, start=point, reason="test", created_by=f"t{generation}")
    )


def upload(
    store: MemoryObjectStore,
    images: list[memoryview],
    *,
    step: int = 20,
    attempt: str = A,
    generation: int = 1,
) -> None:
    """Each rank on a node of its own."""
    for writer, image in enumerate(images):
        tiers.upload_images(
            store,
            [image],
            generation=generation,
            step=step,
            attempt=attempt,
            writer=writer,
            deadline_s=10,
        )


def commit(
    store: MemoryObjectStore,
    *,
    step: int = 20,
    attempt: str = A,
    writers: int = 2,
    generation: int = 1,
    deadline_s: float = 0.05,
    stored: bool = False,
) -> tiers.CommitOutcome:
    return tiers.commit(
        store,
        generation=generation,
        step=step,
        attempt=attempt,
        writers=writers,
        deadline_s=deadline_s,
        facts={"host": "test"},
        stored=stored,
    )


def save(store: MemoryObjectStore, step: int, *, generation: int = 1, **options: Any) -> tiers.CommitOutcome:
    upload(
        store,
        make_images(arrays(), 2, step=step, generation=generation, **options),
        step=step,
        generation=generation,
    )
    return commit(store, step=step, generation=generation)


def reason(outcome: tiers.CommitOutcome) -> str:
    assert isinstance(outcome, tiers.GivenUp), outcome
    return outcome.reason


def test_committed(store: FaultyStore) -> None:
    outcome = save(store, 20)
    assert isinstance(outcome, tiers.Committed)
    m = read_manifest(store, 1, 20)
    assert m == outcome.manifest
    assert (m.world_size, m.attempt, m.cursor, m.values) == (2, A, {"at": 5}, {"epoch": 3})
    assert m.extras == {"0": {"rank": 0}, "1": {"rank": 1}}
    assert m.aliases == {"model.tied": "model.w"}
    assert m.facts["host"] == "test"
    assert m.facts["committed_at"] > 1e9
    assert store.created[-1] == manifest_key(1, 20), "the manifest comes last"


def test_data_objects_are_safetensors_files(store: FaultyStore) -> None:
    """Read with the plain library, they give the very arrays."""
    safetensors = pytest.importorskip("safetensors.numpy")
    save(store, 20)
    found: dict[str, np.ndarray] = {}
    for rank in range(2):
        found |= safetensors.load(store.read(object_key(1, 20, A, rank)))
    whole = arrays()
    assert (
        np.concatenate([found["model.w[0:4,0:3]"], found["model.w[4:7,0:3]"]]).tolist()
        == whole["model.w"].tolist()
    )
    for name in ("model.b", "model.on", "optim.params.model.w.step"):
        assert found[name].tolist() == whole[name].tolist()
        assert found[name].dtype == whole[name].dtype


def test_a_part_that_is_missing(store: FaultyStore) -> None:
    upload(store, make_images(arrays(), 2)[:1])
    assert "no part from writers [1]" in reason(commit(store))
    assert not [k for k in store.created if k.endswith("manifest.json")]


def test_a_part_that_was_stored_somewhere_else_is_not_waited_for_to_the_deadline(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks said that they stored theirs, and one does not see this storage: its folder is not mounted there."""
    monkeypatch.setattr("surefoot.ckpt.saving.commit.SEEN_S", 0.05)
    upload(store, make_images(arrays(), 2)[:1])
    outcome = commit(store, deadline_s=3600.0, stored=True)
    assert "no part from writers [1]" in reason(outcome)
    assert "do all ranks see the same storage" in reason(outcome)


def test_parts_are_looked_for_as_long_as_the_store_does_not_answer(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.ckpt.saving.commit.SEEN_S", 0.0)
    upload(store, make_images(arrays(), 2))
    listing = store.list
    answers = iter([False] * 5)

    def flaky(prefix: str) -> list[ObjectInfo]:
        if not next(answers, True):
            raise ObjectStoreUnavailableError("503")
        return listing(prefix)

    monkeypatch.setattr(store, "list", flaky)
    assert isinstance(commit(store, deadline_s=60.0, stored=True), tiers.Committed)


def test_many_parts_are_read_at_once(store: FaultyStore) -> None:
    """Forty ranks, each with a part of its own."""
    upload(store, make_images(arrays(8), 40))
    outcome = commit(store, writers=40)
    assert isinstance(outcome, tiers.Committed)
    assert outcome.manifest.world_size == 40


def test_a_failure_that_is_reported_ends_the_wait_at_once(store: FaultyStore) -> None:
    upload(store, make_images(arrays(), 2)[:1])
    tiers.report_failure(store, generation=1, step=20, attempt=A, writer=1, reason="disk full")
    assert "writer 1 failed: disk full" in reason(commit(store, deadline_s=60))


def test_a_failure_reported_after_success_changes_nothing(store: FaultyStore) -> None:
    upload(store, make_images(arrays(), 2))
    tiers.report_failure(store, generation=1, step=20, attempt=A, writer=1, reason="late")
    assert isinstance(commit(store), tiers.Committed)


def test_nothing_of_another_attempt_completes_this_one(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    upload(store, images, attempt=B)
    upload(store, images[:1], attempt=A)
    assert "no part from writers [1]" in reason(commit(store, attempt=A))
    assert isinstance(commit(store, attempt=B), tiers.Committed)


def test_the_second_of_two_attempts_loses(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    upload(store, images, attempt=A)
    upload(store, images, attempt=B)
    assert isinstance(commit(store, attempt=B), tiers.Committed)
    assert commit(store, attempt=A) == tiers.Lost(winner_attempt=B)
    assert read_manifest(store, 1, 20).attempt == B


def test_an_attempt_whose_step_is_taken_does_not_wait_for_its_parts(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    upload(store, images, attempt=B)
    assert isinstance(commit(store, attempt=B), tiers.Committed)
    upload(store, images[:1], attempt=A)
    assert commit(store, attempt=A, deadline_s=100) == tiers.Lost(winner_attempt=B)


@pytest.mark.parametrize("script", [["done"], ["lost"], ["lost", "done"]])
def test_a_lost_answer_is_settled_by_reading_back(store: FaultyStore, script: list[str | Exception]) -> None:
    store.script["manifest.json"] = script
    assert isinstance(save(store, 20), tiers.Committed)
    assert read_manifest(store, 1, 20).attempt == A


def test_a_lost_answer_and_another_winner(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    upload(store, images, attempt=B)
    store.before["manifest.json"] = lambda: _committed(store, B)
    store.script["manifest.json"] = ["lost", "ok"]
    upload(store, images, attempt=A)
    assert commit(store, attempt=A) == tiers.Lost(winner_attempt=B)


def _committed(store: FaultyStore, attempt: str) -> None:
    store.script["manifest.json"].insert(0, "ok")
    assert isinstance(commit(store, attempt=attempt), tiers.Committed)


def test_what_nobody_knows_is_raised(store: FaultyStore) -> None:
    store.script["manifest.json"] = ["lost"] * 100_000
    with pytest.raises(ObjectUnknownError):
        save(store, 20)


def test_a_manifest_that_is_said_to_exist_and_cannot_be_read(store: FaultyStore) -> None:
    store.script["manifest.json"] = [ObjectExistsError("it exists")] * 100_000
    with pytest.raises(ObjectUnknownError, match="cannot be read"):
        save(store, 20)


def test_an_object_store_that_is_away(store: FaultyStore) -> None:
    store.script["manifest.json"] = [ObjectStoreUnavailableError("away")]
    assert "away" in reason(save(store, 20))


def test_denied_is_raised(store: FaultyStore) -> None:
    store.script["manifest.json"] = [ObjectStoreDeniedError("keys")]
    with pytest.raises(ObjectStoreDeniedError):
        save(store, 20)


def test_listing_fails_for_a_moment(store: FaultyStore) -> None:
    upload(store, make_images(arrays(), 2))
    store.list_errors = [ObjectStoreUnavailableError("503")]
    assert isinstance(commit(store), tiers.Committed)


def test_fenced_by_a_record_that_came_before_the_manifest(store: FaultyStore) -> None:
    store.before["manifest.json"] = lambda: open_generation(store, 2)
    assert save(store, 20) == tiers.Fenced(by=2)
    assert read_manifest(store, 1, 20).step == 20, "it exists; the lineage decides"


def test_no_acknowledgement_without_the_look_for_a_higher_record(store: FaultyStore) -> None:
    """The manifest was created, and then the object store is away: nobody may count on it."""

    def away() -> None:
        store.list_errors = [ObjectStoreUnavailableError("away")] * 100

    store.before["manifest.json"] = away
    with pytest.raises(ObjectStoreUnavailableError):
        save(store, 20)
    assert read_manifest(store, 1, 20).attempt == A


# ---------------------------------------------------------------- what ranks must agree on


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"values": lambda r: {"epoch": r}}, r"epoch is 0 on ranks \[0\] and 1 on ranks \[1\]", id="values"
        ),
        pytest.param({"cursor": lambda r: {"at": r}}, "cursor of rank 1 differs", id="cursor"),
        pytest.param(
            {"ledger": lambda r: [LedgerRow(step=1, generation=1, dp_rank=0, samples=(str(r),))]},
            "another ledger for step 1",
            id="ledger",
        ),
        pytest.param(
            {"change": lambda r, mine: mine["model.b"].__setitem__(2, 5.0) if r == 1 else None},
            r"replicas differ: model.b\[0:5\]",
            id="replicas",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(store: FaultyStore, options: dict[str, Any], words: str) -> None:
    outcome = save(store, 20, **options)
    assert re.search(words, reason(outcome))
    assert "gen-0001/step-0000000020/manifest.json" not in store.created


def test_values_of_one_rank_only_are_kept(store: FaultyStore) -> None:
    save(store, 20, values=lambda r: {f"stage{r}": r})
    assert read_manifest(store, 1, 20).values == {"stage0": 0, "stage1": 1}


def test_a_slot_that_was_overwritten_cannot_get_in(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    images[0][PAGE_NBYTES + 3] ^= 1
    with pytest.raises(ImageError, match="not what was sealed"):
        upload(store, images)
    assert not [k for k in store.created if k.startswith("gen-")]


def test_a_slot_that_holds_another_step_by_now(store: FaultyStore) -> None:
    with pytest.raises(CommitError, match="holds step 21"):
        upload(store, make_images(arrays(), 1, step=21), step=20)


def test_uploading_twice_does_no_harm(store: FaultyStore) -> None:
    images = make_images(arrays(), 2)
    upload(store, images)
    upload(store, images)
    assert isinstance(commit(store), tiers.Committed)


@pytest.mark.parametrize("script", [["done"], ["lost", "ok"]])
def test_an_upload_whose_answer_is_lost(store: FaultyStore, script: list[str | Exception]) -> None:
    store.script["r00001-0.safetensors"] = list(script)
    images = make_images(arrays(), 2)
    if script[0] == "lost":
        with pytest.raises(ObjectUnknownError):
            upload(store, images)
    upload(store, images)
    assert isinstance(commit(store), tiers.Committed)


def test_two_writers_that_use_one_attempt(store: FaultyStore) -> None:
    upload(store, make_images(arrays(), 1))
    with pytest.raises(CommitError, match="two writers use one attempt"):
        upload(store, make_images(arrays(2), 1))


def test_progress_and_deadline(store: FaultyStore) -> None:
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"generation": 1, "step": 20, "attempt": A, "writer": 0}
    images = make_images(arrays(), 2)
    tiers.upload_images(store, images, deadline_s=10, progress=lambda a, b: told.append((a, b)), **options)
    assert len(told) == 2
    assert told[-1][0] == told[-1][1] > 0
    with pytest.raises(CommitError, match="given up"):
        tiers.upload_images(store, images, deadline_s=-1, **options)


# ---------------------------------------------------------------- the ledger


def rows(steps: range, generation: int = 1) -> Callable[[int], list[LedgerRow]]:
    def of(rank: int) -> list[LedgerRow]:
        return [
            LedgerRow(
                step=s, generation=generation, dp_rank=rank, samples=(f"{s}.{rank}",), loss=(s / 2).hex()
            )
            for s in steps
        ]

    return of


def samples(store: MemoryObjectStore) -> list[str]:
    return [s for row in tiers.committed_rows(store) for s in row.samples]


def test_the_committed_ledger_has_every_step_once(store: FaultyStore) -> None:
    """Snapshots carry rows back to the last step known committed; readers get each once."""
    save(store, 2, ledger=rows(range(1, 3)))
    save(store, 4, ledger=rows(range(2, 5)))
    assert samples(store) == [f"{s}.{r}" for s in range(1, 5) for r in range(2)]
    assert tiers.committed_rows(store)[0].loss == (0.5).hex()


def test_the_execution_on_the_lineage_counts(store: FaultyStore) -> None:
    """Generation 2 starts in memory at step 3; what 1 did after that does not count."""
    save(store, 2, ledger=rows(range(1, 3)))
    save(store, 4, ledger=rows(range(3, 5)))
    open_generation(store, 2, (1, 3))
    both = [*rows(range(3, 4))(0), *rows(range(4, 7), generation=2)(0)]
    save(store, 6, generation=2, ledger=lambda rank: both)
    found = tiers.committed_rows(store)
    assert [(r.step, r.generation) for r in found if r.dp_rank == 0] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
    previous = read_ledger(store, read_manifest(store, 2, 6))
    assert previous is not None
    assert previous.previous is not None
    assert (previous.previous.generation, previous.previous.step) == (1, 2)


def test_the_chain_survives_retention(store: FaultyStore) -> None:
    for step in (2, 4, 6, 8):
        save(store, step, ledger=rows(range(step - 1, step + 1)))
    gone = tiers.apply_retention(store, tiers.Retention(newest=2), generation=1)
    assert [m.step for m in gone] == [2, 4]
    assert samples(store) == [f"{s}.{r}" for s in range(1, 9) for r in range(2)]
    assert not [o.key for o in store.list("gen-0001/step-0000000002/") if not o.key.endswith("ledger.json")]


def test_a_damaged_ledger_is_named(store: FaultyStore) -> None:
    outcome = save(store, 2, ledger=rows(range(1, 3)))
    assert isinstance(outcome, tiers.Committed)
    assert outcome.manifest.ledger is not None
    key = outcome.manifest.ledger.key
    store.delete(key)
    MemoryObjectStore.create(store, key, b'{"format": 1, "generation": 1, "step": 2}')
    with pytest.raises(DamagedError, match="ledger"):
        tiers.committed_rows(store)


def test_a_damaged_predecessor_does_not_keep_the_next_from_being_committed(store: FaultyStore) -> None:
    save(store, 2, ledger=rows(range(1, 3)))
    spoil_manifest(store, 2)
    assert isinstance(save(store, 4, ledger=rows(range(3, 5))), tiers.Committed)
    with pytest.raises(DamagedError, match="gap"):
        tiers.committed_rows(store)


def test_no_checkpoint_no_rows(store: FaultyStore) -> None:
    assert tiers.committed_rows(store) == []


def ledgers(store: MemoryObjectStore) -> list[str]:
    return [o.key for o in store.list("gen-") if o.key.endswith("/ledger.json")]


def spoil_manifest(store: FaultyStore, step: int) -> None:
    store.delete(manifest_key(1, step))
    MemoryObjectStore.create(store, manifest_key(1, step), b"garbage")


def test_who_records_nothing_leaves_no_ledger(store: FaultyStore) -> None:
    """A script without a loader, also where the manifest before cannot be read; what retention lets go leaves nothing."""
    for step in (2, 4):
        save(store, step)
    spoil_manifest(store, 4)
    for step in (6, 8):
        save(store, step)
    assert ledgers(store) == []
    assert read_manifest(store, 1, 8).ledger is None
    assert tiers.committed_rows(store) == []
    assert [m.step for m in tiers.apply_retention(store, tiers.Retention(newest=2), generation=1)] == [2]
    assert store.list("gen-0001/step-0000000002/") == []


def test_a_chain_begins_with_the_first_rows_and_goes_on_without(store: FaultyStore) -> None:
    """Imported weights, then the agent, then a script on the same root."""
    save(store, 2)
    save(store, 4, ledger=rows(range(2, 5)))
    save(store, 6)
    save(store, 8, ledger=rows(range(7, 9)))
    assert len(ledgers(store)) == 3
    assert samples(store) == [f"{s}.{r}" for s in (3, 4, 7, 8) for r in range(2)]


def test_a_gap_is_not_hidden_by_a_step_without_rows(store: FaultyStore) -> None:
    save(store, 2, ledger=rows(range(1, 3)))
    spoil_manifest(store, 2)
    save(store, 4)
    with pytest.raises(DamagedError, match="gap"):
        tiers.committed_rows(store)


# ---------------------------------------------------------------- merging, pure


def part(rank: int = 0, world: int = 1, **changes: Any) -> PartRecord:
    data = DataObject(
        key=object_key(1, 20, A, rank),
        size=116,
        data_start=100,
        data_nbytes=16,
        block_nbytes=64,
        checksums=("00",),
        pieces=(Piece(name=f"w{rank}", offset=(0,), extent=(4,), at=0),),
    )
    tensors = {f"w{rank}": TensorMeta(dtype="float32", shape=(4,))}
    given = RankPart(rank=rank, world_size=world, tensors=tensors, data=data)
    return PartRecord(
        generation=1, step=20, attempt=A, writer=rank, ranks=(msgspec.structs.replace(given, **changes),)
    )


def merged(*parts: PartRecord, sizes: dict[str, int] | None = None) -> Manifest:
    known = {object_key(1, 20, A, r): 116 for r in range(2)} if sizes is None else sizes
    return merge_parts(parts, known, generation=1, step=20, attempt=A, facts={})[0]


def test_merge() -> None:
    m = merged(part(0, 2), part(1, 2))
    assert list(m.tensors) == ["w0", "w1"]
    assert m.nbytes == 32
    assert decode(Manifest, encode(m), key="m") == m


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (True, 1.0), (0.0, -0.0), (0, False)])
@pytest.mark.parametrize(
    ("wrap", "at"),
    [
        (lambda v: v, "a"),
        (lambda v: [0, v], "a.1"),
        (lambda v: {"dict": [["k", v]]}, "a.k"),
        (lambda v: {"tuple": [v]}, "a.0"),
    ],
)
def test_values_that_are_equal_and_not_alike_differ(
    one: Any, other: Any, wrap: Callable[[Any], Any], at: str
) -> None:
    told = f"{at} is {one!r} on ranks [0] and {other!r} on ranks [1]"
    with pytest.raises(CommitError, match=re.escape(told)):
        merged(part(0, 2, values={"a": wrap(one)}), part(1, 2, values={"a": wrap(other)}))
    with pytest.raises(CommitError, match="cursor of rank 1 differs"):
        merged(part(0, 2, cursor={"p": wrap(one)}), part(1, 2, cursor={"p": wrap(other)}))


def test_the_order_of_a_cursor_makes_no_difference() -> None:
    assert merged(part(0, 2, cursor={"p": 1, "q": 2}), part(1, 2, cursor={"q": 2, "p": 1})).cursor == {
        "p": 1,
        "q": 2,
    }


@pytest.mark.parametrize("field", ["tensors", "aliases"])
def test_a_name_is_a_tensors_or_a_values_on_all_ranks(field: str) -> None:
    tied = {"aliases": {"x": "w1"}} if field == "aliases" else {}
    name = "x" if tied else "w1"
    with pytest.raises(CommitError, match=rf"{name} is a tensor on ranks \[1\] and 5 on ranks \[0\]"):
        merged(part(0, 2, values={name: 5}), part(1, 2, **tied))
    of_it = {"w1": {"tensor": "w1"}}
    assert merged(part(0, 2), part(1, 2, values=of_it)).values == of_it


def test_a_name_that_is_tied_on_one_rank_and_stored_on_another_is_stored() -> None:
    """Rank 0 holds w0 and knows it as w1 too; rank 1 holds w1 alone."""
    m = merged(part(0, 2, aliases={"w1": "w0", "x": "w0"}), part(1, 2, aliases={"x": "w1"}))
    assert m.aliases == {"x": "w0"}
    require_sound(m)


def bad_piece(**changes: Any) -> PartRecord:
    piece = {"name": "w0", "offset": (0,), "extent": (4,), "at": 0} | changes
    whole = part(0)
    data = whole.ranks[0].data
    assert data is not None
    return part(0, data=msgspec.structs.replace(data, pieces=(Piece(**piece),)))


@pytest.mark.parametrize(
    ("parts", "sizes", "words"),
    [
        ([], None, "no rank took part"),
        ([part(0, 2)], None, r"missing: \[1\]"),
        ([part(0, 1), part(0, 1)], None, "took part"),
        ([part(0, 2), part(1, 3)], None, "world sizes"),
        ([part(0)], {}, "lists None"),
        ([part(0)], {object_key(1, 20, A, 0): 115}, "lists 115"),
        ([msgspec.structs.replace(part(0), attempt=B)], None, "another attempt"),
        ([msgspec.structs.replace(part(0), failure="broke")], None, "writer 0 failed: broke"),
        ([bad_piece(name="x")], None, "nobody describes"),
        ([bad_piece(at=4)], None, "bytes 0 to 4 .* of no piece"),
        ([bad_piece(at=-4)], None, "bytes -4 to 0"),
    ],
)
def test_merge_refuses(parts: list[PartRecord], sizes: dict[str, int] | None, words: str) -> None:
    with pytest.raises(CommitError, match=words):
        merged(*parts, sizes=sizes)


def test_what_the_plan_had_proved_and_is_not_written_is_our_bug() -> None:
    """The caller has declared nothing: the message does not blame him, and says what to report."""
    lacking = part(0, tensors={"w0": TensorMeta(dtype="float32", shape=(5,))})
    with pytest.raises(
        CoverageError, match=r"element \[4\] is covered 0 times.* a bug of Surefoot .* report"
    ):
        merged(lacking)


def test_an_attempt_is_a_plain_word() -> None:
    with pytest.raises(ValueError, match="attempt"):
        part_key(1, 20, "../x", 0)

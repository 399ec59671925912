"""Replicas that differ: who is the odd one."""

from __future__ import annotations

import numpy as np
import pytest
from ckpt_images import arrays, make_images
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt import tiers
from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.errors import CommitError, ReplicasDifferError
from surefoot.ckpt.planning.dealing import SPLIT_NBYTES
from surefoot.ckpt.planning.replicas import dissents, label, parse_label, require_equal
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import MemoryObjectStore

BOX = "model.w[0:4,2:3]"


def refused(checksums: dict[int, dict[str, str]]) -> ReplicasDifferError:
    with pytest.raises(ReplicasDifferError) as caught:
        require_equal(checksums, "step 20")
    return caught.value


def test_equal_replicas() -> None:
    require_equal({0: {BOX: "a"}, 1: {BOX: "a"}, 2: {}}, "step 20")


def test_the_odd_one_against_a_majority() -> None:
    error = refused({r: {BOX: "bad" if r == 2 else "good"} for r in range(5)})
    assert (error.name, error.box, error.odd) == ("model.w", Box((0, 2), (4, 1)), (2,))
    assert error.ranks_by_checksum == {"good": (0, 1, 3, 4), "bad": (2,)}
    assert "replicas differ: model.w[0:4,2:3]" in str(error)
    assert "rank 2 against the majority" in str(error)


def test_of_two_nobody_can_tell() -> None:
    error = refused({0: {BOX: "a"}, 7: {BOX: "b"}})
    assert error.odd == ()
    assert error.ranks_by_checksum == {"a": (0,), "b": (7,)}
    assert "rank 0: a; rank 7: b" in str(error)
    assert "nobody can tell" in str(error)


def test_without_a_majority_nobody_is_odd() -> None:
    """CKP-05: four ranks with four contents under one key are four tensors, not one sick rank."""
    error = refused({r: {BOX: str(r)} for r in range(4)})
    assert error.odd == ()
    assert "wrap it in ckpt.PerRank, or give it another name on each rank" in str(error)


def test_the_box_that_tells_most_is_named_and_the_others_counted() -> None:
    """A pair that differs tells nothing, a box with four holders does; the same rank is in both."""
    checksums = {r: {"a[0:1]": "good", BOX: "good"} for r in range(4)}
    checksums[3] = {"a[0:1]": "good", BOX: "bad", "pair[]": "x"}
    checksums[2]["pair[]"] = "y"
    error = refused(checksums)
    assert (error.name, error.odd) == ("model.w", (3,))
    assert "and so do 1 more" in str(error)


def test_a_message_stays_short() -> None:
    error = refused({r: {BOX: "bad" if r % 3 == 0 else "good"} for r in range(1000)})
    assert len(error.odd) == 334
    assert len(str(error)) < 700


@given(st.text(max_size=5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_labels(name: str, sides: list[tuple[int, int]]) -> None:
    box = Box(tuple(o for o, _ in sides), tuple(e for _, e in sides))
    assert parse_label(label(name, box)) == (name, box)


@pytest.mark.parametrize(
    "text", ["", "w", "w[", "w]", "w[0:4", "w[0]", "w[a:b]", "w[0:1:2]", "w[" + "1" * 5000 + ":2]"]
)
def test_a_hash_of_no_box_is_refused(text: str) -> None:
    with pytest.raises(CommitError, match="names no box"):
        require_equal({0: {text: "a"}, 1: {text: "b"}}, "step 20")


@given(st.dictionaries(st.integers(0, 6), st.sampled_from("abc"), min_size=1))
def test_the_odd_ones_are_those_outside_a_true_majority(held: dict[int, str]) -> None:
    found = dissents({r: {"w[]": c} for r, c in held.items()})
    counts = {c: sum(v == c for v in held.values()) for c in held.values()}
    if len(counts) == 1:
        assert found == []
        return
    (dissent,) = found
    best = max(counts, key=counts.__getitem__)
    majority = 2 * counts[best] > len(held)
    assert dissent.odd == (tuple(sorted(r for r, c in held.items() if c != best)) if majority else ())


def test_a_flipped_bit_in_a_box_that_is_split_over_its_holders_names_the_rank() -> None:
    """CKP-05 and silent corruption, through images, upload and commit: the tensor is written by three ranks, each a part; one
    bit flips on rank 1, in a part that another rank writes."""
    big = np.arange(3 * SPLIT_NBYTES // 4, dtype=np.float32)
    whole_arrays = {**arrays(), "big": big}

    def flip(rank: int, mine: dict[str, np.ndarray]) -> None:
        if rank == 1:
            mine["big"].view(np.uint32)[-1] ^= 1

    images = make_images(whole_arrays, 3, change=flip, block_nbytes=2**20)
    writers = [tiers.read_image(i).meta.structure.written for i in images]
    assert all(any(p.name == "big" for p in w) for w in writers), "the box is split"
    outcome = _saved(images)
    assert isinstance(outcome, tiers.GivenUp)
    assert isinstance(outcome.cause, ReplicasDifferError)
    assert (outcome.cause.name, outcome.cause.odd) == ("big", (1,))
    assert outcome.cause.box == whole(big.shape)


def test_shards_that_pass_for_plain_tensors_are_refused() -> None:
    """CKP-06: DP 2 x TP 2, and each TP rank gives its half as a plain tensor, under one name: the layout cannot be known, and the
    content gives it away. Half against half: nobody is odd."""

    def shard(rank: int, mine: dict[str, np.ndarray]) -> None:
        mine["model.b"] += 1000 * (rank % 2)

    outcome = _saved(make_images(arrays(), 4, change=shard))
    assert isinstance(outcome, tiers.GivenUp)
    assert isinstance(outcome.cause, ReplicasDifferError)
    assert outcome.cause.odd == ()
    assert sorted(outcome.cause.ranks_by_checksum.values()) == [(0, 2), (1, 3)]
    assert "make it a DTensor" in outcome.reason


def test_what_is_committed_is_as_much_as_all_distinct_elements_take() -> None:
    """CKP-06: on 1, 2 and 4 ranks, sharded and replicated. (A writer who says otherwise is refused: test_sound.py.)"""
    whole_arrays = arrays()
    distinct = sum(a.nbytes for a in whole_arrays.values())
    for ranks in (1, 2, 4):
        outcome = _saved(make_images(whole_arrays, ranks))
        assert isinstance(outcome, tiers.Committed)
        assert outcome.manifest.nbytes == distinct


def _saved(images: list[memoryview]) -> tiers.CommitOutcome:
    store = MemoryObjectStore()
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="t"))
    for writer, image in enumerate(images):
        tiers.upload_images(store, [image], generation=1, step=20, attempt="a", writer=writer, deadline_s=10)
    outcome = tiers.commit(
        store, generation=1, step=20, attempt="a", writers=len(images), deadline_s=5, facts={}
    )
    manifests = [o.key for o in store.list("gen-0001/") if o.key.endswith("manifest.json")]
    assert bool(manifests) == isinstance(outcome, tiers.Committed)
    return outcome

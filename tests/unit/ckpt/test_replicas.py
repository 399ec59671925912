"""Replicas that differ: who is the odd one."""

from __future__ import annotations

import numpy as np
import pytest
from ckpt_images import arrays, make_images
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt import tiers
from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.dealing import SPLIT_NBYTES
from surefoot.ckpt.errors import ReplicasDifferError
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.replicas import dissents, label, parse_label, require_equal
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
    assert "give each a name of its own" in str(error)


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
    store = MemoryObjectStore()
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="t"))
    for writer, image in enumerate(images):
        tiers.upload_images(store, [image], generation=1, step=20, attempt="a", writer=writer, deadline_s=10)
    outcome = tiers.commit(store, generation=1, step=20, attempt="a", writers=3, deadline_s=5, facts={})
    assert isinstance(outcome, tiers.GivenUp)
    assert isinstance(outcome.cause, ReplicasDifferError)
    assert (outcome.cause.name, outcome.cause.odd) == ("big", (1,))
    assert outcome.cause.box == whole(big.shape)
    assert not [o.key for o in store.list("gen-0001/") if o.key.endswith("manifest.json")]

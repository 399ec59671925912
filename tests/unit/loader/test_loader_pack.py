from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.loader.errors import PackError
from surefoot.loader.pack import (
    IGNORED_LABEL,
    PADDING_DOCUMENT,
    Pack,
    assemble,
    check_ranks,
    label_tokens,
    microbatch_sizes,
    pack_step,
    places,
    rank_part,
)


@dataclass(frozen=True)
class Item:
    number: int
    tokens: int


class Feed:
    def __init__(self, lengths):
        self.items = [Item(i, n) for i, n in enumerate(lengths)]
        self.at = 0

    def peek(self):
        return self.items[self.at] if self.at < len(self.items) else None

    def take(self):
        self.at += 1


def pack_all(pack, lengths):
    feed, waiting, steps = Feed(lengths), (), []
    while True:
        packed = pack_step(pack, waiting, feed.peek, feed.take)
        if packed.empty:
            assert not packed.waiting
            return steps
        steps.append((packed, feed.at))
        waiting = packed.waiting


packs = st.builds(
    lambda length, count, window: Pack(seq_len=length, step_tokens=length * count, window=window),
    st.integers(2, 20),
    st.integers(1, 7),
    st.integers(0, 9),
)


@settings(deadline=None, max_examples=150)
@given(packs, st.data())
def test_every_sample_is_placed_once_whole_and_in_bounds(pack, data):
    lengths = data.draw(st.lists(st.integers(0, pack.seq_len), max_size=80))
    steps = pack_all(pack, lengths)
    placed = [item.number for packed, _ in steps for row in packed.sequences for item in row]
    assert sorted(placed) == list(range(len(lengths)))
    for packed, _ in steps:
        assert len(packed.sequences) == pack.sequences
        assert all(sum(places(i.tokens) for i in row) <= pack.seq_len for row in packed.sequences)
        assert len(packed.waiting) <= pack.window


@settings(deadline=None, max_examples=100)
@given(packs, st.data())
def test_no_sample_waits_longer_than_the_window_says(pack, data):
    lengths = data.draw(st.lists(st.integers(0, pack.seq_len), max_size=80))
    drawn_in: dict[int, int] = {}
    for step, (packed, drawn) in enumerate(pack_all(pack, lengths)):
        for number in range(len(drawn_in), drawn):
            drawn_in[number] = step
        for item in (item for row in packed.sequences for item in row):
            assert step - drawn_in[item.number] <= -(-pack.window // pack.sequences)


def test_without_a_window_a_step_is_a_contiguous_part_of_the_draw():
    pack = Pack(seq_len=10, step_tokens=20, window=0)
    steps = pack_all(pack, [6, 6, 3, 9, 4, 10])
    placed = [sorted(i.number for row in packed.sequences for i in row) for packed, _ in steps]
    assert placed == [[0, 1, 2], [3, 4], [5]]


def test_the_fullest_sequence_with_room_is_taken_and_what_fits_nowhere_waits():
    pack = Pack(seq_len=10, step_tokens=20, window=1)
    feed = Feed([6, 8, 4, 5, 2, 9])
    packed = pack_step(pack, (), feed.peek, feed.take)
    assert [[i.tokens for i in row] for row in packed.sequences] == [[6, 4], [8, 2]]
    assert [i.tokens for i in packed.waiting] == [5]
    assert feed.at == 5


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 40))
def test_the_parts_of_the_ranks_are_the_step_in_order(count, dp_size):
    parts = [rank_part(count, r, dp_size) for r in range(dp_size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 9)))
def test_all_ranks_have_as_many_microbatches_within_the_limit(sequences, dp_size, limit):
    if dp_size > sequences:
        return
    pack = Pack(seq_len=4, step_tokens=4 * sequences, microbatch_tokens=limit and 4 * limit)
    sizes = [microbatch_sizes(pack, r, dp_size) for r in range(dp_size)]
    assert len({len(s) for s in sizes}) == 1
    for rank, s in enumerate(sizes):
        assert sum(s) == len(rank_part(sequences, rank, dp_size))
        assert max(s) <= (limit or sequences)
        assert 0 not in s[:-1]
        assert s[-1] > 0 or len(s) == sum(s) + 1, (
            "only the last can be empty, and only for a rank with one less"
        )


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"seq_len": 1, "step_tokens": 8}, "seq_len must be a whole number, 2 or more"),
        ({"seq_len": 4.0, "step_tokens": 8}, "seq_len must be a whole number"),
        ({"seq_len": 4, "step_tokens": 0}, "step_tokens must be"),
        ({"seq_len": 2048, "step_tokens": 5000}, "no multiple of seq_len 2048.*take 4096 or 6144"),
        ({"seq_len": 2048, "step_tokens": 5}, "take 2048"),
        ({"seq_len": 4, "step_tokens": 8, "microbatch_tokens": 3}, "less than one sequence of 4"),
        ({"seq_len": 4, "step_tokens": 8, "window": -1}, "window must be"),
        ({"seq_len": 4, "step_tokens": 8, "pad_token": -1}, "pad_token must be"),
    ],
)
def test_a_packing_that_makes_no_sense_is_refused(settings_, says):
    with pytest.raises(PackError, match=says):
        Pack(**settings_)


def test_a_step_that_does_not_give_every_rank_a_sequence_is_refused():
    pack = Pack(seq_len=256, step_tokens=2048)
    check_ranks(pack, 7, 8)
    with pytest.raises(
        PackError, match=r"step_tokens 2048 is 8 sequences.*9 ranks.*at least 2304 step_tokens"
    ):
        check_ranks(pack, 0, 9)
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(PackError, match="dp_rank must be"):
            check_ranks(pack, rank, size)


def document(*values):
    return np.array(values, np.uint8)


def test_labels_are_the_next_token_of_the_same_document():
    pack = Pack(seq_len=8, step_tokens=16, pad_token=9)
    arrays = assemble(pack, [[document(1, 2, 3), document(), document(4)], [document(*range(8))]])
    x = IGNORED_LABEL
    assert arrays.tokens.tolist() == [[1, 2, 3, 9, 4, 9, 9, 9], list(range(8))]
    assert arrays.labels.tolist() == [[2, 3, x, x, x, x, x, x], [1, 2, 3, 4, 5, 6, 7, x]]
    p = PADDING_DOCUMENT
    assert arrays.document_ids.tolist() == [[0, 0, 0, 1, 2, p, p, p], [0] * 8]
    assert arrays.position_ids.tolist() == [[0, 1, 2, 0, 0, 0, 1, 2], list(range(8))]
    assert arrays.cu_seqlens.tolist() == [0, 3, 4, 5, 8, 16]
    assert (arrays.labels != x).sum() == sum(map(label_tokens, (3, 0, 1, 8)))


def test_a_sequence_of_padding_has_no_label_that_counts():
    arrays = assemble(Pack(seq_len=4, step_tokens=4), [[]])
    assert (arrays.labels == IGNORED_LABEL).all()
    assert arrays.cu_seqlens.tolist() == [0, 4]

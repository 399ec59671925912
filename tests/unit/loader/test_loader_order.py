import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.loader.order import Layout, PassOrder, permutation


def layout(group_rows, block_rows=4, window_blocks=3):
    return Layout(
        group_rows=np.array(group_rows, np.int64), block_rows=block_rows, window_blocks=window_blocks
    )


layouts = st.builds(layout, st.lists(st.integers(0, 23), max_size=12), st.integers(1, 9), st.integers(1, 6))


def walk(order):
    """The pass as (group, row in the group), from one window to the next."""
    rows, offset = [], 0
    while offset < order.rows:
        window = order.window_at(offset)
        assert window.first == offset
        for at in range(window.first, window.end):
            block, row = window.locate(at)
            rows.append((int(window.group[block]), int(window.start[block]) + row))
        offset = window.end
    return rows


@settings(deadline=None, max_examples=100)
@given(layouts, st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_pass_delivers_each_row_exactly_once(lay, seed, pass_index):
    order = PassOrder(lay, seed=seed, source="s", pass_index=pass_index)
    assert order.rows == lay.rows
    expected = [(g, r) for g, rows in enumerate(lay.group_rows.tolist()) for r in range(rows)]
    assert sorted(walk(order)) == expected


@settings(deadline=None, max_examples=60)
@given(layouts, st.data())
def test_a_position_is_found_without_walking_to_it(lay, data):
    order = PassOrder(lay, seed=3, source="s", pass_index=0)
    rows = walk(order)
    if rows:
        offset = data.draw(st.integers(0, len(rows) - 1))
        window = PassOrder(lay, seed=3, source="s", pass_index=0).window_at(offset)
        block, row = window.locate(offset)
        assert (int(window.group[block]), int(window.start[block]) + row) == rows[offset]


@settings(deadline=None, max_examples=60)
@given(layouts)
def test_a_window_opens_no_more_than_w_blocks_and_slices_come_in_file_order(lay):
    order = PassOrder(lay, seed=3, source="s", pass_index=0)
    offset, seen = 0, {}
    while offset < order.rows:
        window = order.window_at(offset)
        assert len(window.group) <= lay.window_blocks
        assert window.size.max() <= lay.block_rows
        for group, start, size in zip(
            window.group.tolist(), window.start.tolist(), window.size.tolist(), strict=True
        ):
            assert seen.get(group, 0) == start, "a slice is opened right behind the one before it"
            seen[group] = start + size
        offset = window.end


@settings(deadline=None, max_examples=60)
@given(layouts, st.data())
def test_remaining_counts_what_is_delivered_from_an_offset_on(lay, data):
    order = PassOrder(lay, seed=3, source="s", pass_index=0)
    if order.rows:
        offset = data.draw(st.integers(0, order.rows - 1))
        window = order.window_at(offset)
        counts = [0] * len(window.group)
        for at in range(offset, window.end):
            counts[window.locate(at)[0]] += 1
        assert window.remaining(offset).tolist() == counts


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 500), st.integers(0, 2**64 - 1), st.text(max_size=9), st.integers(0, 9), st.integers(0, 9)
)
def test_permutations_are_permutations(count, seed, source, pass_index, window):
    found = permutation(count, seed=seed, source=source, pass_index=pass_index, domain=2, window=window)
    assert sorted(found.tolist()) == list(range(count))


def test_every_key_gives_another_permutation():
    keys = [
        {"seed": 1, "source": "a", "pass_index": 0, "domain": 1, "window": 0},
        {"seed": 2, "source": "a", "pass_index": 0, "domain": 1, "window": 0},
        {"seed": 1, "source": "b", "pass_index": 0, "domain": 1, "window": 0},
        {"seed": 1, "source": "a", "pass_index": 1, "domain": 1, "window": 0},
        {"seed": 1, "source": "a", "pass_index": 0, "domain": 2, "window": 0},
        {"seed": 1, "source": "a", "pass_index": 0, "domain": 1, "window": 1},
    ]
    assert len({tuple(permutation(50, **key).tolist()) for key in keys}) == len(keys)


def test_permutations_never_change_between_versions():
    """Cursors of running jobs depend on these very numbers: if they must change, ORDER_VERSION rises."""
    found = permutation(12, seed=7, source="code", pass_index=1, domain=2, window=3)
    assert found.tolist() == GOLDEN


GOLDEN = [8, 3, 7, 4, 2, 10, 9, 1, 0, 11, 5, 6]


def test_rows_of_a_window_are_mixed_across_its_blocks():
    order = PassOrder(layout([100] * 20, 100, 10), seed=1, source="s", pass_index=0)
    first = walk(order)[:100]
    assert len({group for group, _ in first}) == 10


def test_row_groups_come_in_another_order_in_each_pass_and_source():
    def groups(source, pass_index):
        order = PassOrder(layout([5] * 30, 5, 1), seed=1, source=source, pass_index=pass_index)
        return tuple(group for group, _ in walk(order))[::5]

    assert len({groups("a", 0), groups("a", 1), groups("b", 0), tuple(range(30))}) == 4


def test_an_empty_pass_has_no_windows():
    order = PassOrder(layout([0, 0]), seed=1, source="s", pass_index=0)
    assert order.rows == 0
    with pytest.raises(IndexError, match="offset 0 of a pass of 0 rows"):
        order.window_at(0)

"""The order of one source: which row of which row group is sample number k.

Theory. A pass takes the row groups of the source in a random order. Row groups become *blocks*: a row group, or, where it
has more than `block_rows` rows, its slices, which follow each other in file order, so that a large row group is decoded
once, as a stream. W consecutive blocks form a *window*; the rows of a window are delivered in a random order before the
next window begins. So nothing is read twice, no more than W blocks are ever needed at a time, and a position is a pass and
an offset in it: finding the row costs one search and the permutation of one window, wherever in the run it stands.

Randomness is counter-based (Philox 4x64-10; Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011): the value for
an item depends on seed, source, pass, window and index alone. A permutation is the order of those values. The source enters
by its name, so the order of one source does not depend on which others there are.

PURE: arrays in, arrays out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

ORDER_VERSION = 1
"""Rises when the same seed would give another order; cursors carry it."""

_GROUPS_DOMAIN, _ROWS_DOMAIN = 1, 2
"""The last word of the Philox counter: what the value is used for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """How a source lies in its files.

    Attributes:
        group_rows: rows of every row group, (groups,), in file order.
        block_rows: rows of a block at most.
        window_blocks: W.
    """

    group_rows: Int64Array
    block_rows: int
    window_blocks: int

    @property
    def rows(self) -> int:
        """Rows of one pass."""
        return int(self.group_rows.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """W blocks and the order of their rows.

    Attributes:
        index: from 0 within the pass.
        first: offset in the pass of the first row delivered from here.
        group, start, size: per block, (blocks,): its row group, the row in that group where it begins, its rows.
        begin: (blocks + 1,): the window's rows of block b are begin[b] .. begin[b + 1] - 1.
        permutation: (rows,): the i-th row delivered is window row permutation[i].
    """

    index: int
    first: int
    group: Int64Array
    start: Int64Array
    size: Int64Array
    begin: Int64Array
    permutation: Int64Array

    @property
    def end(self) -> int:
        """Offset in the pass just behind this window."""
        return self.first + len(self.permutation)

    def locate(self, offset: int) -> tuple[int, int]:
        """The (block, row in the block) that stands at `offset` of the pass, which must lie in this window."""
        row = int(self.permutation[offset - self.first])
        block = int(np.searchsorted(self.begin, row, side="right")) - 1
        return block, row - int(self.begin[block])

    def remaining(self, offset: int) -> Int64Array:
        """Rows per block that are delivered at `offset` or later."""
        blocks = np.searchsorted(self.begin, self.permutation[offset - self.first :], side="right") - 1
        return np.bincount(blocks, minlength=len(self.group)).astype(np.int64)


class PassOrder:
    """The order of one pass over one source. Building it costs one sort of the row groups; it holds numbers per block only."""

    def __init__(self, layout: Layout, *, seed: int, source: str, pass_index: int) -> None:
        self.pass_index = pass_index
        self._seed = seed
        self._source = source
        groups = permutation(
            len(layout.group_rows), seed=seed, source=source, pass_index=pass_index, domain=_GROUPS_DOMAIN
        )
        rows = layout.group_rows[groups]
        slices = -(-rows // layout.block_rows)
        slice_of_group = np.arange(slices.sum(), dtype=np.int64) - np.repeat(
            np.cumsum(slices) - slices, slices
        )
        self._group = np.repeat(groups, slices)
        self._start = slice_of_group * layout.block_rows
        self._size = np.minimum(layout.block_rows, np.repeat(rows, slices) - self._start)
        self._window_blocks = layout.window_blocks
        ends = np.cumsum(self._size)
        last_blocks = np.minimum(
            np.arange(layout.window_blocks, len(ends) + layout.window_blocks, layout.window_blocks), len(ends)
        )
        self._window_ends = ends[last_blocks - 1]

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def window_at(self, offset: int) -> Window:
        """The window that holds `offset` (from 0, below `rows`)."""
        if not 0 <= offset < self.rows:
            raise IndexError(f"offset {offset} of a pass of {self.rows} rows")
        index = int(np.searchsorted(self._window_ends, offset, side="right"))
        part = slice(index * self._window_blocks, (index + 1) * self._window_blocks)
        size = self._size[part]
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
        return Window(
            index=index,
            first=int(self._window_ends[index - 1]) if index else 0,
            group=self._group[part],
            start=self._start[part],
            size=size,
            begin=begin,
            permutation=permutation(
                int(begin[-1]),
                seed=self._seed,
                source=self._source,
                pass_index=self.pass_index,
                domain=_ROWS_DOMAIN,
                window=index,
            ),
        )


def permutation(
    count: int, *, seed: int, source: str, pass_index: int, domain: int, window: int = 0
) -> Int64Array:
    """A permutation of 0 .. count - 1, a pure function of the arguments."""
    key = np.array([seed, source_key(source)], dtype=np.uint64)
    counter = np.array([0, window, pass_index, domain], dtype=np.uint64)
    values = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.argsort(values, kind="stable").astype(np.int64)


def source_key(name: str) -> int:
    """64 bits that stand for the source in the Philox key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

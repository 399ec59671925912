"""The samples of one source by number, in its own order: the order of `order` over the files of `source`.

Blocks of the window are decoded when the first of their rows is asked for, and dropped with the last one, so a start reads one
block before the first sample is out, and a resume decodes no more than the blocks of the window it stands in (for a large row
group: from its beginning).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.loader.errors import SampleMissingError
from surefoot.loader.order import PassOrder, Window
from surefoot.loader.source import ParquetSource, TextBlock


class SampleRef(NamedTuple):
    """A drawn sample: number `number` (from 0, over all passes) of `source`."""

    source: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample with its payload.

    Attributes:
        id: ``<source>:<pass>:<file name>:<row>``; the row counts from 0 within the file.
        data: its tokens, a copy.
    """

    ref: SampleRef
    id: str
    path: str
    data: npt.NDArray[np.uint8]

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.data)


@dataclass(slots=True)
class _Slices:
    """A row group being read as a stream: the slice that comes next begins at row `at`."""

    at: int
    blocks: Iterator[TextBlock]


class SampleReader:
    """Reads the samples of one source. Numbers should rise; going back costs decoding again."""

    def __init__(self, opened: ParquetSource, *, seed: int) -> None:
        self.opened = opened
        self.name = opened.source.name
        self.rows = opened.layout.rows
        self._seed = seed
        self._order: PassOrder | None = None
        self._window: Window | None = None
        self._blocks: dict[int, TextBlock] = {}
        self._left: list[int] = []
        self._slices: dict[int, _Slices] = {}

    def sample(self, number: int) -> Sample:
        """Read sample `number`.

        Raises:
            SourceError: a file cannot be read, is bad, or the row holds null.
        """
        pass_index, offset = divmod(number, self.rows)
        window = self._enter(pass_index, offset)
        at, row = window.locate(offset)
        block = self._block(window, at)
        entry, row_in_file = self.opened.place(int(window.group[at]), int(window.start[at]) + row)
        sample_id = f"{self.name}:{pass_index}:{entry.name}:{row_in_file}"
        if block.is_null(row):
            raise SampleMissingError(
                f"sample {sample_id} is null; take such rows out when preparing the data",
                sample_id=sample_id,
                source=self.name,
                path=entry.path,
            )
        data = block.tokens(row).copy()
        self._left[at] -= 1
        if self._left[at] <= 0:
            self._blocks.pop(at, None)
        return Sample(ref=SampleRef(self.name, number), id=sample_id, path=entry.path, data=data)

    def reset(self) -> None:
        """Forget what is open; the next sample may have any number."""
        self._order = self._window = None
        self._blocks.clear()
        self._slices.clear()

    def close(self) -> None:
        """Let go of files and memory."""
        self.reset()
        self.opened.close()

    def _enter(self, pass_index: int, offset: int) -> Window:
        if self._order is None or self._order.pass_index != pass_index:
            self._order = PassOrder(
                self.opened.layout, seed=self._seed, source=self.name, pass_index=pass_index
            )
            self._window = None
        window = self._window
        if window is None or not window.first <= offset < window.end:
            window = self._window = self._order.window_at(offset)
            self._blocks.clear()
            self._left = window.remaining(offset).tolist()
            groups = set(window.group.tolist())
            self._slices = {group: slices for group, slices in self._slices.items() if group in groups}
        return window

    def _block(self, window: Window, at: int) -> TextBlock:
        if at not in self._blocks:
            group = int(window.group[at])
            if self.opened.is_streamed(group):
                self._read_slices(window, at, group)
            else:
                self._blocks[at] = self.opened.read_group(group)
        return self._blocks[at]

    def _read_slices(self, window: Window, at: int, group: int) -> None:
        """Read the stream of a large row group up to block `at`, keeping what this window still needs on the way."""
        slices = self._slices.get(group)
        if slices is None or slices.at > window.start[at]:
            slices = self._slices[group] = _Slices(0, self.opened.stream_group(group))
        first = (
            at - int(window.start[at]) // self.opened.source.block_rows
        )  # block of the group's first slice, may be < 0
        while slices.at <= window.start[at]:
            block = next(slices.blocks)
            here = first + slices.at // self.opened.source.block_rows
            if here == at or (here >= 0 and self._left[here] > 0):
                self._blocks[here] = block
            slices.at += self.opened.source.block_rows
        if slices.at >= self.opened.layout.group_rows[group]:
            next(slices.blocks, None)  # runs its checks of the end, and closes the file
            del self._slices[group]

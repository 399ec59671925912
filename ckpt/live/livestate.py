"""What a `Checkpointer` knows of the training state it saves, from save to save. (torch)

`look` walks the state; the rest works on what it found, until `forget`. Only what this rank writes is copied. Of boxes that
replicas hold as well, the hash is taken where they lie; where that cannot be (on a device, not contiguous) they are staged
whole, and the uploader takes the hash.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from surefoot.ckpt.live.copying import LiveChunks, copy_into, hash_in_place, hashable_in_place
from surefoot.ckpt.live.leaves import Leaf, part_of
from surefoot.ckpt.live.pool import StagingBuffer
from surefoot.ckpt.live.ranklayout import Exchange, RankLayout, agree_on_layout
from surefoot.ckpt.live.streams import Fence, SideStreams
from surefoot.ckpt.planning.replicas import label
from surefoot.ckpt.state import Collected, collect, missing_optimizer_nbytes

GROWTH = 1.02
"""Room in the staging buffer over what is expected: optimizers add small things as well."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector waits. A walk makes many objects and drops them all again; a full collection in the midst of it
    goes through everything that the training holds (measured: 140 ms, in every third save of 4,000 tensors)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LiveState:
    """See the module. For one thread."""

    def __init__(self, *, rank: int, world_size: int, exchange: Exchange) -> None:
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._layout: RankLayout | None = None
        self._found = Collected()
        self._side = SideStreams()
        self._in_place: bool | None = None
        """Whether all shared boxes can be hashed where they lie; None until it is asked for."""

    def look(self, state: Mapping[str, Any]) -> bool:
        """Walk the state; True where its layout is another than the known one, or none is known. Raises StateError."""
        self._found = collect(state, self._rank)
        self._in_place = None
        self._tensors = tuple([leaf.layout() for leaf in self._found.leaves.values()])
        return self._layout is None or not self._layout.fits(self._tensors, self._found.aliases)

    def agree(self) -> None:
        """Work out this rank's share of the layout that `look` saw. Collective. Raises StateError, CoverageError."""
        self._layout = None
        self._layout = agree_on_layout(
            self._tensors,
            self._found.aliases,
            rank=self._rank,
            world_size=self._world_size,
            exchange=self._exchange,
        )

    def forget(self) -> None:
        """Let go of the tensors (not of the layout)."""
        self._found = Collected()

    @property
    def known(self) -> bool:
        """The ranks have agreed on a layout; the same on all of them."""
        return self._layout is not None

    @property
    def layout(self) -> RankLayout:
        assert self._layout is not None, "agree comes first"
        return self._layout

    @property
    def values(self) -> dict[str, Any]:
        return self._found.values

    def staged_nbytes(self) -> int:
        """How much of the buffer `stage` fills."""
        s = self.layout.structure
        if self._in_place is None:
            shared = ((b.name, b.box) for b in s.shared)
            self._in_place = hashable_in_place(shared, self._found.leaves)
        return s.written_nbytes if self._in_place else s.data_nbytes

    def expected_nbytes(self) -> int:
        """`staged_nbytes`, and in the same proportion what optimizers will add at their first step."""
        staged = self.staged_nbytes()
        held = sum(view.nbytes for leaf in self._found.leaves.values() for view in leaf.views)
        missing = missing_optimizer_nbytes(self._found)
        return int(GROWTH * staged * (1 + missing / max(held, 1)))

    def stage(self, buffer: StagingBuffer) -> Fence | None:
        """Copy what this rank writes into the buffer; what is copied by a device is done once the fence is."""
        nbytes = self.staged_nbytes()
        if not nbytes:
            return None
        base = torch.frombuffer(buffer.view[:nbytes], dtype=torch.uint8)
        layout = self.layout
        copies = layout.written if self._in_place else (*layout.written, *layout.kept)
        return copy_into(copies, self._found.leaves, base, self._side)

    def device(self) -> torch.device | None:
        """A CUDA device that holds some of the state; None where none does."""
        views = (view for leaf in self._found.leaves.values() for view in leaf.views)
        return next((view.device for view in views if view.is_cuda), None)

    def copied(self, timeout_s: float) -> bool:
        """Wait until no device copies into a buffer any more, as for a save that was given up. False where that takes longer."""
        return self._side.idle(timeout_s)

    def hashes(self) -> dict[str, str] | None:
        """xxh3-64 of every box that replicas hold as well, by its label. None where the uploader has to take them."""
        if not self._in_place:
            return None
        return {
            label(b.name, b.box): hash_in_place(self._view(b.name, b.box))
            for b in self.layout.structure.shared
        }

    def hashes_of_any(self) -> dict[str, str]:
        """The same wherever the boxes lie, one after the other through host memory: for a save that stages nothing."""
        found: dict[str, str] = {}
        for b in self.layout.structure.shared:
            view = self._view(b.name, b.box)
            found[label(b.name, b.box)] = hash_in_place(view.cpu().contiguous())
        return found

    def chunks(self) -> LiveChunks:
        """What this rank writes, straight from live memory."""
        return LiveChunks(self.layout.written, self._found.leaves)

    def _view(self, name: str, box: Any) -> torch.Tensor:
        leaf: Leaf = self._found.leaves[name]
        with torch.no_grad():
            return part_of(leaf, box)

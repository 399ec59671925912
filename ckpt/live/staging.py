"""One rank's state into a slot and back: `Stager`. Imports torch only when a Stager is made.

What happens in a step: walk the live state (names, values), compare its layout with the known one, copy every box into the
slot, take checksums, seal. Only a new layout needs the other ranks: all gather all layouts once, and everybody computes
the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.ckpt.boxes import Box, intersect, span
from surefoot.ckpt.errors import StateMismatchError
from surefoot.ckpt.format.image import (
    ALIGN_NBYTES,
    PAGE_NBYTES,
    ImageInfo,
    ImageWriter,
    aligned,
    data_view,
    verify_image,
)
from surefoot.ckpt.format.plain import decode_plain, encode_plain
from surefoot.ckpt.live.ranklayout import Exchange, RankLayout, agree_on_layout
from surefoot.ckpt.manifest import LedgerRow, Piece, TensorMeta
from surefoot.ckpt.planning.plan import ITEMSIZES, nbytes_of

if TYPE_CHECKING:
    from surefoot.ckpt.state import Collected, Leaf, Want

META_ROOM_NBYTES = 2 * 2**20
"""What a slot has to spare for values, cursor and ledger, beyond twice what the last snapshot needed: thousands of ledger
rows, so that an object store that is away for a while does not outgrow the slots."""
ROUND_NBYTES = 2**20
"""Slot sizes are multiples of this: a ledger that grows by a row does not change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a load brought back besides the state itself. `ledger`: rows not committed yet (empty from a manifest)."""

    generation: int
    step: int
    cursor: dict[str, Any]
    ledger: tuple[LedgerRow, ...]
    extra: dict[str, Any] | None


class Stager:
    """Stages and restores one live state. Not safe for use by several threads."""

    def __init__(self, state: Mapping[str, Any], *, rank: int, world_size: int, exchange: Exchange) -> None:
        """Nothing is read yet.

        Args:
            state: see ckpt/state.py. The same names on every rank that holds a part of the same tensor.
            exchange: called when the layout is new, at the same step on all ranks: first, and when optimizer state appears.
        """
        from surefoot.ckpt import state as live

        self._live = live
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._layout: RankLayout | None = None
        self._side: Any = None
        self._meta_nbytes = 0

    def nbytes(self) -> int:
        """What a slot must hold. Counts the state that optimizers will add at their first step, and room for a growing ledger.

        Raises StateError.
        """
        return self._nbytes(self._live.collect(self._state, self._rank))

    def stage(
        self,
        buf: memoryview,
        /,
        *,
        generation: int,
        step: int,
        cursor: dict[str, Any],
        ledger: Sequence[LedgerRow],
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Copy the state into the slot `buf` and seal it. What was in the slot is gone from the first byte on.

        No reference to `buf` is kept. `cursor` and `extra`: see ckpt/format/plain.py.

        Raises:
            StateError: the state, the cursor or the extra cannot be stored.
            CoverageError: the ranks' shards do not make up whole tensors.
            SlotTooSmallError: `nbytes` says more; the slot stays without a seal.
        """
        plain = encode_plain("cursor", cursor), encode_plain("extra", extra)
        found = self._live.collect(self._state, self._rank)
        layout = self._layout_of(found.leaves, found.aliases)
        writer = ImageWriter(buf, layout.structure, layout.encoded)
        with writer.begin() as data:
            self._copy(layout, found.leaves, data)
        end = writer.seal(
            generation=generation,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            values=found.values,
            cursor=plain[0],
            ledger=ledger,
            extra=plain[1],
        )
        self._meta_nbytes = end - PAGE_NBYTES - layout.structure.data_nbytes

    def restore(self, buf: memoryview, /) -> Restored:
        """Fill the state from a sealed image of the same rank and layout, after verifying all of it.

        Raises:
            ImageError: unsealed, foreign, corrupt.
            StateMismatchError: an image of another rank, layout or state.
        """
        info = verify_image(buf)
        if (info.rank, info.world_size) != (self._rank, self._world_size):
            raise StateMismatchError(
                f"the snapshot is of rank {info.rank} of {info.world_size}, and this is rank {self._rank} of {self._world_size}: "
                f"load the checkpoint instead, which fits any number of ranks"
            )
        with buf.cast("B") as view, data_view(view, info.meta.structure) as data:
            self._live.load_into(self._state, ImageSource(info, data), rank=self._rank)
        return Restored(
            generation=info.generation,
            step=info.step,
            cursor=decode_plain("cursor", info.meta.cursor) or {},
            ledger=info.meta.ledger,
            extra=decode_plain("extra", info.meta.extra),
        )

    # ---- inside

    def _nbytes(self, found: Collected) -> int:
        held = sum(nbytes_of(leaf.meta, h.box) for leaf in found.leaves.values() for h in leaf.held)
        missing = self._live.missing_optimizer_nbytes(found)
        names = 512 * (len(found.leaves) + len(found.values) + (2 * len(found.leaves) if missing else 0))
        room = META_ROOM_NBYTES + names + 2 * self._meta_nbytes
        return aligned(PAGE_NBYTES + ALIGN_NBYTES + held + missing + room, ROUND_NBYTES)

    def _copy(self, layout: RankLayout, leaves: Mapping[str, Leaf], data: memoryview) -> None:
        import torch

        from surefoot.ckpt.live.copying import copy_into
        from surefoot.ckpt.live.streams import SideStreams

        if not len(data):
            return
        if self._side is None:
            self._side = SideStreams()
        base = torch.frombuffer(data, dtype=torch.uint8)
        fence = copy_into((*layout.written, *layout.kept), leaves, base, self._side)
        if fence is not None:
            fence.wait()  # the seal is written next, and tells of checksums

    def _layout_of(self, leaves: Mapping[str, Leaf], aliases: dict[str, str]) -> RankLayout:
        tensors = tuple(leaf.layout() for leaf in leaves.values())
        if self._layout is None or not self._layout.fits(tensors, aliases):
            self._layout = agree_on_layout(
                tensors, aliases, rank=self._rank, world_size=self._world_size, exchange=self._exchange
            )
        return self._layout


class ImageSource:
    """A load's `Source` that reads a verified image. `data` is the image's data section."""

    def __init__(self, info: ImageInfo, data: memoryview) -> None:
        self._info = info
        self._data = data
        self._pieces: dict[str, list[Piece]] = {}
        structure = info.meta.structure
        for piece in (*structure.written, *structure.kept):
            self._pieces.setdefault(piece.name, []).append(piece)

    @property
    def label(self) -> str:
        return f"the snapshot of step {self._info.step}, generation {self._info.generation}, rank {self._info.rank}"

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self._info.meta.structure.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._info.meta.structure.aliases

    @property
    def values(self) -> Mapping[str, Any]:
        return self._info.meta.values

    def where(self, name: str) -> str:
        return "that snapshot"

    def agree(self, wants: Sequence[Want], unused: Sequence[str], refusal: Exception | None) -> Sequence[str]:
        """Every rank restores its own snapshot: nothing in it is another's."""
        return unused

    def fill(self, wants: Sequence[Want]) -> None:
        """Raises StateMismatchError where this rank now holds other parts of a tensor than it did."""
        from surefoot.ckpt.state import fill_part

        for want in wants:
            itemsize = ITEMSIZES[want.leaf.meta.dtype]
            for held in want.leaf.held:
                filled = 0
                for piece in self._pieces.get(want.stored, ()):
                    box = Box(piece.offset, piece.extent)
                    if (part := intersect(held.box, box)) is None:
                        continue
                    a, b = span(box, part, itemsize)
                    fill_part(want.leaf, box, part, self._data[piece.at + a : piece.at + b])
                    filled += part.numel
                if filled != held.box.numel:
                    raise StateMismatchError(
                        f"{self.label} does not hold {want.leaf.name}{held.box}: the layout has changed; load the checkpoint instead"
                    )

"""What one rank does about its state, as long as its layout stays: which piece lies where. Torch-free.

Agreeing needs the other ranks once per layout; afterwards nothing here is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.format.image import ImageStructure, SharedBox, aligned
from surefoot.ckpt.manifest import Piece, TensorMeta
from surefoot.ckpt.planning.layouts import HeldTensor, exchange_layouts, layouts_of
from surefoot.ckpt.planning.plan import Placed, Plan, RankShare, nbytes_of, place

Exchange = Callable[[bytes], list[bytes]]
"""All-gather of bytes over all ranks, in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`box` of a tensor of type `dtype` (torch's name) goes to bytes at .. end - 1 of the data."""

    name: str
    box: Box
    at: int
    end: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """What this rank holds, and what follows from it and from what the others hold."""

    tensors: tuple[HeldTensor, ...]
    aliases: dict[str, str]
    structure: ImageStructure
    encoded: bytes
    """The structure as JSON: it is large and stays the same."""
    written: tuple[Copy, ...]
    kept: tuple[Copy, ...]

    def fits(self, tensors: tuple[HeldTensor, ...], aliases: Mapping[str, str]) -> bool:
        return self.tensors == tensors and self.aliases == aliases


def agree_on_layout(
    tensors: tuple[HeldTensor, ...],
    aliases: dict[str, str],
    *,
    rank: int,
    world_size: int,
    exchange: Exchange,
) -> RankLayout:
    """Tell the others what this rank holds, and work out its share. Collective.

    Raises: StateError (ranks disagree on a tensor), CoverageError.
    """
    layouts = layouts_of([tensors]) if world_size == 1 else exchange_layouts(tensors, rank, exchange)
    share = Plan(layouts).share(rank)
    metas = {t.name: TensorMeta(dtype=t.dtype, shape=t.shape) for t in tensors}
    shared = {name for name, _ in share.shared}
    written, written_nbytes = place(metas, share.written, shared=shared)
    kept, end = place(metas, share.kept, aligned(written_nbytes))
    structure = _structure(metas, aliases, share, written, written_nbytes, kept, end)
    return RankLayout(
        tensors=tensors,
        aliases=aliases,
        structure=structure,
        encoded=msgspec.json.encode(structure),
        written=tuple(_copy(p, metas) for p in written),
        kept=tuple(_copy(p, metas) for p in kept),
    )


def _copy(p: Placed, metas: Mapping[str, TensorMeta]) -> Copy:
    meta = metas[p.name]
    return Copy(name=p.name, box=p.box, at=p.at, end=p.at + nbytes_of(meta, p.box), dtype=meta.dtype)


def _structure(
    metas: dict[str, TensorMeta],
    aliases: dict[str, str],
    share: RankShare,
    written: Sequence[Placed],
    written_nbytes: int,
    kept: Sequence[Placed],
    end: int,
) -> ImageStructure:
    return ImageStructure(
        tensors=metas,
        aliases=aliases,
        written=tuple(_piece(p) for p in written),
        kept=tuple(_piece(p) for p in kept),
        shared=tuple(SharedBox(name=name, box=box) for name, box in share.shared),
        written_nbytes=written_nbytes,
        kept_start=aligned(written_nbytes) if kept else written_nbytes,
        data_nbytes=end if kept else written_nbytes,
    )


def _piece(p: Placed) -> Piece:
    return Piece(name=p.name, offset=p.box.offset, extent=p.box.extent, at=p.at)

"""Snapshot images without torch: numpy arrays, sharded by rows or replicated, sealed as a rank would seal them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from surefoot.ckpt.boxes import Sharding, held_boxes
from surefoot.ckpt.format.image import ImageStructure, ImageWriter, SharedBox, aligned
from surefoot.ckpt.manifest import LedgerRow, Piece, TensorMeta
from surefoot.ckpt.planning.plan import HeldTensor, Placed, RankShare, assign, place

ROOM = 2**16


def arrays(scale: int = 1) -> dict[str, np.ndarray]:
    """A small state in which every element is its own global index, so that a misplaced one cannot hide."""
    return {
        "model.w": np.arange(7 * 3 * scale, dtype=np.float32).reshape(7, 3 * scale),
        "model.b": np.arange(5, dtype=np.float64) + 1000,
        "model.on": np.array([True, False, True]),
        "optim.params.model.w.step": np.array(12.0, dtype=np.float32),
    }


def a_row(step: int, generation: int) -> Callable[[int], list[LedgerRow]]:
    """For `make_images`: what each rank consumed in one step, so that the commit leaves a ledger."""
    return lambda rank: [
        LedgerRow(step=step, generation=generation, dp_rank=rank, samples=(f"s:{step}:{rank}",), loss=None)
    ]


def layouts_of(
    whole_arrays: Mapping[str, np.ndarray], world_size: int, sharded: Collection[str]
) -> list[list[HeldTensor]]:
    def held(name: str, a: np.ndarray, rank: int) -> HeldTensor:
        by = [Sharding(0, world_size, rank)] if name in sharded else []
        boxes = tuple(h.box for h in held_boxes(a.shape, by))
        return HeldTensor(name=name, dtype=a.dtype.name, shape=a.shape, boxes=boxes)

    return [[held(name, a, rank) for name, a in whole_arrays.items()] for rank in range(world_size)]


def make_images(
    whole_arrays: Mapping[str, np.ndarray],
    world_size: int = 1,
    *,
    generation: int = 1,
    step: int = 20,
    sharded: Collection[str] = ("model.w",),
    values: Callable[[int], dict[str, Any]] = lambda rank: {"epoch": 3},
    cursor: Callable[[int], dict[str, Any]] = lambda rank: {"at": 5},
    ledger: Callable[[int], Sequence[LedgerRow]] = lambda rank: (),
    block_nbytes: int = 64,
    change: Callable[[int, dict[str, np.ndarray]], None] = lambda rank, mine: None,
) -> list[memoryview]:
    """One sealed image per rank. `change` may spoil what one rank holds."""
    layouts = layouts_of(whole_arrays, world_size, sharded)
    images: list[memoryview] = []
    for rank, share in enumerate(assign(layouts)):
        mine = {name: a.copy() for name, a in whole_arrays.items()}
        change(rank, mine)
        structure = structure_of(layouts[rank], share, block_nbytes)
        buf = memoryview(bytearray(structure.data_nbytes + ROOM))
        writer = ImageWriter(buf, structure, msgspec.json.encode(structure))
        data = writer.begin()
        for p in (*structure.written, *structure.kept):
            part = mine[p.name][tuple(slice(o, o + e) for o, e in zip(p.offset, p.extent, strict=True))]
            data[p.at : p.at + part.nbytes] = np.ascontiguousarray(part).tobytes()
        end = writer.seal(
            generation=generation,
            step=step,
            rank=rank,
            world_size=world_size,
            values=values(rank),
            cursor=cursor(rank),
            ledger=ledger(rank),
            extra={"rank": rank},
        )
        images.append(buf[:end])
    return images


def structure_of(layout: Sequence[HeldTensor], share: RankShare, block_nbytes: int) -> ImageStructure:
    metas = {t.name: TensorMeta(dtype=t.dtype, shape=t.shape) for t in layout}
    written, written_nbytes = place(metas, share.written)
    kept, end = place(metas, share.kept, aligned(written_nbytes))
    return ImageStructure(
        tensors=metas,
        aliases={"model.tied": "model.w"},
        written=tuple(_piece(p) for p in written),
        kept=tuple(_piece(p) for p in kept),
        shared=tuple(SharedBox(name=name, box=box) for name, box in share.shared),
        written_nbytes=written_nbytes,
        kept_start=aligned(written_nbytes) if kept else written_nbytes,
        data_nbytes=end if kept else written_nbytes,
        block_nbytes=block_nbytes,
    )


def _piece(p: Placed) -> Piece:
    return Piece(name=p.name, offset=p.box.offset, extent=p.box.extent, at=p.at)

"""Snapshot images without torch: one tensor ``w`` of shape (world, n), one row a rank, its bytes a function of rank and step."""

from __future__ import annotations

import msgspec

from surefoot.ckpt.format.image import ALIGN_NBYTES, ImageStructure, ImageWriter, aligned
from surefoot.ckpt.manifest import PAGE_NBYTES, LedgerRow, Piece, TensorMeta

ROOM_NBYTES = 16 << 10
"""For seal page and meta data."""


def slot_nbytes(row_nbytes: int) -> int:
    return aligned(row_nbytes, PAGE_NBYTES) + ROOM_NBYTES


def row(rank: int, step: int, nbytes: int) -> bytes:
    return bytes((rank * 7 + step + i) % 251 for i in range(min(nbytes, 251))) * (nbytes // 251 + 1)


def write_image(
    buf: memoryview, *, rank: int, world_size: int, generation: int, step: int, row_nbytes: int
) -> int:
    """Seal an image into `buf`; returns its size."""
    structure = ImageStructure(
        tensors={"w": TensorMeta(dtype="uint8", shape=(world_size, row_nbytes))},
        aliases={},
        written=(Piece(name="w", offset=(rank, 0), extent=(1, row_nbytes), at=0),),
        kept=(),
        shared=(),
        written_nbytes=row_nbytes,
        kept_start=aligned(row_nbytes, ALIGN_NBYTES),
        data_nbytes=aligned(row_nbytes, ALIGN_NBYTES),
    )
    writer = ImageWriter(buf, structure, msgspec.json.encode(structure))
    data = writer.begin()
    data[:row_nbytes] = row(rank, step, row_nbytes)[:row_nbytes]
    rows = [
        LedgerRow(step=step, generation=generation, dp_rank=rank, samples=(f"s:{step}:{rank}",), loss=None)
    ]
    return writer.seal(
        generation=generation,
        step=step,
        rank=rank,
        world_size=world_size,
        values={},
        cursor={"step": step},
        ledger=rows,
        extra=None,
    )

"""What a load by another number of ranks would read, without reading it. PURE.

The layout assumed is FSDP's: every tensor cut along its first dimension, as evenly as whole rows allow; 0-d tensors whole on
every rank.
"""

from __future__ import annotations

import msgspec

from surefoot.ckpt.boxes import Box, Sharding, held_boxes, intersect, span
from surefoot.ckpt.manifest import DataObject, Manifest
from surefoot.ckpt.planning.plan import ITEMSIZES


class RankRead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank would read."""

    rank: int
    held_nbytes: int
    """What it would hold."""
    read_nbytes: int
    """The checked blocks that hold it: whole blocks, so a little more. Several ranks may need the same."""
    objects: int
    """From how many objects."""


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A dry run of a load."""

    step: int
    generation: int
    saved_by: int
    """Ranks that saved it."""
    world_size: int
    ranks: tuple[RankRead, ...]
    unique_nbytes: int
    """All tensors, each once."""
    read_nbytes: int
    """What leaves the store for the job as a whole: each block that any rank needs, once."""
    objects: int
    """From how many objects."""


def plan_reshard(manifest: Manifest, world_size: int) -> ReshardPlan:
    """Raises ValueError for a world size below 1."""
    if world_size < 1:
        raise ValueError(f"a job has at least 1 rank, not {world_size}")
    taken = [set[int]() for _ in manifest.objects]
    ranks = tuple(_rank_read(manifest, rank, world_size, taken) for rank in range(world_size))
    return ReshardPlan(
        step=manifest.step,
        generation=manifest.generation,
        saved_by=manifest.world_size,
        world_size=world_size,
        ranks=ranks,
        unique_nbytes=manifest.nbytes,
        read_nbytes=sum(
            _blocks_nbytes(source, blocks) for source, blocks in zip(manifest.objects, taken, strict=True)
        ),
        objects=sum(1 for blocks in taken if blocks),
    )


def _rank_read(manifest: Manifest, rank: int, world_size: int, taken: list[set[int]]) -> RankRead:
    """What is needed of each object is added to `taken`."""
    wanted: dict[str, tuple[Box, ...]] = {}
    held = 0
    for name, meta in manifest.tensors.items():
        by = [Sharding(0, world_size, rank)] if meta.shape else []
        wanted[name] = tuple(h.box for h in held_boxes(meta.shape, by))
        held += sum(b.numel for b in wanted[name]) * ITEMSIZES[meta.dtype]
    read = objects = 0
    for source, by_others in zip(manifest.objects, taken, strict=True):
        blocks = _needed(manifest, source, wanted)
        by_others |= blocks
        nbytes = _blocks_nbytes(source, blocks)
        read += nbytes
        objects += nbytes > 0
    return RankRead(rank=rank, held_nbytes=held, read_nbytes=read, objects=objects)


def _needed(manifest: Manifest, source: DataObject, wanted: dict[str, tuple[Box, ...]]) -> set[int]:
    blocks: set[int] = set()
    size = source.block_nbytes
    for p in source.pieces:
        stored = Box(p.offset, p.extent)
        itemsize = ITEMSIZES[manifest.tensors[p.name].dtype]
        for box in wanted[p.name]:
            if (part := intersect(stored, box)) is not None:
                begin, end = span(stored, part, itemsize)
                blocks.update(range((p.at + begin) // size, -(-(p.at + end) // size)))
    return blocks


def _blocks_nbytes(source: DataObject, blocks: set[int]) -> int:
    size = source.block_nbytes
    return sum(min(size, source.data_nbytes - b * size) for b in blocks)

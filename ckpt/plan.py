"""Who writes which box. PURE: the same layouts give the same plan on every rank, so agreeing on the layouts is enough.

Every rank stages all that it holds (it restores from that alone), but each element is uploaded once. Ranks that hold the
same box are replicas: a large box is split among them, a small one goes whole to the replica with the least to write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from surefoot.ckpt.boxes import Box, miscovered, split
from surefoot.ckpt.errors import CoverageError, StateError
from surefoot.ckpt.manifest import TensorMeta

SPLIT_NBYTES = 256 * 2**10
"""A replicated box is split where every replica gets at least this much: below, a piece costs more to name than to write."""

ITEMSIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element, by torch's name of the type: what can be stored at all."""


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a tensor; no boxes where its shard is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does about its boxes. All are ascending by name, then offset."""

    written: tuple[tuple[str, Box], ...]
    """What it uploads."""
    kept: tuple[tuple[str, Box], ...]
    """What it only keeps for itself: parts that a replica uploads."""
    shared: tuple[tuple[str, Box], ...]
    """Its boxes that others hold too, uncut: their hashes must be the same everywhere."""


def nbytes_of(meta: TensorMeta | HeldTensor, box: Box) -> int:
    return box.numel * ITEMSIZES[meta.dtype]


def merge_tensors(layouts: Iterable[Iterable[HeldTensor]]) -> dict[str, TensorMeta]:
    """Every tensor of every rank.

    Raises StateError where ranks disagree on shape or type of the same name.
    """
    merged: dict[str, tuple[TensorMeta, int]] = {}
    for rank, layout in enumerate(layouts):
        for held in layout:
            meta = TensorMeta(dtype=held.dtype, shape=held.shape)
            known, where = merged.setdefault(held.name, (meta, rank))
            if known != meta:
                raise StateError(
                    f"{held.name} is {meta.dtype}{list(meta.shape)} on rank {rank} and {known.dtype}{list(known.shape)} on rank "
                    f"{where}: give different tensors different names, or make the shard a DTensor"
                )
    return {name: meta for name, (meta, _) in merged.items()}


def assign(layouts: Sequence[Sequence[HeldTensor]]) -> list[RankShare]:
    """Share the writing out: one `RankShare` per rank, from what all ranks hold.

    Raises:
        StateError: ranks disagree on a tensor.
        CoverageError: some element is held by nobody, or boxes overlap without being equal.
    """
    tensors = merge_tensors(layouts)
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for held in layout:
            for box in held.boxes:
                holders[held.name, box].append(rank)
    prove_coverage(tensors, ((name, box) for name, box in holders))

    written: list[list[tuple[str, Box]]] = [[] for _ in layouts]
    kept: list[list[tuple[str, Box]]] = [[] for _ in layouts]
    shared: list[list[tuple[str, Box]]] = [[] for _ in layouts]
    load = [0] * len(layouts)
    by_size = sorted(holders, key=lambda nb: (-nbytes_of(tensors[nb[0]], nb[1]), nb))
    for name, box in by_size:
        ranks = holders[name, box]
        nbytes = nbytes_of(tensors[name], box)
        for rank, part in _share(box, nbytes, ranks, load):
            written[rank].append((name, part))
            load[rank] += nbytes_of(tensors[name], part)
            for other in ranks:
                if other != rank:
                    kept[other].append((name, part))
        if len(ranks) > 1:
            for rank in ranks:
                shared[rank].append((name, box))
    return [
        RankShare(written=tuple(sorted(w)), kept=tuple(sorted(k)), shared=tuple(sorted(s)))
        for w, k, s in zip(written, kept, shared, strict=True)
    ]


def _share(box: Box, nbytes: int, ranks: Sequence[int], load: Sequence[int]) -> list[tuple[int, Box]]:
    """Who of `ranks` writes which part of the box. The least loaded come first; ties go to the lowest rank."""
    by_load = sorted(ranks, key=lambda r: (load[r], r))
    parts = min(len(ranks), nbytes // SPLIT_NBYTES)
    if parts < 2:
        return [(by_load[0], box)]
    slices = split(box, parts)
    return [(rank, part) for rank, part in zip(by_load, slices, strict=False) if part is not None]


def prove_coverage(tensors: Mapping[str, TensorMeta], pieces: Iterable[tuple[str, Box]]) -> None:
    """Every element of every tensor lies in exactly one piece. O(pieces).

    Raises CoverageError naming tensor and element, and the box that holds it.
    """
    by_name: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in pieces:
        if name not in by_name:
            raise CoverageError(f"a piece {box} belongs to {name!r}, which is no tensor of this checkpoint")
        if len(box.offset) != len(tensors[name].shape) or min((*box.offset, *box.extent), default=0) < 0:
            raise CoverageError(f"{name}: {box} is no box of a tensor of shape {list(tensors[name].shape)}")
        by_name[name].append(box)
    for name, boxes in by_name.items():
        wrong = miscovered(tensors[name].shape, boxes)
        if wrong is None:
            continue
        at = [
            str(b)
            for b in boxes
            if all(o <= i < o + e for i, o, e in zip(wrong.element, b.offset, b.extent, strict=True))
        ]
        held = f"by the boxes {', '.join(sorted(at)[:4])}" if at else "by no box"
        raise CoverageError(
            f"{name} of shape {list(tensors[name].shape)}: element {list(wrong.element)} is covered {wrong.times} times, {held}; "
            f"every element must be written exactly once"
        )


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A box at byte `at` of a data section."""

    name: str
    box: Box
    at: int


def place(
    tensors: Mapping[str, TensorMeta], pieces: Iterable[tuple[str, Box]], start: int = 0
) -> tuple[list[Placed], int]:
    """Lay pieces out one after the other from byte `start`, without holes; returns them and the end.

    The largest element types come first, so every piece is aligned to its own (safetensors allows no padding between
    tensors). `start` must be a multiple of 16.
    """
    placed: list[Placed] = []
    at = start
    for name, box in sorted(pieces, key=lambda nb: (-ITEMSIZES[tensors[nb[0]].dtype], nb)):
        placed.append(Placed(name=name, box=box, at=at))
        at += nbytes_of(tensors[name], box)
    return placed, at


# ---------------------------------------------------------------- reading


def coalesce(blocks: Iterable[int], *, count_max: int) -> list[tuple[int, int]]:
    """Runs [first, last + 1) of neighbouring block numbers, none longer than `count_max`."""
    runs: list[tuple[int, int]] = []
    for b in sorted(set(blocks)):
        if runs and runs[-1][1] == b and b - runs[-1][0] < count_max:
            runs[-1] = (runs[-1][0], b + 1)
        else:
            runs.append((b, b + 1))
    return runs

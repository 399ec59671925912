"""Who writes which box. PURE: the same layouts give the same plan on every rank, so agreeing on the layouts is enough.

Every rank stages all that it holds (it restores from that alone), but each element is uploaded once. Ranks that hold the
same box are replicas and share it out (dealing.py).

**What it costs.** Tensors that all ranks hold alike (the same shape, cut the same way) are one *kind*, planned and proved once: a
model has a few dozen kinds, however many layers. A kind is arrays over ranks, sorted once, O(ranks log ranks). A rank then makes
objects of its own boxes only.

**How even it is.** What only one rank holds, it writes. What a group of ranks holds is filled up to one level, smaller groups
first, so that larger ones even out what is left. A rank is off that level by at most 1/16 of its stretch, or 512 KiB (one small
box) where that is more, for each group that it belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from surefoot.ckpt.boxes import Box, stretch
from surefoot.ckpt.errors import CoverageError, StateError
from surefoot.ckpt.manifest import BLOCK_NBYTES, PAGE_NBYTES, TensorMeta
from surefoot.ckpt.planning.coverage import miscounted, uncovered_error
from surefoot.ckpt.planning.dealing import Bulk, deal, fill
from surefoot.ckpt.planning.layouts import HeldTensor, Layouts, Template, layouts_of

Ints = NDArray[np.int64]

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
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element, by torch's name of the type: what can be stored at all."""


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does about its boxes. All are ascending by name, then offset."""

    written: tuple[tuple[str, Box], ...]
    """What it uploads."""
    kept: tuple[tuple[str, Box], ...]
    """What it only keeps for itself: its boxes without what it uploads of them."""
    shared: tuple[tuple[str, Box], ...]
    """Its boxes that others hold too, uncut: their hashes must be the same everywhere."""


def nbytes_of(meta: TensorMeta | HeldTensor, box: Box) -> int:
    return box.numel * ITEMSIZES[meta.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Tensors that all ranks hold alike. Its distinct boxes are `offset` and `extent` [boxes, dims], in order of offset; box b
    is held by ranks[first[b] : first[b + 1]], ascending. `group` [boxes] numbers the set of ranks, -1 where it is one rank."""

    names: Sequence[str]
    itemsize: int
    offset: Ints
    extent: Ints
    first: Ints
    ranks: Ints
    group: Ints

    def boxes_of(self, rank: int) -> list[int]:
        held = np.flatnonzero(self.ranks == rank)
        return (np.searchsorted(self.first, held, side="right") - 1).tolist()

    def box(self, b: int) -> Box:
        return Box(tuple(self.offset[b].tolist()), tuple(self.extent[b].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Ranks that hold some boxes together (ascending), and what each of them writes besides those."""

    ranks: Ints
    loads: Ints


class Plan:
    """The shares of all ranks; each is worked out when asked for."""

    def __init__(self, layouts: Layouts) -> None:
        """Raises:
        StateError: ranks disagree on shape or type of the same name.
        CoverageError: some element is held by nobody, or boxes overlap without being equal; the message names tensor,
            element and boxes.
        """
        members: dict[bytes, int] = {}
        places = _places(layouts)
        self._kinds = [_kind(places, named, held, members) for named, held in _kinds_of(layouts.templates)]
        self._groups = _level(self._kinds, members, layouts.world_size)

    @property
    def touched(self) -> int:
        """Boxes that were looked at, over all kinds: what the time to plan grows with."""
        return sum(len(k.ranks) for k in self._kinds)

    def share(self, rank: int) -> RankShare:
        """What one rank does."""
        written: list[tuple[str, Box]] = []
        kept: list[tuple[str, Box]] = []
        together: dict[int, list[tuple[str, Box, int]]] = {}
        for kind in self._kinds:
            for b in kind.boxes_of(rank):
                box, group = kind.box(b), int(kind.group[b])
                if group < 0:
                    written += [(name, box) for name in kind.names]
                else:
                    together.setdefault(group, []).extend((name, box, kind.itemsize) for name in kind.names)
        for group, boxes in together.items():
            self._divide(self._groups[group], sorted(boxes), rank, written, kept)
        shared = [(name, box) for boxes in together.values() for name, box, _ in boxes]
        return RankShare(
            written=tuple(sorted(written)), kept=tuple(sorted(kept)), shared=tuple(sorted(shared))
        )

    def _divide(
        self,
        group: _Group,
        boxes: Sequence[tuple[str, Box, int]],
        rank: int,
        written: list[tuple[str, Box]],
        kept: list[tuple[str, Box]],
    ) -> None:
        """Add what `rank` does about the boxes of one group, which are the same for all its ranks."""
        at = int(np.searchsorted(group.ranks, rank))
        begin, end = deal([Bulk(extent=box.extent, itemsize=size) for _, box, size in boxes], group.loads, at)
        for (name, box, size), first, stop in zip(boxes, begin.tolist(), end.tolist(), strict=True):
            a, b = first // size, stop // size
            if a == b:
                kept.append((name, box))
                continue
            written += [(name, part) for part in stretch(box, a, b)]
            kept += [(name, part) for part in (*stretch(box, 0, a), *stretch(box, b, box.numel))]


def assign(layouts: Sequence[Sequence[HeldTensor]]) -> list[RankShare]:
    """The share of every rank, from what all ranks hold: for a few ranks that are in one process. Raises as `Plan`."""
    plan = Plan(layouts_of(layouts))
    return [plan.share(rank) for rank in range(len(layouts))]


# ---------------------------------------------------------------- kinds


_Boxes = tuple[int, tuple[int, ...]]
"""How many boxes, and their terms: see `Row`."""
_Held = tuple[tuple[_Boxes, tuple[int, ...]], ...]
"""The ways in which ranks hold a tensor: the boxes, and the numbers of the templates that have these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Tensors of one kind: names ascending, what they are."""

    names: Sequence[str]
    dtype: str
    shape: tuple[int, ...]


def _kinds_of(templates: Sequence[Template]) -> Iterator[tuple[_Named, _Held]]:
    """The kinds in order of their first name. Raises StateError where ranks disagree on a tensor."""
    metas: dict[str, tuple[str, tuple[int, ...], int]] = {}
    held: dict[str, dict[_Boxes, list[int]]] = {}
    for number, template in enumerate(templates):
        for row in template.rows:
            dtype, shape, other = metas.setdefault(row.name, (row.dtype, row.shape, number))
            if dtype != row.dtype or shape != row.shape:
                raise _disagree(
                    row.name, [(dtype, shape, templates[other]), (row.dtype, row.shape, template)]
                )
            ways = held.setdefault(row.name, {})
            if row.count:
                ways.setdefault((row.count, row.terms), []).append(number)
    kinds: dict[tuple[str, tuple[int, ...], _Held], list[str]] = {}
    for name in sorted(metas):
        dtype, shape, _ = metas[name]
        ways = tuple((boxes, tuple(numbers)) for boxes, numbers in held[name].items())
        kinds.setdefault((dtype, shape, ways), []).append(name)
    for (dtype, shape, ways), names in kinds.items():
        yield _Named(names=names, dtype=dtype, shape=shape), ways


def _disagree(name: str, tellings: Sequence[tuple[str, tuple[int, ...], Template]]) -> StateError:
    (dtype, shape, first), (other_dtype, other_shape, second) = sorted(
        tellings, key=lambda t: int(t[2].ranks[0])
    )
    return StateError(
        f"{name} is {other_dtype}{list(other_shape)} on rank {second.ranks[0]} and {dtype}{list(shape)} on rank {first.ranks[0]}: "
        f"give different tensors different names, or make the shard a DTensor"
    )


_MEND = (
    "a rank that holds part of a DTensor has to take part in the save and have it in its state, and all ckpt.Boxes of a tensor have to "
    "make up all of it"
)


def _kind(places: _Places, named: _Named, held: _Held, members: dict[bytes, int]) -> _Kind:
    """Raises CoverageError where the boxes do not make up the tensors. `members` numbers the groups, and grows."""
    offset, extent, ranks = _held_by_all(places, held, len(named.shape))
    order = np.lexsort((ranks, *extent.T[::-1], *offset.T[::-1]))
    offset, extent, ranks = offset[order], extent[order], ranks[order]
    new = np.ones(len(ranks), np.bool_)
    new[1:] = (offset[1:] != offset[:-1]).any(axis=1) | (extent[1:] != extent[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    twice = np.flatnonzero(~new[1:] & (ranks[1:] == ranks[:-1]))
    kind = _Kind(
        names=named.names,
        itemsize=ITEMSIZES[named.dtype],
        offset=offset[first],
        extent=extent[first],
        first=np.append(first, len(ranks)),
        ranks=ranks,
        group=np.full(len(first), -1, np.int64),
    )
    if len(twice):
        box = Box(tuple(offset[twice[0]].tolist()), tuple(extent[twice[0]].tolist()))
        raise CoverageError(
            f"{named.names[0]}: rank {ranks[twice[0]]} holds the box {box} twice; name each box once"
        )
    if miscounted(named.shape, kind.offset, kind.extent) is not None:
        found = uncovered_error(named.names[0], named.shape, [kind.box(b) for b in range(len(first))])
        raise CoverageError(f"{found}. This is what the ranks hold: {_MEND}")
    for b in np.flatnonzero(np.diff(kind.first) > 1):
        # Big-endian: the bytes sort as the numbers do.
        key = ranks[kind.first[b] : kind.first[b + 1]].astype(">i8").tobytes()
        kind.group[b] = members.setdefault(key, len(members))
    return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Every rank's template [ranks] and values [ranks, most values + 1]; the last column is 0, for terms without a value."""

    template: Ints
    values: Ints


def _places(layouts: Layouts) -> _Places:
    most = max((t.values.shape[1] for t in layouts.templates), default=0)
    places = _Places(
        template=np.zeros(layouts.world_size, np.int64),
        values=np.zeros((layouts.world_size, most + 1), np.int64),
    )
    for number, t in enumerate(layouts.templates):
        places.template[t.ranks] = number
        places.values[t.ranks, : t.values.shape[1]] = t.values
    return places


def _held_by_all(places: _Places, held: _Held, dims: int) -> tuple[Ints, Ints, Ints]:
    """Every rank's boxes: offset and extent [boxes, dims], rank [boxes]."""
    none = np.zeros((0, dims), np.int64)
    offsets, extents, ranks = [none], [none], [np.zeros(0, np.int64)]
    for (count, terms), numbers in held:
        chosen = np.zeros(int(places.template.max(initial=0)) + 1, np.bool_)
        chosen[list(numbers)] = True
        who = np.flatnonzero(chosen[places.template])
        scale, extent, which = np.array(terms, np.int64).reshape(count, dims, 3).transpose(2, 0, 1)
        offset = scale * places.values[who][:, which]
        rows = (len(who) * count, dims)
        offsets.append(offset.reshape(rows))
        extents.append(np.broadcast_to(extent, offset.shape).reshape(rows))
        ranks.append(np.repeat(who, count))
    return np.concatenate(offsets), np.concatenate(extents), np.concatenate(ranks)


def _level(kinds: Sequence[_Kind], members: Mapping[bytes, int], world_size: int) -> list[_Group]:
    """What every rank has to write before each of its groups is dealt out; smaller groups come first."""
    load = np.zeros(world_size, np.int64)
    totals = np.zeros(len(members), np.int64)
    for kind in kinds:
        nbytes = kind.extent.prod(axis=1) * kind.itemsize * len(kind.names)
        alone = kind.group < 0
        np.add.at(load, kind.ranks[kind.first[:-1][alone]], nbytes[alone])
        np.add.at(totals, kind.group[~alone], nbytes[~alone])
    groups: list[_Group | None] = [None] * len(members)
    for key, number in sorted(members.items(), key=lambda item: (len(item[0]), item[0])):
        ranks = np.frombuffer(key, ">i8").astype(np.int64)
        groups[number] = _Group(ranks=ranks, loads=load[ranks])
        load[ranks] += fill(load[ranks], int(totals[number]))
    return [g for g in groups if g is not None]


# ---------------------------------------------------------------- where the bytes go


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A box at byte `at` of a data section."""

    name: str
    box: Box
    at: int


def place(
    tensors: Mapping[str, TensorMeta],
    pieces: Iterable[tuple[str, Box]],
    start: int = 0,
    shared: Collection[str] = (),
) -> tuple[list[Placed], int]:
    """Lay pieces out one after the other from byte `start`, without holes; returns them and the end.

    Pieces of whole checksum blocks come first, so each of them begins with a block and no other piece's reader fetches any of it.
    Whole pages are next: they are copied fastest from page to page. Then the largest element types come first, so every piece is
    aligned to its own (safetensors allows no padding between tensors). Within all that, tensors that many ranks hold (`shared`)
    come last: they lie together, in few blocks, and all ranks of a load need these few. `start` must be a multiple of 16.
    """

    def order(piece: tuple[str, Box]) -> tuple[int, int, bool, tuple[str, Box]]:
        meta = tensors[piece[0]]
        nbytes = nbytes_of(meta, piece[1])
        grade = 0 if nbytes % BLOCK_NBYTES == 0 else 1 if nbytes % PAGE_NBYTES == 0 else 2
        return grade, -ITEMSIZES[meta.dtype] if grade == 2 else 0, piece[0] in shared, piece

    placed: list[Placed] = []
    at = start
    for name, box in sorted(pieces, key=order):
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

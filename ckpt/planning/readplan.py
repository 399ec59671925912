"""Who reads which blocks of a checkpoint, and who needs them. PURE: the same wants give the same plan on every rank.

All ranks of a load tell each other which boxes they want (the manifest they share already). From that each of them works
out, for every object, which blocks hold bytes that anybody wants, and by whom. Blocks that one rank wants are read by that
rank. Blocks that several want are read by one of them, the one with the least to read so far, and passed on: every block
is read once per job, and what nobody wants is not read. Ranks that have a page cache in common, *neighbours*, each read for themselves
what nobody else wants: the kernel reads it once. Where objects lie in memory that ranks can look at, those that see the same memory
divide the checking of what they all want, block by block: who copies a block need not be who compares it with its checksum.

    needs      where a wanted box meets a stored piece: a range of bytes of the object, and the ranks that want it
    segment    a run of neighbouring blocks with the same ranks; what is read, verified and passed on at once
    round      segments that are passed on together: it bounds what a rank has to hold
    cut        the part of a need that lies in one segment, again a box
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from surefoot.ckpt.boxes import Box, intersect, slab, span
from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.manifest import DataObject, Manifest, Piece
from surefoot.ckpt.planning.plan import ITEMSIZES


class Pace(NamedTuple):
    """How much at once; the same on all ranks."""

    segment_nbytes: int
    """What one rank needs alone is read in segments of this."""
    share_nbytes: int
    """What is shared, in segments of at most this, so that all take part in the reading."""
    round_nbytes: int
    """Shared segments that are passed on together."""
    depth: int
    """Rounds that a rank keeps room for: one that is passed on, the others being read ahead. At least 2."""
    readers: int
    """Segments that a rank reads at the same time, in threads; 0: in the thread that loads, one after the other."""


NEARBY = Pace(16 * 2**20, 4 * 2**20, 64 * 2**20, 2, 0)
"""Files are copied and hashed as fast as a processor can, and the other processors have ranks of their own: a thread beside the
one that loads only gets in its way (two readers on two cores took half as long again). Rounds are few, since all wait for the last
at the end of each."""
FAR = Pace(16 * 2**20, 8 * 2**20, 64 * 2**20, 4, 8)
"""One S3 connection gives 60 to 110 MB/s, so several segments are under way, of a good size for a request."""
SHARES_EACH = 4
"""Shared segments for each rank to read, at least, where there is enough to share."""
ALIGN_NBYTES = 64
BLOCK_ALIGN_NBYTES = 16
"""The largest element: blocks begin between two elements of any type."""

Wants = Mapping[str, Sequence[Box]]
"""The boxes that a rank wants, by the tensor's stored name."""


class Need(NamedTuple):
    """`box`, where the wanted box `held` meets a piece, lies in bytes begin .. end - 1 of the data section; `ranks` want it.

    Ranks are bits of an integer, here and below."""

    begin: int
    end: int
    piece: Piece
    held: Box
    box: Box
    ranks: int


class Segment(NamedTuple):
    """Blocks first .. stop - 1 of object number `source`, which `ranks` need and `reader` reads."""

    source: int
    first: int
    stop: int
    ranks: int
    reader: int


class Cut(NamedTuple):
    """`box` of a piece lies within one segment: bytes begin .. end - 1 of the data section hold it (with gaps, if its rows are
    parts of the piece's)."""

    piece: Piece
    held: Box
    box: Box
    begin: int
    end: int
    nbytes: int
    ranks: int


class ReadPlan:
    """See the module. `private`: what this rank reads for itself alone; `rounds`: what is shared, the same on all ranks."""

    def __init__(
        self,
        objects: Sequence[DataObject],
        needs: Sequence[Sequence[Need]],
        segments: Sequence[Segment],
        *,
        rank: int,
        world_size: int,
        itemsizes: Mapping[str, int],
        pace: Pace,
        neighbours: Sequence[int] = (),
        checkers: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.objects = objects
        self.rank = rank
        self.world_size = world_size
        self.pace = pace
        self._needs = needs
        self._checkers = checkers or {}
        self._ends = [list(itertools.accumulate((n.end for n in of), max)) for of in needs]
        self._itemsizes = itemsizes
        self.private = tuple(
            s for s in segments if s.ranks >> rank & 1 and not is_shared(s.ranks, neighbours)
        )
        self.rounds = tuple(
            _rounds([s for s in segments if is_shared(s.ranks, neighbours)], objects, pace.round_nbytes)
        )

    def extent(self, segment: Segment) -> tuple[int, int]:
        """Bytes [begin, end) of the data section."""
        return _extent(self.objects[segment.source], segment)

    def blocks(self, segment: Segment) -> Iterator[Segment]:
        """Its blocks, each as a segment."""
        for i in range(segment.first, segment.stop):
            yield segment._replace(first=i, stop=i + 1)

    def checks(self, block: Segment) -> bool:
        """Does this rank compare the block with its checksum, if it looks at it where it lies?"""
        return self._checkers.get((block.source, block.first), self.rank) == self.rank

    def needs(self, segment: Segment) -> Iterator[Need]:
        """The needs that have bytes in the segment, by position."""
        begin, end = self.extent(segment)
        for need in itertools.islice(
            self._needs[segment.source], bisect_right(self._ends[segment.source], begin), None
        ):
            if need.begin >= end:
                return
            if need.end > begin:
                yield need

    def cuts(self, segment: Segment, ranks: int = -1) -> list[Cut]:
        """What `ranks` (bits; all where nothing is said) want of the segment, as boxes; the same order on every rank."""
        begin, end = self.extent(segment)
        found: list[Cut] = []
        for n in self.needs(segment):
            if not n.ranks & ranks:
                continue
            itemsize = self._itemsizes[n.piece.name]
            if begin <= n.begin and n.end <= end:
                found.append(Cut(n.piece, n.held, n.box, n.begin, n.end, n.box.numel * itemsize, n.ranks))
                continue
            piece = Box(n.piece.offset, n.piece.extent)
            at = n.piece.at
            for box in clip(piece, n.box, -(-(begin - at) // itemsize), (end - at) // itemsize):
                a, b = span(piece, box, itemsize)
                found.append(Cut(n.piece, n.held, box, at + a, at + b, box.numel * itemsize, n.ranks))
        return found

    def places(self) -> tuple[list[int], dict[Segment, int]]:
        """How much memory each rank needs for the shared segments that it reads, and where in its reader's memory each of them
        lies: a round's beside each other, and in the place of the round `depth` before it."""
        used: list[list[int]] = []
        within: list[dict[Segment, int]] = []
        for segments in self.rounds:
            ends = [0] * self.world_size
            within.append({})
            for s in segments:
                begin, end = self.extent(s)
                within[-1][s] = ends[s.reader]
                ends[s.reader] += -(-(end - begin) // ALIGN_NBYTES) * ALIGN_NBYTES
            used.append(ends)
        rooms = [max(of) for of in zip(*used, strict=True)] if used else [0] * self.world_size
        places = {
            s: k % self.pace.depth * rooms[s.reader] + at
            for k, of in enumerate(within)
            for s, at in of.items()
        }
        return [room * min(self.pace.depth, len(self.rounds)) for room in rooms], places

    def nbytes_read(self) -> int:
        """By this rank."""
        mine = [s for s in itertools.chain(*self.rounds) if s.reader == self.rank]
        return sum(b - a for a, b in map(self.extent, (*self.private, *mine)))


def plan_reads(
    manifest: Manifest,
    wants: Sequence[tuple[int, Wants]],
    *,
    rank: int,
    world_size: int,
    pace: Pace = NEARBY,
    neighbours: Sequence[int] = (),
    onlookers: Sequence[int] = (),
) -> ReadPlan:
    """Plan a load.

    Args:
        wants: who (as bits) wants what; ranks that want the same may stand together. Only tensors of the manifest.
        rank: whose plan: what it has no part in is left out.
        neighbours: sets of ranks (bits) that have a page cache in common.
        onlookers: sets of ranks (bits) that look at the objects in the same memory.
        manifest: one that is readable (`require_readable`).
    """
    itemsizes = {name: ITEMSIZES[meta.dtype] for name, meta in manifest.tensors.items()}
    indices = _indices(wants)
    mine = 1 << rank
    needs: list[list[Need]] = []
    runs: list[tuple[int, int, int, int]] = []
    load = [0] * world_size
    for number, source in enumerate(manifest.objects):
        of = sorted(_needs_of(source, indices, itemsizes), key=lambda n: (n.begin, n.end, n.held))
        found = list(_runs(of, source.block_nbytes))
        for first, stop, ranks in found:
            runs.append((number, first, stop, ranks))
            if not is_shared(ranks, neighbours):
                for r in range(ranks.bit_length()):
                    load[r] += (ranks >> r & 1) * (stop - first) * source.block_nbytes
        shares = any(ranks & mine and is_shared(ranks, neighbours) for _, _, ranks in found)
        needs.append(of if shares else [n for n in of if n.ranks & mine])
    shared = sum(
        (stop - first) * manifest.objects[number].block_nbytes
        for number, first, stop, ranks in runs
        if is_shared(ranks, neighbours)
    )
    # Small enough that every rank has a few to read.
    share_nbytes = min(pace.share_nbytes, shared // (SHARES_EACH * world_size))
    segments = [
        segment
        for number, first, stop, ranks in runs
        if ranks & mine or is_shared(ranks, neighbours)
        for segment in (
            _segments(manifest.objects[number], Segment(number, first, stop, ranks, -1), share_nbytes, load)
            if is_shared(ranks, neighbours)
            else _segments(
                manifest.objects[number], Segment(number, first, stop, ranks, rank), pace.segment_nbytes, None
            )
        )
    ]
    return ReadPlan(
        manifest.objects,
        needs,
        segments,
        rank=rank,
        world_size=world_size,
        itemsizes=itemsizes,
        pace=pace,
        neighbours=neighbours,
        checkers=_checkers(runs, onlookers),
    )


def is_shared(ranks: int, neighbours: Sequence[int]) -> bool:
    """Does one of these ranks (bits) read for the others what they all need?"""
    return ranks.bit_count() > 1 and all(ranks & ~together for together in neighbours)


def require_readable(manifest: Manifest) -> None:
    """What a plan relies on beyond soundness (ckpt/format/sound.py): no element lies in two blocks, and every block has a checksum.

    Raises DamagedError naming the object.
    """
    for o in manifest.objects:
        at = next((p for p in o.pieces if p.at % ITEMSIZES[manifest.tensors[p.name].dtype]), None)
        what = ""
        if o.block_nbytes % BLOCK_ALIGN_NBYTES:
            what = f"has blocks of {o.block_nbytes} bytes, no multiple of {BLOCK_ALIGN_NBYTES}"
        elif at is not None:
            what = f"holds {at.name} from byte {at.at} on, which is between two elements"
        elif "" in o.checksums:
            what = "has a block without a checksum: what is not checked is not loaded"
        if what:
            raise DamagedError(f"the manifest says that {o.key} {what}; load an older step", key=o.key)


# ---------------------------------------------------------------- who needs what


class _Index:
    """The wanted boxes of one tensor; found by the first dimension."""

    def __init__(self, boxes: Mapping[Box, int]) -> None:
        self._boxes = sorted(boxes.items())
        self._starts = [box.offset[:1] for box, _ in self._boxes]
        self._longest = max((box.extent[0] for box, _ in self._boxes if box.extent), default=0)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box, int]]:
        """(wanted box, what it has in common with `box`, ranks)."""
        if box.offset:
            low = bisect_right(self._starts, (box.offset[0] - self._longest,))
            high = bisect_left(self._starts, (box.offset[0] + box.extent[0],))
        else:
            low, high = 0, len(self._boxes)
        for at in range(low, high):
            held, ranks = self._boxes[at]
            if (part := box if held == box else intersect(held, box)) is not None:
                yield held, part, ranks


def _indices(wants: Sequence[tuple[int, Wants]]) -> dict[str, _Index]:
    wanted: dict[str, dict[Box, int]] = {}
    for ranks, of in wants:
        for name, boxes in of.items():
            by_box = wanted.setdefault(name, {})
            for box in boxes:
                by_box[box] = by_box.get(box, 0) | ranks
    return {name: _Index(boxes) for name, boxes in wanted.items()}


def _needs_of(
    source: DataObject, indices: Mapping[str, _Index], itemsizes: Mapping[str, int]
) -> Iterator[Need]:
    for piece in source.pieces:
        if (index := indices.get(piece.name)) is None or 0 in piece.extent:
            continue
        box = Box(piece.offset, piece.extent)
        for held, part, ranks in index.meeting(box):
            itemsize = itemsizes[piece.name]
            a, b = (0, box.numel * itemsize) if part is box else span(box, part, itemsize)
            yield Need(piece.at + a, piece.at + b, piece, held, part, ranks)


def _runs(needs: Iterable[Need], size: int) -> Iterator[tuple[int, int, int]]:
    """Blocks first .. stop - 1 that the same ranks (the third) need, ascending; what nobody needs is left out."""
    changes: dict[int, list[tuple[int, int]]] = {}
    for first, stop, ranks in _joined((n.begin // size, -(-n.end // size), n.ranks) for n in needs):
        changes.setdefault(first, []).append((ranks, 1))
        changes.setdefault(stop, []).append((ranks, -1))
    active: dict[int, int] = {}
    begun, needed = 0, 0
    for at in sorted(changes):
        for ranks, by in changes[at]:
            active[ranks] = active.get(ranks, 0) + by
            if not active[ranks]:
                del active[ranks]
        now = 0
        for ranks in active:
            now |= ranks
        if now != needed:
            if needed:
                yield begun, at, needed
            begun, needed = at, now


def _joined(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Spans that overlap or touch and belong to the same ranks, as one: most objects are one such span."""
    last: tuple[int, int, int] | None = None
    for s in spans:
        if last is not None and last[2] == s[2] and s[0] <= last[1]:
            last = (last[0], max(last[1], s[1]), s[2])
            continue
        if last is not None:
            yield last
        last = s
    if last is not None:
        yield last


def _segments(source: DataObject, run: Segment, nbytes: int, load: list[int] | None) -> Iterator[Segment]:
    """The run cut into pieces of `nbytes`, or of one block. With `load`, each with its reader, whose load it adds to."""
    step = max(1, nbytes // source.block_nbytes)
    members = [r for r in range(run.ranks.bit_length()) if run.ranks >> r & 1]
    for at in range(run.first, run.stop, step):
        end = min(at + step, run.stop)
        reader = run.reader
        if load is not None:
            reader = min(members, key=lambda r: (load[r], r))
            load[reader] += (end - at) * source.block_nbytes
        yield run._replace(first=at, stop=end, reader=reader)


def _checkers(
    runs: Iterable[tuple[int, int, int, int]], onlookers: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Who checks a block (object, number) that several want who see the same memory: they take turns."""
    found: dict[tuple[int, int], int] = {}
    turns: dict[int, Iterator[int]] = {}
    for number, first, stop, ranks in runs:
        if ranks.bit_count() > 1 and not all(ranks & ~together for together in onlookers):
            turn = turns.setdefault(
                ranks, itertools.cycle([r for r in range(ranks.bit_length()) if ranks >> r & 1])
            )
            found.update({(number, block): next(turn) for block in range(first, stop)})
    return found


def _extent(source: DataObject, s: Segment) -> tuple[int, int]:
    return s.first * source.block_nbytes, min(s.stop * source.block_nbytes, source.data_nbytes)


def _rounds(
    shared: Iterable[Segment], objects: Sequence[DataObject], room: int
) -> Iterator[tuple[Segment, ...]]:
    found: list[Segment] = []
    nbytes = 0
    for s in shared:
        begin, end = _extent(objects[s.source], s)
        if found and nbytes + end - begin > room:
            yield tuple(found)
            found, nbytes = [], 0
        found.append(s)
        nbytes += end - begin
    if found:
        yield tuple(found)


# ---------------------------------------------------------------- cutting


def clip(outer: Box, part: Box, low: int, high: int) -> Iterator[Box]:
    """What of `part` lies among elements low .. high - 1 of a row-major `outer`, as boxes in the order of their elements.

    At most two boxes per dimension and one more: cut rows at both ends, and the whole rows between.
    """
    if not outer.extent:
        if low <= 0 < high:
            yield part
        return
    row = math.prod(outer.extent[1:])
    above = part.offset[0] - outer.offset[0]
    first, last = max(above, low // row), min(above + part.extent[0], -(-high // row))
    if first >= last:
        return
    whole_first = first if first * row >= low else first + 1
    whole_last = last if last * row <= high else last - 1
    if first < whole_first:
        yield from _clip_row(outer, part, first, low, high)
    if whole_first < whole_last:
        yield slab(part, 0, whole_first - above, whole_last - above)
    if whole_last < last and whole_last >= whole_first:
        yield from _clip_row(outer, part, whole_last, low, high)


def _clip_row(outer: Box, part: Box, row: int, low: int, high: int) -> Iterator[Box]:
    nbytes = math.prod(outer.extent[1:])
    at = outer.offset[0] + row
    inner_outer = Box(outer.offset[1:], outer.extent[1:])
    inner_part = Box(part.offset[1:], part.extent[1:])
    for box in clip(inner_outer, inner_part, low - row * nbytes, high - row * nbytes):
        yield Box((at, *box.offset), (1, *box.extent))

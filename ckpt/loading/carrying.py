"""Carrying a plan of reads out: one rank's part of one load, `Carrier`. (torch)

What several ranks need goes in rounds: the blocks of the next rounds are read while those of this one are taken in by the
reader's neighbours on the machine, from its memory (ckpt/loading/nodememory.py), and sent to the others (ckpt/loading/sharing.py). What one
rank needs alone it reads last (or while it waits for others), several segments at a time where the store is far away, and straight into live tensors where
the stored bytes lie in them in one piece; the rest goes through scratch memory, as does everything for tensors on
accelerators (page-locked). Rooms for rounds and scratch are a few segments, whatever the state's size, and are used
again: fresh memory is filled at 0.6 GB/s here, warm memory at 8.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.live.leaves import Leaf, memory_of, part_of
from surefoot.ckpt.live.source import Want
from surefoot.ckpt.live.streams import CallersStreams
from surefoot.ckpt.loading.nodememory import NodeMemory, meet
from surefoot.ckpt.loading.reading import look_at, read_into
from surefoot.ckpt.loading.sharing import Parcel, Party, Vote, bits
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.planning.readplan import Cut, Need, ReadPlan, Segment
from surefoot.ckpt.store import ObjectStore

RAW_SHARE = 0.75
"""Where more than this of a segment is wanted it is passed on as it is, instead of being packed first."""
PACK_ALIGN_NBYTES = 16
LEAST_NBYTES = 4 * 2**20
"""Scratch buffers are at least this large, so that most can be used again for anything."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types that every operation knows, by bytes per element: values are moved as bits."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class StoppedError(Exception):
    """All ranks have agreed to stop, because of another one."""


class UnagreedError(Exception):
    """This rank failed, by `cause`, where the others do not ask how it went: it leaves the load, and they are told."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class GroupError(UnagreedError):
    """The process group failed: there is nobody left to agree with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Cuts that the same ranks need, and how they travel: the segment as it is (`raw`), or packed one after the other."""

    receivers: int
    cuts: Sequence[Cut]
    raw: bool
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Bytes of a segment, or of a part of it. `home`: they lie where they stay."""

    data: torch.Tensor
    home: bool


class _Errand(NamedTuple):
    """A segment that this rank reads for itself, and what it needs of it: each with the live memory where its bytes can go
    straight. Where needs overlap, none can.

    All are worked out before the first is read: in between, copying would have emptied the processor's caches each time.
    """

    segment: Segment
    needs: Sequence[Need]
    homes: Sequence[memoryview | None]


class _Inline(Executor):
    """Does what it is given at once, in the thread that gives it."""

    def submit(self, fn: Callable[..., _R], /, *args: Any, **kwargs: Any) -> Future[_R]:
        future: Future[_R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:
            future.set_exception(e)
        return future


def _submitted(
    pool: Executor, read: Callable[[_Errand], None], errands: Sequence[_Errand]
) -> Iterable[Future[None]]:
    """All at once; one after the other where that is how they are done, so that the first that fails is the last."""
    futures = (pool.submit(read, e) for e in errands)
    return futures if isinstance(pool, _Inline) else list(futures)


def _readers(count: int, begin: Callable[[], None]) -> Executor:
    """`begin` is called by each thread at first."""
    if not count:
        return _Inline()
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="ckpt-read", initializer=begin)


class Carrier:
    """One rank's part of one load."""

    def __init__(self, store: ObjectStore, plan: ReadPlan, party: Party, wants: Sequence[Want]) -> None:
        self._store = store
        self._plan = plan
        self._party = party
        self._leaves: dict[tuple[str, Box], list[Leaf]] = {}
        for want in wants:
            for h in want.leaf.held:
                self._leaves.setdefault((want.stored, h.box), []).append(want.leaf)
        self._met: dict[tuple[int, Box, Box], memoryview | None] = {}
        self._streams = CallersStreams(v.device for w in wants for v in w.leaf.views)
        self._pinned = bool(self._streams)
        self._scratch = _Scratch(pinned=self._pinned)
        self._private: deque[_Errand] = deque()

    def run(self) -> None:
        """Raises: StoppedError, UnagreedError; DamagedError, ObjectStore…Error and others: what happened on this rank."""
        error = self._prepare()
        with _readers(self._plan.pace.readers, self._streams.adopt) as pool:
            try:
                self._share(pool, error)
                if error is not None:
                    raise error
                for future in _submitted(pool, self._read_private, self._private):
                    future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                self._store.release()

    def _prepare(self) -> Exception | None:
        """What went wrong with it is for the first vote."""
        try:
            with torch.no_grad():
                self._private.extend([self._errand(s) for s in self._plan.private])
        except Exception as e:
            return e
        return None

    # ---- what this rank needs alone

    def _read_private(self, errand: _Errand) -> None:
        segment, needs, homes = errand
        with torch.no_grad():  # a thread begins with gradients on
            if None in homes and self._take_in(segment):
                return
            begin, end = self._plan.extent(segment)
            buffer = _Buffer(data=self._scratch.take(end - begin), home=False)
            self._read(segment, _places(needs, homes, begin, end, _bytes_of(buffer.data)))
            if None in homes:
                late = {(n.piece.at, n.held) for n, home in zip(needs, homes, strict=True) if home is None}
                cuts = self._plan.cuts(segment, 1 << self._plan.rank)
                self._unpack([c for c in cuts if (c.piece.at, c.held) in late], buffer, begin)
            self._scratch.give(buffer)

    def _errand(self, segment: Segment) -> _Errand:
        needs = [n for n in self._plan.needs(segment) if n.ranks >> self._plan.rank & 1]
        if any([n.end > after.begin for n, after in itertools.pairwise(needs)]):
            return _Errand(segment, needs, [None] * len(needs))
        return _Errand(segment, needs, [self._home(n) for n in needs])

    def _home(self, n: Need) -> memoryview | None:
        key = id(n.piece), n.held, n.box
        if key not in self._met:  # a large one is met in many segments
            self._met[key] = None if (live := self._live(n)) is None else _bytes_of(live)
        return self._met[key]

    def _take_in(self, segment: Segment) -> bool:
        """Copy what this rank wants from where the segment lies, block by block: what was just checked is in the cache. False where
        it cannot be seen."""
        if self._pinned:
            return False  # for accelerators page-locked memory is worth the copy
        source = self._plan.objects[segment.source]
        for block in self._plan.blocks(segment):
            there = look_at(self._store, source, block.first, checked=self._plan.checks(block))
            if there is None:
                return False
            data = torch.frombuffer(there, dtype=torch.uint8)
            cuts = self._plan.cuts(block, 1 << self._plan.rank)
            self._unpack(cuts, _Buffer(data=data, home=False), self._plan.extent(block)[0])
        return True

    def _read(self, s: Segment, views: Sequence[memoryview]) -> None:
        read_into(self._store, self._plan.objects[s.source], s.first, s.stop, views)

    # ---- what is shared

    def _share(self, pool: Executor, error: Exception | None) -> None:
        """Round after round; `error` is what has gone wrong before. A rank that fails says so before the next round, and all stop.

        That all ranks have come to a round means as well that they have taken in the one before, whose room is free then.
        """
        rounds, depth, me = self._plan.rounds, self._plan.pace.depth, self._plan.rank
        if not rounds:
            return
        sizes, places = self._plan.places()
        readers = sum({1 << s.reader for s in itertools.chain(*rounds) if s.ranks >> me & 1})
        try:
            memory = meet(self._party, sizes, readers, pinned=self._party.device.type != "cpu")
        except Exception as e:
            raise UnagreedError(e) from e
        reading: deque[dict[Segment, Future[torch.Tensor]]] = deque()

        def begin(number: int) -> None:
            mine = [s for s in rounds[number] if s.reader == me] if number < len(rounds) else []
            reading.append({s: pool.submit(self._read_shared, s, memory.own, places[s]) for s in mine})

        for number in range(depth - 1):
            begin(number)
        for number, segments in enumerate(rounds):
            held: dict[Segment, torch.Tensor] = {}
            try:
                held = {s: future.result() for s, future in reading.popleft().items()}
            except Exception as e:
                error = error or e
            vote = self._in_group(self._party.vote, error is not None)
            if isinstance(pool, _Inline):
                error = error or self._read_while(vote)
            if self._in_group(lambda v: v.result(), vote):
                raise error or StoppedError
            begin(number + depth - 1)
            try:
                self._pass_on(segments, held, memory, places)
            except UnagreedError:
                raise
            except Exception as e:
                raise UnagreedError(e) from e  # others wait for what is not sent
        if error is not None:
            raise error

    def _read_while(self, vote: Vote) -> Exception | None:
        """While others are not as far yet, read what this rank needs alone; returns what went wrong with that, for the next vote."""
        while self._private and vote.pending():
            try:
                self._read_private(self._private.popleft())
            except Exception as e:
                return e
        return None

    def _in_group(self, call: Callable[[_T], _R], given: _T) -> _R:
        try:
            return call(given)
        except RuntimeError as e:
            raise GroupError(e) from e
        except Exception as e:
            raise UnagreedError(e) from e

    def _read_shared(self, segment: Segment, memory: torch.Tensor, at: int) -> torch.Tensor:
        begin, end = self._plan.extent(segment)
        buffer = memory[at : at + end - begin]
        self._read(segment, [_bytes_of(buffer)])
        return buffer

    def _pass_on(
        self,
        segments: Sequence[Segment],
        held: Mapping[Segment, torch.Tensor],
        memory: NodeMemory,
        places: Mapping[Segment, int],
    ) -> None:
        me = self._plan.rank
        parcels: list[Parcel] = []
        arriving: list[tuple[Segment, _Part, _Buffer]] = []
        here: list[tuple[Segment, torch.Tensor]] = list(held.items())
        packed: list[_Buffer] = []
        for number, s in enumerate(segments):
            if not s.ranks >> me & 1:
                continue
            begin, end = self._plan.extent(s)
            near = sum(1 << r for r in bits(s.ranks) if memory.reach[r] >> s.reader & 1)
            if near >> me & 1:
                here.append((s, memory.of(s.reader)[places[s] : places[s] + end - begin]))
                continue
            others = s.ranks & ~(near | 1 << s.reader)
            for part in _parts(self._plan.cuts(s, others), others, end - begin):
                if s in held:
                    payload = _Buffer(data=held[s], home=True)
                    if not part.raw:
                        packed.append(payload := self._pack(part, held[s], begin))
                elif part.receivers >> me & 1:
                    payload = self._landing(s if part.raw else None, part.nbytes)
                    arriving.append((s, part, payload))
                else:
                    continue
                data = payload.data.to(self._party.device)
                tag = number * self._party.world_size + bits(part.receivers)[0]
                parcels.append(Parcel(reader=s.reader, receivers=part.receivers, payload=data, tag=tag))
        works = self._in_group(self._party.post, parcels)
        for s, data in here:
            self._unpack(self._plan.cuts(s, 1 << me), _Buffer(data=data, home=False), self._plan.extent(s)[0])
        self._in_group(self._party.wait, works)
        self._bring_in(arriving, [p.payload for p in parcels if p.reader != me])
        for buffer in (*packed, *(b for _, _, b in arriving)):
            self._scratch.give(buffer)

    def _bring_in(
        self, arriving: Sequence[tuple[Segment, _Part, _Buffer]], received: Sequence[torch.Tensor]
    ) -> None:
        for (s, part, buffer), data in zip(arriving, received, strict=True):
            if buffer.home and data is not buffer.data:
                buffer.data.copy_(data)
            came = _Buffer(data=data, home=buffer.home)
            self._unpack(part.cuts, came, self._plan.extent(s)[0] if part.raw else None)

    def _pack(self, part: _Part, raw: torch.Tensor, begin: int) -> _Buffer:
        target = self._scratch.take(part.nbytes)
        there, here = _Bits(target), _Bits(raw)
        for c, at in zip(part.cuts, _offsets(part.cuts), strict=True):
            _stored(c, there, at, packed=True).copy_(_stored(c, here, c.begin - begin, packed=False))
        return _Buffer(data=target, home=False)

    def _landing(self, segment: Segment | None, nbytes: int) -> _Buffer:
        """The live memory of a segment that is part of one tensor; otherwise, and where nothing is said, scratch."""
        if segment is not None:
            needs = list(self._plan.needs(segment))
            begin, end = self._plan.extent(segment)
            if len(needs) == 1 and needs[0].ranks >> self._plan.rank & 1:
                n = needs[0]
                live = self._live(n) if n.begin <= begin and end <= n.end else None
                if live is not None:
                    return _Buffer(data=live[begin - n.begin : end - n.begin], home=True)
        return _Buffer(data=self._scratch.take(nbytes), home=False)

    # ---- into the live tensors

    def _live(self, need: Need) -> torch.Tensor | None:
        """The live memory (uint8) of a need, if its bytes lie in it as they are stored, and only there."""
        leaves = self._leaves[need.piece.name, need.held]
        if len(leaves) != 1 or need.end - need.begin != need.box.numel * ITEMSIZES[leaves[0].meta.dtype]:
            return None
        view = part_of(leaves[0], need.box)
        return memory_of(view) if view.device.type == "cpu" and view.is_contiguous() else None

    def _unpack(self, cuts: Sequence[Cut], buffer: _Buffer, begin: int | None) -> None:
        """Copy what this rank wants of `cuts`. The buffer holds them as they are stored, from byte `begin` of the data section
        on, or (None) packed."""
        if buffer.home:
            return
        offsets = _offsets(cuts) if begin is None else [c.begin - begin for c in cuts]
        bits = _Bits(buffer.data)
        with torch.no_grad():
            for c, at in zip(cuts, offsets, strict=True):
                if c.ranks >> self._plan.rank & 1:
                    stored = _stored(c, bits, at, packed=begin is None)
                    for leaf in self._leaves[c.piece.name, c.held]:
                        part_of(leaf, c.box).view(stored.dtype).copy_(stored, non_blocking=self._pinned)
            self._streams.synchronize()  # the buffer is used again


def _places(
    needs: Sequence[Need], homes: Sequence[memoryview | None], begin: int, end: int, scratch: memoryview
) -> list[memoryview]:
    """Where each byte of a segment goes: into live memory where a need has such, else into scratch."""
    views: list[memoryview] = []
    at = begin
    for n, home in zip(needs, homes, strict=True):
        if home is None:
            continue
        a, b = max(n.begin, begin), min(n.end, end)
        if a > at:
            views.append(scratch[at - begin : a - begin])
        views.append(home[a - n.begin : b - n.begin])
        at = b
    if end > at:
        views.append(scratch[at - begin : end - begin])
    return views


def _bytes_of(t: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor on the CPU."""
    array: Any = t.numpy()
    return memoryview(array)


class _Bits:
    """Memory (uint8) as integers of whatever size is asked for."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw
        self._of: dict[int, torch.Tensor] = {}

    def of(self, itemsize: int) -> torch.Tensor:
        if (known := self._of.get(itemsize)) is None:
            n = self._raw.numel()
            known = self._of[itemsize] = self._raw[: n - n % itemsize].view(_BITS[itemsize])
        return known


def _stored(c: Cut, raw: _Bits, at: int, *, packed: bool) -> torch.Tensor:
    """A cut as it lies in memory, from byte `at` on, as integers of its element's size."""
    itemsize = c.nbytes // c.box.numel
    bits = raw.of(itemsize)
    strides = _strides(c.box.extent if packed else c.piece.extent)
    return bits.as_strided(c.box.extent, strides, bits.storage_offset() + at // itemsize)


@lru_cache(maxsize=4096)
def _strides(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(extent[i + 1 :]) for i in range(len(extent)))


def _parts(cuts: Sequence[Cut], others: int, nbytes: int) -> list[_Part]:
    """What the reader of a segment passes on to `others` (bits): those that need the same are served together. The same on all
    ranks."""
    if not others:
        return []
    if all(c.ranks & others in (0, others) for c in cuts):
        groups = {tuple(i for i, c in enumerate(cuts) if c.ranks & others): others}
    else:
        groups: dict[tuple[int, ...], int] = {}
        for r in bits(others):
            needed = tuple(i for i, c in enumerate(cuts) if c.ranks >> r & 1)
            groups[needed] = groups.get(needed, 0) | 1 << r
    found: list[_Part] = []
    for needed, receivers in groups.items():
        wanted = [cuts[i] for i in needed]
        offsets = _offsets(wanted)
        packed = offsets[-1] + wanted[-1].nbytes
        raw = packed > RAW_SHARE * nbytes
        found.append(_Part(receivers=receivers, cuts=wanted, raw=raw, nbytes=nbytes if raw else packed))
    return found


def _offsets(cuts: Sequence[Cut]) -> list[int]:
    """Where packed cuts begin."""
    sizes = (-(-c.nbytes // PACK_ALIGN_NBYTES) * PACK_ALIGN_NBYTES for c in cuts)
    return list(itertools.accumulate(sizes, initial=0))[:-1]


class _Scratch:
    """Buffers that are used again. For several threads."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: deque[torch.Tensor] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8, of exactly `nbytes`."""
        try:
            base = self._free.pop()
        except IndexError:
            base = None
        if base is None or base.numel() < nbytes:
            base = torch.empty(
                max(nbytes, LEAST_NBYTES), dtype=torch.uint8, device="cpu", pin_memory=self._pinned
            )
        return base[:nbytes]

    def give(self, buffer: _Buffer) -> None:
        if not buffer.home and buffer.data._base is not None:
            self._free.append(buffer.data._base)

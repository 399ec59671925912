"""Virtual ranks: threads of this process that stage, upload, commit and restore as agents' ranks do, through a store in memory.

A `Placing` says which boxes of one tensor which rank holds; what a rank has in memory is made of it (`Part`): plain tensors,
`ckpt.Boxes` or nothing, so that no process group is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from surefoot.ckpt import tiers
from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.live.declared import Boxes
from surefoot.ckpt.manifest import Manifest
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import MemoryObjectStore

STEP = 20
Memory = Literal["own", "padded", "transposed"]
"""How the parts of a tensor lie in memory: each in its own, in a buffer with gaps around it, column by column."""
MEMORIES: tuple[Memory, ...] = get_args(Memory)
GAP = 0xA5
"""What fills a flat buffer between the parts of tensors: nothing of it may be stored, or touched by a load."""


class Meeting:
    """All-gather among threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._words: list[bytes] = [b""] * ranks

    def exchange(self, rank: int, word: bytes) -> list[bytes]:
        self._words[rank] = word
        self._barrier.wait()
        heard = list(self._words)
        self._barrier.wait()
        return heard

    def leave(self) -> None:
        """A rank that failed lets the others fail, too."""
        self._barrier.abort()


def on_all_ranks(ranks: int, act: Callable[[int, Callable[[bytes], list[bytes]]], Any]) -> list[Any]:
    """``act(rank, exchange)`` on every rank at once; what it returned, by rank. Raises the first error that is not an echo."""
    meeting = Meeting(ranks)

    def play(rank: int) -> Any:
        try:
            return act(rank, lambda word: meeting.exchange(rank, word))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(play, rank) for rank in range(ranks)]
    errors = [e for f in futures if (e := f.exception()) is not None]
    for e in errors:
        if not isinstance(e, threading.BrokenBarrierError):
            raise e
    return [f.result() for f in futures]


# ---------------------------------------------------------------- which rank holds what


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What each rank holds of one tensor: `boxes`, or, where `flat` is given, elements start .. stop - 1 of it flattened.

    `absent`: a rank that holds nothing does not even have the name. `memory`: how the parts lie there.
    """

    boxes: tuple[tuple[Box, ...], ...] = ()
    flat: tuple[tuple[int, int], ...] = ()
    absent: bool = False
    memory: Memory = "own"

    def is_here(self, rank: int) -> bool:
        """Does the rank's state have the name?"""
        return not self.absent or bool(
            self.flat[rank][0] < self.flat[rank][1] if self.flat else self.boxes[rank]
        )


class Part:
    """What one rank has of one tensor: `live` goes into its state."""

    def __init__(self, full: torch.Tensor, placing: Placing, rank: int) -> None:
        self._buffers: list[torch.Tensor] = []
        self.live: Any
        if placing.flat:
            start, stop = placing.flat[rank]
            self._pieces = [self._room(full.flatten()[start:stop], placing)]
            self.live = Boxes.flat(full.shape, start, self._pieces[0])
        elif placing.boxes[rank] == (whole(full.shape),):
            self._pieces = [self._room(full, placing)]
            self.live = self._pieces[0]
        else:
            self._pieces = [
                self._room(full[tuple(slice(o, o + e) for o, e in zip(*b, strict=True))], placing)
                for b in placing.boxes[rank]
            ]
            parts = [(b.offset, p) for b, p in zip(placing.boxes[rank], self._pieces, strict=True)]
            self.live = Boxes(full.shape, parts, full.dtype)
        self._wanted = [raw(p) for p in self._pieces]
        self._gaps = self._gap_bytes()

    def spoil(self, at: int | None = None) -> None:
        """Every element becomes another, of one piece or of all."""
        for p in self._pieces if at is None else [self._pieces[at]]:
            other = torch.frombuffer(bytearray(raw(p)), dtype=torch.uint8) if p.numel() else torch.empty(0)
            if p.numel():
                p.copy_((other ^ (1 if p.dtype is torch.bool else 0xFF)).view(p.dtype).view(p.shape))

    def wrong(self) -> str:
        """What a load did not bring back, or where it wrote what was not its own; empty if all is well."""
        for p, wanted in zip(self._pieces, self._wanted, strict=True):
            if raw(p) != wanted:
                return f"{self.live} holds {p}"
        return "" if self._gap_bytes() == self._gaps else "a gap between parts was written to"

    def _room(self, value: torch.Tensor, placing: Placing) -> torch.Tensor:
        """A copy of `value` in memory of its own."""
        if placing.memory == "transposed" and value.dim() > 1 and not placing.flat:
            return value.mT.clone(memory_format=torch.contiguous_format).mT
        if placing.memory == "padded":
            room = torch.full(((value.numel() + 5) * value.element_size(),), GAP, dtype=torch.uint8)
            self._buffers.append(room)
            return room.view(value.dtype)[3 : 3 + value.numel()].view(value.shape).copy_(value)
        return value.clone(memory_format=torch.contiguous_format)

    def _gap_bytes(self) -> list[bytes]:
        gaps: list[bytes] = []
        for buffer, p in zip(self._buffers, self._pieces, strict=bool(self._buffers)):
            n = p.element_size()
            gaps.append(buffer[: 3 * n].numpy().tobytes() + buffer[-2 * n :].numpy().tobytes())
        return gaps


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------- what agents do


def save(states: Sequence[dict[str, Any]], store: MemoryObjectStore) -> Manifest:
    """Stage on every rank, upload, commit. Raises what a rank raised, or CkptError with the reason why nothing was committed."""
    world = len(states)

    def stage(rank: int, exchange: Any) -> memoryview:
        stager = tiers.Stager(states[rank], rank=rank, world_size=world, exchange=exchange)
        slot = memoryview(bytearray(stager.nbytes()))
        stager.stage(slot, generation=1, step=STEP, cursor={"at": 9}, ledger=())
        return slot

    slots = on_all_ranks(world, stage)
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="test"))
    tiers.upload_images(store, slots, generation=1, step=STEP, attempt="a", writer=0, deadline_s=60)
    done = tiers.commit(store, generation=1, step=STEP, attempt="a", writers=1, deadline_s=60, facts={})
    if isinstance(done, tiers.Committed):
        return done.manifest
    raise CkptError(str(done))


def load(states: Sequence[dict[str, Any]], store: MemoryObjectStore) -> None:
    def restore(rank: int, exchange: Any) -> None:
        restored = tiers.restore_committed(
            store,
            states[rank],
            generation=1,
            step=STEP,
            rank=rank,
            world_size=len(states),
            exchange=exchange,
        )
        assert restored.cursor == {"at": 9}

    on_all_ranks(len(states), restore)

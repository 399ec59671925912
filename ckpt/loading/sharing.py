"""The ranks of one load: what they tell each other, and how one passes on to others what it has read. (torch)

Words (a few bytes, now and then) go over the caller's `exchange`. Bytes of tensors go over a process group of torch's, as
uint8, so that no backend has to know their type. Who gets what is known to everybody from the plan (ckpt/planning/readplan.py), so
there are no headers:

* What all other ranks need is broadcast over the whole group: a replicated model under DDP is the usual case, and trees and
  rings pass it on better than its reader could alone.
* What some of them need is sent to each of these, and only the parts that it needs: the groups that share bytes differ from
  one run of blocks to the next when layouts change, each would have to be made by all ranks together (and by NCCL with
  memory of its own), and is small. The reading is balanced over all that need it, so the sending is as well.

Before anything is passed on, all ranks agree that what they were to read was read (`any`): after a failure nobody waits for
bytes that do not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Exchange = Callable[[bytes], list[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bytes that `reader` passes on to `receivers` (bits); `payload` is uint8: what the reader sends, and where others
    receive it. `tag` is unique within a round."""

    reader: int
    receivers: int
    payload: torch.Tensor
    tag: int


class Vote:
    """Does any rank say yes? This one has been answered."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def pending(self) -> bool:
        """Some rank has not voted yet."""
        return False

    def result(self) -> bool:
        """Waits for all. Raises RuntimeError where the group failed."""
        return self._answer


class _VoteInGroup(Vote):
    def __init__(self, word: torch.Tensor, work: Any) -> None:
        self._word, self._work = word, work

    def pending(self) -> bool:
        return not self._work.is_completed()

    def result(self) -> bool:
        self._work.wait()
        return bool(self._word.item())


class Party:
    """Ranks that can talk to each other, but have no group to pass bytes on: each reads for itself what it needs."""

    shares = False
    device = torch.device("cpu")
    """Where parcels lie."""

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.world_size = world_size
        self._exchange = exchange

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather in rank order."""
        return self._exchange(data) if self.world_size > 1 else [data]

    def any(self, flag: bool) -> bool:
        """Does any rank say yes?"""
        return self.vote(flag).result()

    def vote(self, flag: bool) -> Vote:
        """`any`, begun: who has something else to do does that until the others have voted."""
        return Vote(b"1" in self.exchange(b"1" if flag else b"0"))

    def from_first(self, data: bytes) -> bytes:
        """Rank 0's bytes."""
        return self.exchange(data if self.rank == 0 else b"")[0]

    def settle(self, *, on_device: bool) -> None:
        """Decide where parcels lie; `on_device`: the tensors of all ranks lie on accelerators."""

    def post(self, parcels: Sequence[Parcel]) -> list[Any]:
        """Begin to pass on. All ranks post the parcels that they have a part in, in the same order."""
        raise AssertionError("without a group nothing is shared")

    def wait(self, works: Sequence[Any]) -> None:
        """Until what `post` began is done."""


class SharingParty(Party):
    """All ranks of a process group."""

    shares = True

    def __init__(
        self, rank: int, world_size: int, exchange: Exchange, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(rank, world_size, exchange)
        self._group = group
        self._backends = dist.get_backend_config(group)
        self.settle(on_device=False)

    def settle(self, *, on_device: bool) -> None:
        takes_device, takes_cpu = "cuda:nccl" in self._backends, "cpu:" in self._backends
        if takes_device and (on_device or not takes_cpu):
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")

    def vote(self, flag: bool) -> Vote:
        word = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        work = dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return _VoteInGroup(word, work)

    def from_first(self, data: bytes) -> bytes:
        nbytes = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(nbytes, group=self._group, group_src=0)
        if self.rank == 0:
            word = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        else:
            word = torch.empty(int(nbytes.item()), dtype=torch.uint8, device=self.device)
        dist.broadcast(word, group=self._group, group_src=0)
        return data if self.rank == 0 else bytes(word.cpu().numpy())

    def post(self, parcels: Sequence[Parcel]) -> list[Any]:
        everybody = (1 << self.world_size) - 1
        works: list[Any] = []
        singly: list[dist.P2POp] = []
        for p in parcels:
            if p.receivers | 1 << p.reader == everybody:
                works.append(dist.broadcast(p.payload, group=self._group, group_src=p.reader, async_op=True))
            elif p.reader == self.rank:
                singly += [self._op(dist.isend, p, r) for r in bits(p.receivers)]
            else:
                singly.append(self._op(dist.irecv, p, p.reader))
        if singly:
            works += dist.batch_isend_irecv(singly)
        return works

    def _op(self, what: Any, p: Parcel, peer: int) -> dist.P2POp:
        return dist.P2POp(what, p.payload, group=self._group, tag=p.tag, group_peer=peer)

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()


def party_of(rank: int, world_size: int, exchange: Exchange, group: dist.ProcessGroup | None = None) -> Party:
    """The ranks of a load: they share what they read if they are all ranks of `group` (None: torch's default group)."""
    if (
        world_size > 1
        and dist.is_available()
        and dist.is_initialized()
        and (dist.get_rank(group), dist.get_world_size(group)) == (rank, world_size)
    ):
        return SharingParty(rank, world_size, exchange, group)
    return Party(rank, world_size, exchange)


def bits(ranks: int) -> list[int]:
    """The ranks whose bits are set, ascending."""
    return [r for r in range(ranks.bit_length()) if ranks >> r & 1]

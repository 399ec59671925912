"""How the ranks of a save or load talk: `Solo` for one process, `StoreChannel` over a TCPStore of its own. (torch)

No collective of torch's is used, so nothing here can get between two of the training's, and nothing takes device memory: the
first rank hosts a TCPStore, and says where over the store that the process group was made with. Whatever all have to hear
goes through the first rank, which costs it one message per rank.

While a save is in flight every rank beats. Who falls silent is named by the first rank within `SILENT_S`; where the first rank
itself is stopped or hangs, the others name it when the channel's timeout is over (ckpt/storeline.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from surefoot.ckpt.storeline import ChannelError, Line

# Documented as torch.distributed.TCPStore, but not in its __all__; and the stubs say that values are str, they may be bytes.
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
StoreTimeoutError: Any = dist.DistStoreError  # pyright: ignore[reportPrivateImportUsage]

SILENT_S = 8.0
"""A rank that has not beaten for so long while a save is in flight is taken for dead. Threads that beat are kept from running by
nothing but a call into C that holds Python's lock for as long."""
GOODBYE_S = 10.0
"""How long the host waits at the end for ranks that have died."""
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.02
POLL_EVERY = 1 / 16
"""A word is looked for again after so much of the time waited: whoever waits for a moment hears it at once, and nobody is late
by more than that part."""
POLLS_PER_S = 5000
"""What all ranks together may ask of rank 0's TCPStore."""
NAMED_MAX = 8
"""Ranks that a message lists."""

_T = TypeVar("_T")


Judge = Callable[[list[bytes]], bytes]
"""The words of all ranks, in rank order, to one answer for all."""


class Channel(Protocol):
    """All ranks of one save or load.

    `exchange` and `decide` are for the caller's thread, every rank makes the same calls in the same order. The rest is for one
    background thread, while a save is in flight.
    """

    rank: int
    world_size: int

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather in rank order; blocks. Raises ChannelError."""
        ...

    def decide(self, data: bytes, judge: Judge) -> bytes:
        """What `judge` says on rank 0, given what all ranks say; blocks. Raises ChannelError."""
        ...

    def tell(self, key: str, data: bytes) -> None:
        """Leave a word under a key of one's own choice. Raises ChannelError."""
        ...

    def hear(self, key: str, timeout_s: float) -> bytes | None:
        """The word under `key`; None where nobody left one in time. Raises ChannelError: rank 0 has gone."""
        ...

    def count(self, key: str) -> int:
        """Say that this rank is done with `key`; returns how many are. Raises ChannelError."""
        ...

    def beat(self, state: str) -> None:
        """A sign of life: `state` says of what. Raises ChannelError."""
        ...

    def silent(self, state: str, since: float) -> list[int]:
        """Rank 0: who did not beat for `SILENT_S`, unless its last word was `state`. Nobody has to before `since` (monotonic)."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Rank 0: forget words that nobody needs any more."""
        ...

    def close(self) -> None: ...


class Solo:
    """One process talks to itself."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def decide(self, data: bytes, judge: Judge) -> bytes:
        return judge([data])

    def tell(self, key: str, data: bytes) -> None:
        self._words[key] = data

    def hear(self, key: str, timeout_s: float) -> bytes | None:
        return self._words.get(key)

    def count(self, key: str) -> int:
        return 1

    def beat(self, state: str) -> None:
        pass

    def silent(self, state: str, since: float) -> list[int]:
        return []

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._words.pop(key, None)

    def close(self) -> None:
        self._words.clear()


class StoreChannel:
    """Over a TCPStore that the group's first rank hosts. See `open_channel`."""

    def __init__(self, rank: int, world_size: int, host: str, port: int, own: Any, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._round = 0
        self._beats = 0
        self._seen: list[tuple[bytes, float]] = [(b"", 0.0)] * world_size
        # A client's calls wait for each other, and the background blocks: it has a connection of its own.
        self._hosts = own is not None
        self._fore = Line(own or _reached(host, port, timeout_s), own=self._hosts)
        self._back = Line(_reached(host, port, timeout_s), own=self._hosts)

    # ---- the caller's thread

    def exchange(self, data: bytes) -> list[bytes]:
        return msgspec.msgpack.decode(self.decide(data, msgspec.msgpack.encode), type=list[bytes])

    def decide(self, data: bytes, judge: Judge) -> bytes:
        """Words lie under the same keys in every round, each with its number before it: a rank says its next word only when it
        has heard the answer, and that is given when all words were read. So a round costs three keys, not one per rank."""
        number = self._round = self._round + 1
        word = b"%d " % number + data
        try:
            if self.rank == 0:
                self._say(self._fore.store, number, word)
                return self._judge(self._fore.store, judge)
            return self._fore.call(
                lambda store: self._ask(store, number, word), self._timeout_s + 2 * GOODBYE_S
            )
        except StoreTimeoutError as e:
            raise ChannelError(
                f"rank {self.rank} waited {self._timeout_s:.0f} s for rank 0 and heard nothing: {e}"
            ) from e
        except (RuntimeError, dist.DistError) as e:
            raise ChannelError(f"rank {self.rank} cannot reach rank 0 any more: {e}") from e

    def _say(self, store: Any, number: int, word: bytes) -> None:
        store.set(f"x/{self.rank}", word)
        if store.add(f"n/{number}", 1) == self.world_size:
            store.set(f"all/{number}", b"")

    def _judge(self, store: Any, judge: Judge) -> bytes:
        try:
            store.wait([f"all/{self._round}"], timedelta(seconds=self._timeout_s))
        except StoreTimeoutError as e:
            missing = self._missing(store)
            error = f"waited {self._timeout_s:.0f} s for {_ranks(missing)} and heard nothing"
            store.set(f"a/{self._round}", b"!" + error.encode())
            raise ChannelError(f"rank 0 {error}") from e
        words: list[bytes] = store.multi_get([f"x/{r}" for r in range(self.world_size)])
        if gone := [r for r, word in enumerate(words) if word == _farewell(self._round)]:
            store.set(f"a/{self._round}", b"!" + f"says that {_ranks(gone)} {_CLOSED}".encode())
            raise ChannelError(f"{_ranks(gone)} {_CLOSED}")
        try:
            answer = judge([word.partition(b" ")[2] for word in words])
        except Exception as e:
            store.set(f"a/{self._round}", b"!" + f"could not decide: {e}".encode())
            raise
        store.set(f"a/{self._round}", b"=" + answer)
        if self._round > 1:
            for key in (f"n/{self._round - 1}", f"all/{self._round - 1}", f"a/{self._round - 1}"):
                store.delete_key(key)
        return answer

    def _ask(self, store: Any, number: int, word: bytes) -> bytes:
        self._say(store, number, word)
        # A little longer than rank 0 waits: it knows who is missing.
        store.wait([f"a/{number}"], timedelta(seconds=self._timeout_s + GOODBYE_S))
        answer: bytes = store.get(f"a/{number}")
        if answer.startswith(b"!"):
            raise ChannelError(f"rank 0 {answer[1:].decode()}")
        return answer[1:]

    def _missing(self, store: Any) -> list[int]:
        """Ranks that have not spoken in this round."""
        begin = b"%d " % self._round
        keys = [f"x/{r}" for r in range(self.world_size)]
        return [r for r, k in enumerate(keys) if not (store.check([k]) and store.get(k).startswith(begin))]

    # ---- the background

    def tell(self, key: str, data: bytes) -> None:
        self._to_rank_0(lambda store: store.set(f"w/{key}", data))

    def hear(self, key: str, timeout_s: float) -> bytes | None:
        """Asks again and again: a wait of the TCPStore's that ends without an answer is logged as a fault, each time."""
        begun = time.monotonic()
        while not self._to_rank_0(lambda store: store.check([f"w/{key}"])):
            waited_s = time.monotonic() - begun
            fair_s = min(self.world_size / POLLS_PER_S, timeout_s / 2)
            pause_s = max(FIRST_POLL_S, fair_s, min(POLL_EVERY * waited_s, LONGEST_POLL_S))
            if waited_s + pause_s > timeout_s:
                return None
            time.sleep(pause_s)  # the pace of polling
        return self._to_rank_0(lambda store: store.get(f"w/{key}"))

    def count(self, key: str) -> int:
        return self._to_rank_0(lambda store: store.add(f"c/{key}", 1))

    def beat(self, state: str) -> None:
        self._beats += 1
        self._to_rank_0(lambda store: store.set(f"b/{self.rank}", f"{self._beats} {state}".encode()))

    def silent(self, state: str, since: float) -> list[int]:
        beats: list[bytes] = self._to_rank_0(
            lambda store: store.multi_get([f"b/{r}" for r in range(self.world_size)])
        )
        now = time.monotonic()
        silent: list[int] = []
        for r, beat in enumerate(beats):
            if beat != self._seen[r][0]:
                self._seen[r] = (beat, now)
            elif now - max(self._seen[r][1], since) > SILENT_S and beat.partition(b" ")[2] != state.encode():
                silent.append(r)
        return silent

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._to_rank_0(
                lambda store, key=key: (store.delete_key(f"w/{key}"), store.delete_key(f"c/{key}"))
            )

    def _to_rank_0(self, call: Callable[[Any], Any]) -> Any:
        try:
            return self._back.call(call, self._timeout_s)
        except (RuntimeError, dist.DistError) as e:
            raise ChannelError(
                f"rank 0, which commits, has gone: rank {self.rank} cannot reach it ({str(e).splitlines()[0]})"
            ) from e

    def close(self) -> None:
        """The host stays until everybody has said goodbye, so that nobody's last word is lost; others leave at once.

        Who leaves has spoken for the next round: a rank that begins one is told, instead of waiting for a word that never comes.
        """
        try:
            self._round += 1
            self._fore.call(self._leave, 2 * GOODBYE_S)
        except (RuntimeError, dist.DistError, ChannelError):
            pass  # somebody died: there is nobody to wait for
        for line in (self._back, self._fore):
            line.end()

    def _leave(self, store: Any) -> None:
        self._say(store, self._round, _farewell(self._round))
        if self._hosts:
            store.set(f"a/{self._round}", b"!" + _CLOSED.encode())
        store.set(f"bye/{self.rank}", b"")
        if self._hosts:
            everybody = [f"bye/{r}" for r in range(self.world_size)]
            store.wait(everybody, timedelta(seconds=GOODBYE_S))


_CLOSED = "has closed its Checkpointer: all ranks make the same calls, in the same order"


def _farewell(number: int) -> bytes:
    return b"%d!" % number


_opened: dict[str, int] = {}
"""How many channels each group has had, by its name: opening is collective, so all ranks count the same."""
_opening = threading.Lock()


def open_channel(group: dist.ProcessGroup | None, timeout_s: float) -> Channel:
    """The channel of `group` (None: the default group, or this process alone where torch.distributed is not in use).

    Every rank of the group calls it, in the same order as others do; no collective is used.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Solo()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ChannelError(
            "this process is no member of the group it was given: pass a group that it belongs to"
        )
    if world_size == 1:
        return Solo()
    meeting, key = _meeting_place(group)
    own: Any = None
    if rank == 0:
        name = _own_name(dist.get_global_rank(group, 0) if group is not None else 0)
        own = TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        own.multi_set([f"b/{r}" for r in range(world_size)], ["0"] * world_size)
        meeting.set(key, f"{name} {own.port}")
    try:
        name, port = _within(lambda: _told(meeting, key, timeout_s), timeout_s + GOODBYE_S).decode().split()
    except (RuntimeError, dist.DistError) as e:
        raise ChannelError(
            f"rank {rank} waited {timeout_s:.0f} s for rank 0 to open the checkpointer as well: all ranks of the group have to"
        ) from e
    return StoreChannel(rank, world_size, name, int(port), own, timeout_s)


def _meeting_place(group: dist.ProcessGroup | None) -> tuple[Any, str]:
    """The store that torch.distributed was initialised with, and a key in it that names this opening."""
    chosen: Any = group if group is not None else dist.group.WORLD
    name = str(chosen.group_name)
    with _opening:
        number = _opened[name] = _opened.get(name, 0) + 1
    store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store, f"surefoot/ckpt/{name}/{number}"


def _told(meeting: Any, key: str, timeout_s: float) -> bytes:
    meeting.wait([key], timedelta(seconds=timeout_s))
    return meeting.get(key)


def _within(ask: Callable[[], _T], seconds: float) -> _T:
    """Raises as `Line.call`."""
    line = Line(None)
    try:
        return line.call(lambda _: ask(), seconds)
    finally:
        line.end()


def _reached(host: str, port: int, timeout_s: float) -> Any:
    """A connection; what is stopped takes it, and never says so."""
    return _within(lambda: _client(host, port, timeout_s), timeout_s + GOODBYE_S)


def _client(host: str, port: int, timeout_s: float) -> Any:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _own_name(global_rank: int) -> str:
    """The name under which the others reach this process: rank 0's is what everybody was given already."""
    master = os.environ.get("MASTER_ADDR")
    return master if master and global_rank == 0 else socket.gethostname()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED_MAX]))
    more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"

"""How the ranks of a save or load talk: `Solo` for one process, `StoreChannel` over a TCPStore of its own. (torch)

No collective of torch's is used, so nothing here can get between two of the training's, and nothing takes device memory: the
first rank hosts a TCPStore, and says where over the store that the process group was made with. Whatever all have to hear
goes through the first rank, which costs it one message per rank.

While a call that all make together is open, and while a save is in flight, every rank beats. Who falls silent, or leaves by an
error, is named to all others within `SILENT_S` or little more, whatever they wait for (ckpt/vigil.py). Who has not come yet is waited
for as long as the channel's timeout; that it is waited for is said long before (ckpt/late.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import msgspec
import torch.distributed as dist

from surefoot.ckpt.late import Late, named, never_came
from surefoot.ckpt.lives import runs
from surefoot.ckpt.storeline import ChannelError, Line
from surefoot.ckpt.vigil import LOOKS, Vigil, beat, seen_to_run, trouble

StoreTimeoutError: Any = dist.DistStoreError  # pyright: ignore[reportPrivateImportUsage]

SILENT_S = 8.0
"""A rank that has not beaten for so long, while a save is in flight or in the middle of a call, is taken for dead, unless it is seen to
run (ckpt/lives.py). Threads that beat are kept from running by a call into C that holds Python's lock for as long, and by little else."""
GOODBYE_S = 10.0
"""How long the host waits at the end for ranks that have died."""
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.02
POLL_EVERY = 1 / 16
"""A word is looked for again after so much of the time waited: whoever waits for a moment hears it at once, and nobody is late
by more than that part."""
POLLS_PER_S = 5000
"""What all ranks together may ask of rank 0's TCPStore."""
OPS_PER_BEAT = 2
"""What a rank asks of it at each beat of a call."""

CALL = "a call"
"""What a call is called whose caller says nothing."""

_log = logging.getLogger(__name__)


Judge = Callable[[list[bytes]], bytes]
"""The words of all ranks, in rank order, to one answer for all."""


class Channel(Protocol):
    """All ranks of one save or load.

    `one_call`, `until_told`, `explained`, `exchange` and `decide` are for the caller's thread, every rank makes the same calls in the
    same order. The rest is for one background thread, while a save is in flight.
    """

    rank: int
    world_size: int

    def one_call(self, name: str = CALL) -> AbstractContextManager[None]:
        """What is exchanged inside belongs to one call of all ranks; inside another one, to that. Where one of them dies or is stopped
        in the middle of it, or leaves it by an error, all others are told, whatever they wait for: ChannelError.

        `name`: what its caller knows it by, for who waits in it.
        """
        ...

    def until_told(self, give_up: Callable[[], None]) -> AbstractContextManager[None]:
        """For what inside waits for other ranks elsewhere than here: when this rank is told that one of them has failed, `give_up` is
        called in a background thread, again and again, and is to end such a wait."""
        ...

    def explained(self, error: Exception) -> Exception:
        """Why others could not be reached elsewhere: the ChannelError that names who died, when that is known; `error` if nobody has."""
        ...

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

    def one_call(self, name: str = CALL) -> AbstractContextManager[None]:
        return nullcontext()

    def until_told(self, give_up: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def explained(self, error: Exception) -> Exception:
        return error

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
    """Over a TCPStore that the group's first rank hosts. See `open_channel` (ckpt/opening.py).

    Args:
        fore: a connection to that store, for the caller's thread; on the rank that hosts it, the store itself.
        back: another one. A client's calls wait for each other, and the background blocks.
        first: the card of rank 0's process (ckpt/lives.py).
    """

    def __init__(
        self, rank: int, world_size: int, *, fore: Any, back: Any, hosts: bool, timeout_s: float, first: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._beats = 0
        self._seen: list[tuple[bytes, float]] = [(b"", 0.0)] * world_size
        self._hosts = hosts
        there = partial(runs, first)
        self._fore = Line(fore, own=hosts, runs=there)
        self._back = Line(back, own=hosts, runs=there)
        beat_s = max(SILENT_S / LOOKS, OPS_PER_BEAT * world_size / POLLS_PER_S)
        self._late = Late(rank, world_size, timeout_s)
        self._vigil = Vigil(self._back, rank, world_size, beat_s, self._end_waits, self._late)
        self._name = CALL
        self._in_call = self._closed = False
        self._call = 0
        """The number of the call that all ranks are in, or were in last: what went wrong in one is no matter of the next."""
        self._rounds = 0
        """Of this call."""
        self._at = self._last = ""
        """The round that is waited for, and the one before, as `<call>.<round>`."""
        self._give_up: Callable[[], None] | None = None
        self._failed: Exception | None = None
        """What this rank has failed with in a round of this call: the others know, and wait for it no more."""

    # ---- one call

    @contextmanager
    def one_call(self, name: str = CALL) -> Iterator[None]:
        if self._in_call:
            yield
            return
        self._in_call, self._rounds, self._failed, self._name = True, 0, None, name
        error: BaseException | None = None
        try:
            yield
        except BaseException as e:
            error = e
            raise
        finally:
            self._in_call = False
            if not self._closed:
                self._leave(error)

    def _next_round(self) -> str:
        """Enters the call with the first one."""
        self._rounds += 1
        if self._rounds == 1:
            self._call += 1
            self._late.begin(self._name)
            self._vigil.enter(self._call)
        return f"{self._call}.{self._rounds}"

    def _leave(self, error: BaseException | None) -> None:
        """The others hear of an error, unless it came from them."""
        entered = self._rounds > 0
        self._late.end()
        self._vigil.leave()
        if error is not None and not (entered and isinstance(error, ChannelError)):
            self._tell_error(self._at or self._next_of_call(), trouble(self.rank, error))
            self._call += not entered
        self._at = ""
        if entered:
            self._fore.post(lambda store: store.set(f"l/{self.rank}", b""))
        if error is not None and self._hosts:
            self._vigil.see_off(self._call)

    def _next_of_call(self) -> str:
        return f"{self._call}.{self._rounds + 1}" if self._rounds else f"{self._call + 1}.1"

    def _tell_error(self, at: str, text: str) -> None:
        """To those who wait in round `at`, and to those who look later."""

        def tell(store: Any) -> None:
            store.compare_set(f"f/{at.partition('.')[0]}", "", text)
            self._wake(store, at, text)

        try:
            self._back.call(tell, SILENT_S)
        except (RuntimeError, dist.DistError, ChannelError):
            pass  # rank 0 is gone, and so the others hear of that

    def _wake(self, store: Any, at: str, text: str) -> None:
        """An answer that was given stands."""
        store.compare_set(f"a/{at}", "", f"!{text}")
        store.set(f"all/{at}", text)

    @contextmanager
    def until_told(self, give_up: Callable[[], None]) -> Iterator[None]:
        self._give_up = give_up
        try:
            yield
        finally:
            self._give_up = None

    def _end_waits(self, cut_off: bool) -> None:
        """By the vigil, in its thread: this call fails."""
        error, at, give_up = self._vigil.error, self._at, self._give_up
        if error is None:
            return
        try:
            if cut_off:
                self._fore.fail(error)
            elif at:
                self._back.call(lambda store: self._wake(store, at, str(error)), SILENT_S)
            if not at and give_up is not None:
                give_up()
        except Exception as e:
            _log.debug("%s; and nothing that waits could be ended: %s", error, e)

    def explained(self, error: Exception) -> Exception:
        return self._vigil.hear(2 * LOOKS) or error

    # ---- the caller's thread

    def exchange(self, data: bytes) -> list[bytes]:
        return msgspec.msgpack.decode(self.decide(data, msgspec.msgpack.encode), type=list[bytes])

    def decide(self, data: bytes, judge: Judge) -> bytes:
        """Words lie under the same keys in every round, each with its number before it: a rank says its next word only when it
        has heard the answer, and that is given when all words were read. So a round costs three keys, not one per rank."""
        with self.one_call():
            if self._failed is not None:
                raise self._failed
            self._at = self._next_round()
            if self._vigil.error is not None:
                raise self._vigil.error
            try:
                answer = self._answer(self._at, data, judge)
            except Exception as e:
                self._failed = e
                if not isinstance(e, ChannelError):
                    self._tell_error(self._at, trouble(self.rank, e))
                raise
            self._late.end()
            self._last, self._at = self._at, ""
            return answer

    def _answer(self, at: str, data: bytes, judge: Judge) -> bytes:
        word = at.encode() + b" " + data
        try:
            if self.rank == 0:
                self._say(self._fore.store, at, word)
                return self._judge(self._fore.store, at, judge)
            return self._fore.call(lambda store: self._ask(store, at, word), self._timeout_s + 2 * GOODBYE_S)
        except (RuntimeError, dist.DistError) as e:
            raise ChannelError(f"rank {self.rank} cannot reach rank 0 any more: {e}") from e

    def _say(self, store: Any, at: str, word: bytes) -> None:
        if self._rounds == 1:
            store.set(f"l/{self.rank}", beat(self._call, 0))
        store.set(f"x/{self.rank}", word)
        if store.add(f"n/{at}", 1) == self.world_size:
            store.set(f"all/{at}", b"")

    def _judge(self, store: Any, at: str, judge: Judge) -> bytes:
        try:
            store.wait([f"all/{at}"], timedelta(seconds=self._timeout_s))
        except StoreTimeoutError as e:
            error = self._in_vain(self._missing(store, at), came=self._rounds > 1)
            store.set(f"a/{at}", f"!rank 0 {error}")
            raise ChannelError(f"rank 0 {error}") from e
        failed, *words = store.multi_get([f"all/{at}", *(f"x/{r}" for r in range(self.world_size))])
        if failed:
            store.set(f"a/{at}", b"!" + failed)
            raise ChannelError(failed.decode())
        try:
            answer = judge([word.partition(b" ")[2] for word in words])
        except Exception as e:
            store.set(f"a/{at}", f"!rank 0 could not decide: {e}")
            raise
        store.set(f"a/{at}", b"=" + answer)
        if self._last:
            for key in (f"n/{self._last}", f"all/{self._last}", f"a/{self._last}"):
                store.delete_key(key)
        return answer

    def _ask(self, store: Any, at: str, word: bytes) -> bytes:
        self._say(store, at, word)
        # A little longer than rank 0 waits: it knows who is missing.
        try:
            store.wait([f"a/{at}"], timedelta(seconds=self._timeout_s + GOODBYE_S))
        except StoreTimeoutError as e:
            came = store.get("l/0").startswith(beat(self._call, 0)[:-1])
            raise ChannelError(f"rank {self.rank} {self._in_vain([0], came=came)}") from e
        answer: bytes = store.get(f"a/{at}")
        if answer.startswith(b"!"):
            raise ChannelError(answer[1:].decode())
        return answer[1:]

    def _in_vain(self, ranks: Sequence[int], *, came: bool) -> str:
        """How long it was waited for those; `came`: they are in this call, and say nothing."""
        if not came:
            return never_came(self._name, self._timeout_s, ranks)
        return f"waited {self._timeout_s:.0f} s for {named(ranks)} in {self._name} and heard nothing"

    def _missing(self, store: Any, at: str) -> list[int]:
        """Ranks that have not spoken in this round."""
        begin = at.encode() + b" "
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
        for r, sign in enumerate(beats):
            if sign != self._seen[r][0]:
                self._seen[r] = (sign, now)
            elif now - max(self._seen[r][1], since) > SILENT_S and sign.partition(b" ")[2] != state.encode():
                silent.append(r)
        return [r for r in silent if not self._to_rank_0(lambda store, r=r: seen_to_run(store, r))]

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._to_rank_0(
                lambda store, key=key: (store.delete_key(f"w/{key}"), store.delete_key(f"c/{key}"))
            )

    def _to_rank_0(self, call: Callable[[Any], Any]) -> Any:
        try:
            return self._back.call(call, SILENT_S)
        except (RuntimeError, dist.DistError) as e:
            raise ChannelError(
                f"rank 0, which commits, has gone: rank {self.rank} cannot reach it ({str(e).splitlines()[0]})"
            ) from e

    def close(self) -> None:
        """The host stays until everybody has said goodbye, so that nobody's last word is lost; others leave at once.

        Who leaves has left the next call as well: a rank that begins one is told, instead of waiting for a word that never comes.
        """
        self._vigil.end()
        self._closed = True
        text = (
            f"rank {self.rank} has closed its Checkpointer: all ranks make the same calls, in the same order"
        )
        try:
            if not self._vigil.cut_off:
                self._fore.call(lambda store: self._say_goodbye(store, text), 2 * GOODBYE_S)
        except (RuntimeError, dist.DistError, ChannelError):
            pass  # somebody died: there is nobody to wait for
        for line in (self._back, self._fore):
            line.end()

    def _say_goodbye(self, store: Any, text: str) -> None:
        self._wake(store, f"{self._call + 1}.1", text)
        store.set(f"l/{self.rank}", b"")
        store.set(f"bye/{self.rank}", b"")
        if self._hosts:
            everybody = [f"bye/{r}" for r in range(self.world_size)]
            store.wait(everybody, timedelta(seconds=GOODBYE_S))

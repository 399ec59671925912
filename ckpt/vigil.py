"""Who is there while all ranks are in one call: `Roll`, the rule, and `Vigil`, the thread that beats and looks. Torch-free.

A call that all ranks make together waits for each of them, and one that died says nothing. So whoever has entered a call beats on
rank 0's TCPStore, from a thread of its own: training's thread may be slow as it likes, wait for a store or judge for minutes. Rank 0
looks at the beats, once for each of its own. Who has *entered* and then gives no sign for so many looks is taken for dead; who has
not come yet is late, which is no fault, however long it takes: it is only said (ckpt/late.py). What goes wrong is left under a key of
the call, where all see it with their next beat::

    l/<rank>    "<call> <beat>" while it is in a call, else nothing
    a/<call>.1  there once all have come to it
    f/<call>    what has gone wrong on the first rank that it did on
    p/<rank>    where its process is found: one that rank 0 can see, and sees running, is slow and not dead (ckpt/lives.py)

A rank that leaves a call by an error leaves word there itself. Of rank 0 the others hear by its store, which answers from a thread
that needs none of Python's locks: the connection breaks when it dies, and is silent while it is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from surefoot.ckpt.late import Late, named, say
from surefoot.ckpt.lives import ended, runs
from surefoot.ckpt.storeline import ChannelError, Line

LOOKS = 8
"""A rank is silent when so many looks in a row have found no new beat. Looks are counted, not seconds: rank 0 may have been held up
itself, and the others with it."""
GRACE_BEATS = 3
POLL_S = 0.02


class Roll:
    """Who has fallen silent, from what the ranks have said at each look. PURE."""

    def __init__(self, ranks: int) -> None:
        self._last: list[bytes] = [b""] * ranks
        self._same = [0] * ranks

    def look(self, beats: Sequence[bytes]) -> list[int]:
        """Ranks that are in a call, and whose beat is the same as at `LOOKS` looks before."""
        silent: list[int] = []
        for rank, beat in enumerate(beats):
            self._same[rank] = self._same[rank] + 1 if beat == self._last[rank] else 0
            self._last[rank] = beat
            if beat and self._same[rank] >= LOOKS:
                silent.append(rank)
        return silent


class Vigil:
    """This rank's beats and looks. The thread starts with the first call, and sleeps between calls."""

    def __init__(
        self,
        line: Line,
        rank: int,
        ranks: int,
        beat_s: float,
        told: Callable[[bool], None],
        late: Late | None = None,
    ) -> None:
        """
        Args:
            late: whom this rank waits for.
            told: called in the thread, with every beat from when `error` is set until this rank leaves the call; True: rank 0 is gone.
        """
        self._line = line
        self._rank = rank
        self._ranks = ranks
        self._beat_s = beat_s
        self._told = told
        self._late = late
        self._roll = Roll(ranks)
        self._changed = threading.Condition()
        self._heard = threading.Event()
        self._thread: threading.Thread | None = None
        self._call = 0
        self._beats = 0
        self._silent: list[int] = []
        self._ended = self._idle = False
        self.error: ChannelError | None = None
        """What has gone wrong on another rank in the call that this one is in, or left last."""
        self.cut_off = False
        """Rank 0 is gone, or does not answer; this call asks it no more."""

    def enter(self, call: int) -> None:
        """This rank is in. Its first beat is `beat(call, 0)`, and the caller's to give."""
        with self._changed:
            self._call, self._beats, self.error, self.cut_off = call, 0, None, False
            self._heard.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-vigil", daemon=True)
                self._thread.start()
            if self._idle:
                self._changed.notify()

    def leave(self) -> None:
        """No beat of this call is under way any more when it returns."""
        with self._changed:
            self._call = 0

    def end(self) -> None:
        with self._changed:
            self._call, self._ended = 0, True
            self._changed.notify()

    def see_off(self, call: int) -> None:
        """On rank 0, when it has left by an error: its store may end with it, so it stays until the others have left as well, or have
        had time to hear why they should."""
        until = time.monotonic() + GRACE_BEATS * self._beat_s
        mark = beat(call, 0).partition(b" ")[0]
        while time.monotonic() < until:
            beats: list[bytes] = self._line.call(self._read, self._beat_s)
            living = set(range(1, self._ranks)) - set(self._silent)
            if not any(beats[r].partition(b" ")[0] == mark for r in living):
                return
            time.sleep(min(POLL_S, self._beat_s))  # the pace of polling

    def hear(self, looks: int) -> ChannelError | None:
        """What has gone wrong, as soon as it is known; None where nothing is for as long as so many looks take."""
        self._heard.wait(looks * self._beat_s)
        return self.error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._call or self._ended):
                    self._idle = True
                    self._changed.wait()
                self._idle = False
                if self._ended:
                    return
                call = self._call
                self._changed.wait(self._beat_s)
                if self._call != call:
                    continue
                self._look(call)
                error = self.error
            if error is not None:
                self._told(self.cut_off)

    def _look(self, call: int) -> None:
        if self.cut_off:
            return
        try:
            word: bytes = self._line.call(
                lambda store: self._beat_and_look(store, call), LOOKS * self._beat_s
            )
            error = ChannelError(word.decode()) if word else None
        except ChannelError as e:
            self.cut_off, error = True, e
        except RuntimeError as e:
            self.cut_off = True
            error = ChannelError(f"rank 0 has gone: its process has died, or its machine is cut off ({e})")
        if self.error is None and error is not None:
            self.error = error
            self._heard.set()

    def _beat_and_look(self, store: Any, call: int) -> bytes:
        self._beats += 1
        store.set(f"l/{self._rank}", beat(call, self._beats))
        if self._rank == 0:
            beats = self._read(store)
            silent = self._roll.look(beats)
            self._silent = [r for r in silent if r != 0 and not seen_to_run(store, r)]
            if self._silent:
                store.compare_set(f"f/{call}", "", f"{named(self._silent)} {_SILENT}")
            elif self._beats % LOOKS == 0 and (gone := self._ended_before(store, beats)):
                store.compare_set(f"f/{call}", "", f"{named(gone)} {_ENDED}")
        if self._late is not None and (whom := self._late.at_whom()):
            self._say_who_is_late(store, call, self._late, whom)
        return store.get(f"f/{call}") if store.check([f"f/{call}"]) else b""

    def _say_who_is_late(self, store: Any, call: int, late: Late, whom: Sequence[int]) -> None:
        mark = beat(call, 0).partition(b" ")[0]
        signs: list[bytes] = store.multi_get([f"l/{r}" for r in whom])
        present = [r for r, sign in zip(whom, signs, strict=True) if sign.partition(b" ")[0] == mark]
        if store.check([f"a/{call}.1"]):
            return  # all had come, and who is not here has left again
        if words := late.words(present):
            say(words)

    def _ended_before(self, store: Any, beats: Sequence[bytes]) -> list[int]:
        """Who has not come, and never will: seen from here, its process has ended."""
        late = [r for r, sign in enumerate(beats) if not sign and store.check([f"p/{r}"])]
        return [r for r in late if ended(store.get(f"p/{r}").decode())]

    def _read(self, store: Any) -> list[bytes]:
        return store.multi_get([f"l/{r}" for r in range(self._ranks)])


_ENDED = "will not come to a call that all ranks make together: the process has ended"
_SILENT = "fell silent in the middle of a call that all ranks make together: the process has died, is stopped or hangs"


def seen_to_run(store: Any, rank: int) -> bool:
    """A rank that is silent and runs is slow: it waits for nobody's sake to be taken for dead."""
    return store.check([f"p/{rank}"]) and runs(store.get(f"p/{rank}").decode())


def beat(call: int, number: int) -> bytes:
    return b"%d %d" % (call, number)


def trouble(rank: int, error: BaseException) -> str:
    """What the others are told of a rank that leaves a call by an error of its own."""
    what = type(error).__name__
    how = f"raised {what}: {error}" if isinstance(error, Exception) else f"was interrupted ({what})"
    return f"rank {rank} has left a call that all ranks make together: it {how}"

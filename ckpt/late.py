"""Who has not come to a call that all ranks make together: said once, long before it is an error. Torch-free.

`if rank == 0: c.save(...)` is easily written, and waits for minutes for ranks that never come. So a rank that has waited for `LATE_S`
where all have to come looks who is there, and says for whom it waits, in which call. It is no fault yet: one that compiles or reads may
come as late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

LATE_S = 15.0
NAMED_MAX = 8
"""Ranks that a message lists."""
ADVICE = "all ranks make every call, so none belongs under `if rank == 0:`"

_log = logging.getLogger(__name__)


class Late:
    """The rule, for one rank. `begin` and `end` are for the thread that waits, the rest is for one that looks now and then."""

    def __init__(
        self, rank: int, ranks: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._waits: tuple[str, float] | None = None
        """In which call, and since when."""
        self._looked = False

    def begin(self, call: str) -> None:
        """This rank has come to `call`, and waits for the others."""
        self._looked, self._waits = False, (call, self._clock())

    def end(self) -> None:
        """All have come, or it waits no more."""
        self._waits = None

    def at_whom(self) -> Sequence[int]:
        """The ranks to look at now: none before it is late, and none again in this call.

        Rank 0 looks at all. The others wait for rank 0, and look at the one before them as well: of neighbours the first one speaks.
        """
        waits = self._waits
        if waits is None or self._looked or self._clock() - waits[1] < LATE_S:
            return ()
        self._looked = True
        return range(self._ranks) if self._rank == 0 else sorted({0, self._rank - 1})

    def words(self, present: Collection[int]) -> str:
        """What to say, given who is there of those it looked at; "" where nobody is late, or another says it."""
        waits = self._waits
        absent = [r for r in range(self._ranks if self._rank == 0 else 1) if r not in present]
        if waits is None or not absent or (self._rank > 0 and present):
            return ""
        return waiting(waits[0], self._clock() - waits[1], absent, self._timeout_s)


@contextmanager
def waiting_for_rank_0(call: str, timeout_s: float) -> Iterator[None]:
    """Says it where what is inside takes long, and nothing can be looked at yet."""
    timer = threading.Timer(LATE_S, lambda: _log.warning("%s", waiting(call, LATE_S, [0], timeout_s)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(words: str) -> None:
    """Logs a warning in a thread of its own: a handler may block, and whoever looks has to go on."""
    saying = threading.Thread(target=_log.warning, args=("%s", words), name="ckpt-late", daemon=True)
    with suppress(RuntimeError):  # no more threads: then it is not said
        saying.start()


def waiting(call: str, waited_s: float, absent: Sequence[int], timeout_s: float) -> str:
    return (
        f"{call} has waited {waited_s:.0f} s for {named(absent)}: {ADVICE}; a rank that is only late is waited for, "
        f"{timeout_s:.0f} s in all"
    )


def never_came(call: str, waited_s: float, absent: Sequence[int]) -> str:
    """When the waiting is over."""
    which = "which has" if len(absent) == 1 else "which have"
    return f"waited {waited_s:.0f} s for {named(absent)}, {which} not come to {call}: {ADVICE}"


def named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED_MAX]))
    more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"

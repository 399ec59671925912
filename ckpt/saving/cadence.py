"""When a `Checkpointer` saves: every so many steps, every so many seconds, or as often as is worth it. Torch-free.

Steps need no agreement. Seconds and ``"auto"`` do, since clocks differ: rank 0 decides and tells the others, at steps that
all know (`interval.Pace`). The choice itself is pure (`interval.choose`) and made anew after each save, from what saves
have cost so far and how often the job was interrupted; it is kept in the manifest (``facts``: ``interval``, ``ran_s``), where
`surefoot ckpt ls` shows it and the next start finds for how long the job has been running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from surefoot.ckpt.planning.interval import CostMeter, Due, IntervalChoice, Pace, choose, faults_of
from surefoot.ckpt.record import Record

_log = logging.getLogger(__name__)

NEWS_RATIO = 1.25
"""An interval that changes by more is logged."""


class _Channel(Protocol):
    @property
    def rank(self) -> int: ...

    def exchange(self, word: bytes, /) -> list[bytes]: ...


class Cadence:
    """One rank's. All ranks ask for the same steps in the same order.

    Args:
        every: save at steps divisible by this; ``"auto"``: choose; None: at every step that is asked for, or by `every_s`.
        every_s: save when so many seconds have passed since the last save.

    Raises ValueError.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None = None,
        every_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every is not None and every_s is not None:
            raise ValueError(f"every = {every!r} and every_s = {every_s}: give one of them")
        if every not in (None, "auto") and (not isinstance(every, int) or every < 1):
            raise ValueError(
                f"every = {every!r}: save every so many steps, at least 1, or 'auto', or leave it out"
            )
        if every_s is not None and every_s <= 0:
            raise ValueError(f"every_s = {every_s}: a positive number of seconds, or leave it out")
        self._every = every
        self._clock = clock
        self._began_s = clock()
        self._ran_before_s = 0.0
        self._meter = CostMeter()
        self._pace = Pace(every_s or 0.0)
        self._timed = every_s is not None or every == "auto"
        self._ask_at: int | None = None
        self._faults: int | None = None
        self._choice: IntervalChoice | None = None

    @property
    def choice(self) -> IntervalChoice | None:
        """The interval in force and why; None before one was chosen."""
        return self._choice

    @property
    def auto(self) -> bool:
        return self._every == "auto"

    def loaded(self, facts: Mapping[str, Any]) -> None:
        """What a load found in the manifest. It counts as saved just now."""
        ran = facts.get("ran_s")
        self._ran_before_s = float(ran) if isinstance(ran, int | float) and ran >= 0 else 0.0
        self._began_s = self._clock()
        self._pace.begin(self._began_s)
        self._ask_at = None

    def due(
        self,
        step: int,
        channel: Callable[[], _Channel],
        records: Callable[[], Mapping[int, Record]],
        *,
        uploading: bool,
    ) -> bool:
        """Whether to save `step`. Collective over the channel at the steps at which it has to be.

        Args:
            channel: opened only where ranks have to agree.
            records: the generations there are; asked for once, on rank 0, where the interval is chosen.
            uploading: the save before this one is still under way.
        """
        if isinstance(self._every, int):
            return step % self._every == 0
        if not self._timed:
            return True
        now = self._clock()
        self._meter.step_ended(now, uploading=uploading)
        if self._ask_at is not None and step < self._ask_at:
            return False
        to_others = channel()
        word = b""
        if to_others.rank == 0:
            if self.auto:
                self._choose(records)
            word = msgspec.json.encode(self._pace.ask(step, now, self._meter.step_s))
        due = msgspec.json.decode(to_others.exchange(word)[0], type=Due)
        self._ask_at = due.ask_at
        return due.save

    def saved(self, stall_s: float) -> None:
        """A save has given the training thread back after `stall_s`."""
        self._meter.save_returned(self._clock(), stall_s)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        found: dict[str, Any] = {"ran_s": round(self._ran_s(), 3)}
        if self._choice is not None:
            found["interval"] = self._choice.why
        return found

    def _ran_s(self) -> float:
        return self._ran_before_s + self._clock() - self._began_s

    def _choose(self, records: Callable[[], Mapping[int, Record]]) -> None:
        cost_s = self._meter.cost_s
        if cost_s is None:
            return  # the first save measures it
        if self._faults is None:
            self._faults = faults_of(records())
        before, self._choice = (
            self._choice,
            choose(cost_s=cost_s, faults=self._faults, observed_s=self._ran_s()),
        )
        self._pace.interval_s = self._choice.interval_s
        ratio = self._choice.interval_s / before.interval_s if before is not None else 0.0
        if not 1 / NEWS_RATIO < ratio < NEWS_RATIO:
            _log.info("checkpoints: %s", self._choice.why)

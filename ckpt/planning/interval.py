"""How often to save. PURE.

A save costs the training `cost_s` (the stall, and what the upload takes from the steps beside it: the *drag*); a fault costs
what was done since the last save. With faults `mtbf_s` apart on average, saving every `t` seconds of computing loses about

    cost_s / t  (saving)  +  t / (2 mtbf_s)  (redoing)

of the time, least at t = sqrt(2 cost_s mtbf_s) (Young 1974). Where a save is not small against the time between faults, Daly
(2006, "A higher order estimate of the optimum checkpoint interval for restart dumps") is better:

    t = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C    for C < 2 M,    else  t = M

`choose` uses it throughout: for small C it is Young's but for the C that is taken off.

The rate of faults is estimated from what happened, with a prior of one fault a day that weighs as much as one fault: a new
job is taken for an ordinary one, a job that never fails is trusted slowly, one that fails often is believed soon.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

import msgspec

from surefoot.ckpt.record import Record

PRIOR_MTBF_S = 24 * 3600.0
"""Nothing known: a fault a day. (Llama 3 on 16,384 GPUs: one in three hours; eight GPUs: one in months.)"""
INTERVAL_S_MIN, INTERVAL_S_MAX = 10.0, 3600.0
"""What is chosen lies between: below, saves follow each other without a pause; above, a wrong estimate would cost hours."""
SAMPLES_MAX = 64
"""Step times and stalls are remembered this far back: costs change when a job takes another shape."""

_PLANNED = ("first_start", "resume", "rollback", "burnt", "import")
"""How the reasons begin of generations that no fault led to. Alone, the first start is one as well, later ones are not told
from restarts after a crash."""


class IntervalChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An interval, and what led to it."""

    interval_s: float
    cost_s: float
    mtbf_s: float
    faults: int
    observed_s: float
    clamped: bool

    @property
    def why(self) -> str:
        """The reasoning in one sentence."""
        seen = f"{self.faults} fault{'' if self.faults == 1 else 's'} in {_span(self.observed_s)}"
        bound = ", which is the bound" if self.clamped else ""
        return (
            f"every {_span(self.interval_s)}{bound}: a save costs {self.cost_s:.3g} s of training, and a fault is expected every "
            f"{_span(self.mtbf_s)} ({seen}; Daly 2006)"
        )


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's first-order optimum, seconds of computing between saves."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum, seconds of computing between saves."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def mtbf_of(faults: int, observed_s: float) -> float:
    """Mean time between faults, seconds, after `faults` in `observed_s` of running."""
    return (PRIOR_MTBF_S + observed_s) / (1 + faults)


def faults_of(records: Mapping[int, Record]) -> int:
    """How many generations exist because something failed, or was stopped without a word. PURE.

    A number that was burnt is no fault of its own, nor is the first start.
    """
    ordered = [records[g] for g in sorted(records)]
    return sum(
        1 for r in ordered[1:] if not r.rollback and not r.reason.startswith(_PLANNED) and not _imports(r)
    )


def _imports(r: Record) -> bool:
    return r.created_by.startswith("import:")


def choose(
    *,
    cost_s: float,
    faults: int,
    observed_s: float,
    at_least_s: float = INTERVAL_S_MIN,
    at_most_s: float = INTERVAL_S_MAX,
) -> IntervalChoice:
    """The interval for what was measured and seen. Raises ValueError for a cost or a time that is negative."""
    if cost_s < 0 or observed_s < 0 or faults < 0:
        raise ValueError(f"cost {cost_s} s, {faults} faults in {observed_s} s: none of them can be negative")
    mtbf_s = mtbf_of(faults, observed_s)
    best = daly_s(cost_s, mtbf_s)
    interval_s = min(max(best, at_least_s), at_most_s)
    return IntervalChoice(
        interval_s=interval_s,
        cost_s=cost_s,
        mtbf_s=mtbf_s,
        faults=faults,
        observed_s=observed_s,
        clamped=interval_s != best,
    )


# ---------------------------------------------------------------- what a save costs


class CostMeter:
    """What saves cost, from the moments at which steps end. Fed by whoever sees them; asks no clock."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._stalls: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._drags: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._busy: list[float] = []
        self._ended_at: float | None = None

    @property
    def step_s(self) -> float | None:
        """The median of steps without a save; None before the first."""
        return statistics.median(self._idle) if self._idle else None

    @property
    def cost_s(self) -> float | None:
        """Stall and drag of a save, medians; None before the first save."""
        if not self._stalls:
            return None
        return statistics.median(self._stalls) + (statistics.median(self._drags) if self._drags else 0.0)

    def step_ended(self, now_s: float, *, uploading: bool) -> None:
        """A step's computing ended. `uploading`: a save was under way beside it."""
        if self._ended_at is not None:
            (self._busy.append if uploading else self._idle.append)(now_s - self._ended_at)
        if not uploading and self._busy:
            if (usual := self.step_s) is not None:
                self._drags.append(max(0.0, sum(self._busy) - usual * len(self._busy)))
            self._busy = []
        self._ended_at = now_s

    def save_returned(self, now_s: float, stall_s: float) -> None:
        """The call that saves has given the training thread back, after `stall_s`."""
        self._stalls.append(stall_s)
        self._ended_at = now_s


# ---------------------------------------------------------------- when the next save is due


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word at a step where all ranks ask: save now or not, and at which step to ask again."""

    save: bool
    ask_at: int


class Pace:
    """Turns seconds into steps. Rank 0 alone has one; the others do what it says.

    Asking costs an exchange, so not every step asks: the next time is half of what is left away, judged by the usual step.
    A save is therefore late by about one step at most, and an interval costs some ten exchanges.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._saved_at: float | None = None

    def ask(self, step: int, now_s: float, step_s: float | None) -> Due:
        """All ranks are at the end of `step`. The first time nothing has been saved yet, and a save is due."""
        if self._saved_at is None or now_s - self._saved_at >= self.interval_s:
            self._saved_at = now_s
            return Due(save=True, ask_at=step + self._ahead(self.interval_s, step_s))
        return Due(save=False, ask_at=step + self._ahead(self._saved_at + self.interval_s - now_s, step_s))

    def begin(self, now_s: float) -> None:
        """What was just loaded counts as saved now."""
        self._saved_at = now_s

    def _ahead(self, left_s: float, step_s: float | None) -> int:
        if step_s is None or step_s <= 0:
            return 1
        return max(1, int(left_s / step_s / 2))


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"

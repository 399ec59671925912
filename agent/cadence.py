"""How often to commit, chosen by rank 0 (``every = "auto"``); the others hear at each step whether it is due.

The rule is ckpt's (ckpt/planning/interval.py): what a commit costs the training, measured here, against how often the job is
interrupted, which the plan tells: the controller counts the faults of a run and for how long it has been running. Node memory gets
every step anyway, so a commit costs what its upload takes from the steps beside it. The first commit of a generation is due at once,
and is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from surefoot.ckpt.tiers import CostMeter, IntervalChoice, choose
from surefoot.controller.wire import Plan

NEWS_RATIO = 1.25
"""An interval that changes by more is told."""


class Cadence:
    """Rank 0's."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._faults = plan.faults
        self._ran_before_s = plan.ran_s
        self._clock = clock
        self._began_s = clock()
        self._meter = CostMeter()
        self._begun = False
        self._choice: IntervalChoice | None = None
        self._told: IntervalChoice | None = None

    def step_ended(self, *, uploading: bool) -> float:
        """A step is over. `uploading`: a commit was on its way beside it, if only at its begin.

        Returns how many seconds after the begin of the last commit the next one is due: at once where there was none, and not before
        that one was measured, for which a step is needed that had nothing beside it.
        """
        self._meter.step_ended(self._clock(), uploading=uploading)
        if self._begun and not uploading:
            cost_s = self._meter.cost_s
            assert cost_s is not None, "a commit was begun"
            observed_s = self._ran_before_s + self._clock() - self._began_s
            self._choice = choose(cost_s=cost_s, faults=self._faults, observed_s=observed_s)
        if self._choice is not None:
            return self._choice.interval_s
        return math.inf if self._begun else 0.0

    def begun(self) -> None:
        """A commit has been begun; the training goes on at once."""
        self._begun = True
        self._meter.save_returned(self._clock(), 0.0)

    def news(self) -> str:
        """The reasoning in a sentence, where the interval is another than was told last; empty otherwise."""
        choice, told = self._choice, self._told
        if choice is None or (
            told is not None and 1 / NEWS_RATIO < choice.interval_s / told.interval_s < NEWS_RATIO
        ):
            return ""
        self._told = choice
        return choice.why

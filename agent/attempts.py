"""When an attempt to commit is begun. Rank 0 decides; the others hear of it in the exchange at the end of the step."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.agent.cadence import Cadence
from surefoot.agent.link import AgentLink, AgentNews
from surefoot.controller.wire import CadenceMsg, CommittedMsg, Plan


def attempt_due(
    step: int,
    *,
    steps: int,
    every_steps: int,
    attempted: int,
    pending: bool,
    every_s: float | None = None,
    since_s: float = 0.0,
) -> bool:
    """Whether to begin committing `step`.

    Due are multiples of `every_steps` (or, with `every_s`, the first step after so many seconds), and the last step. While an
    attempt is under way none is begun: the one that fell due meanwhile is made up at the first step after it.

    Args:
        attempted: the step of the last attempt; the starting point's before the first.
        pending: that attempt has not been answered yet.
        since_s: how long ago it was begun.
    """
    if step == steps:
        return True
    if every_s is not None:
        return not pending and since_s >= every_s
    return not pending and step // every_steps > attempted // every_steps


class Attempts:
    """The attempts of one life, one at a time.

    Args:
        steps: the last step.
        every_steps, every_s: see `attempt_due`.
        cadence: chooses `every_s` instead; rank 0's alone.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        steps: int,
        every_steps: int,
        every_s: float | None,
        cadence: Cadence | None,
        link: AgentLink,
        clock: Callable[[], float],
    ) -> None:
        self._steps = steps
        self._every_steps = every_steps
        self._every_s = every_s
        self._cadence = cadence
        self._link = link
        self._clock = clock
        self._attempted = plan.start.step
        self._attempted_at = clock()
        self._pending: int | None = None
        """The step whose attempt is not answered yet, as far as is known: rank 0 looks when it is asked for the next."""
        self._owed = False
        """A commit is wanted as soon as there can be one."""

    def due(self, step: int) -> bool:
        """Whether to begin committing `step`, which is over. For rank 0, once a step."""
        uploading = self._pending is not None
        if self._pending is not None and (answer := self._link.peek(take_answer(self._pending))) is not None:
            self._pending = None
            self._owed = self._owed and bool(answer.failure)
        every_s = self._every_s
        if self._cadence is not None:
            every_s = self._cadence.step_ended(uploading=uploading)
            if why := self._cadence.news():
                self._link.send(CadenceMsg(why=why))
        if self._owed and self._pending is None:
            return True
        return attempt_due(
            step,
            steps=self._steps,
            every_steps=self._every_steps,
            attempted=self._attempted,
            pending=self._pending is not None,
            every_s=every_s,
            since_s=self._clock() - self._attempted_at,
        )

    def owe(self) -> None:
        """A node will leave: commit this step, and if that fails, the first that can be."""
        self._owed = True

    def begun(self, step: int) -> None:
        """All ranks begin to commit `step`."""
        if self._cadence is not None:
            self._cadence.begun()
        self._attempted = step
        self._attempted_at = self._clock()
        self._pending = step

    def answered(self) -> None:
        """The attempt under way has ended."""
        self._pending = None


def take_answer(step: int) -> Callable[[AgentNews], CommittedMsg | None]:
    """Takes the answer to the attempt at `step` out of the news."""
    return lambda news: news.answers.pop(step, None)

"""The ends of a job, and standing still: `finish` writes the outcome, `hold` waits for a contradiction to go away. PURE."""

from __future__ import annotations

from dataclasses import replace

from surefoot.controller.core import incidents
from surefoot.controller.core.decisions import StepDown, TellHeld, WriteOutcome
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.moves import Mind, Turn
from surefoot.controller.core.state import TheEnd
from surefoot.controller.wire import Outcome
from surefoot.exitcodes import ExitCode


def retry_at(d: Draft, failures: int) -> float:
    """When something that failed `failures` times in a row is tried again: doubling, bounded."""
    times = d.s.settings.times
    return d.now + min(times.store_retry_max_s, times.store_retry_s * 2 ** min(failures - 1, 16))


def resumes(step: int) -> str:
    """What to do about a job that ended, and may go on from its last committed step."""
    return f"run again: it resumes from step {step}" if step else "run again: it begins at the first step"


def finish(d: Draft, turn: Turn, code: ExitCode, reason: str, *, step: int) -> None:
    """End the job. `step` is the last committed one."""
    d.turn(turn)
    incidents.close(d)
    outcome = Outcome(
        state="done" if code is ExitCode.DONE else "failed",
        exit_code=int(code),
        step=step,
        reason=reason,
        generation=d.plan.generation if d.plan is not None else 0,
        run_id=d.s.settings.run_id,
    )
    d.report("outcome", f"{outcome.state}: {reason}")
    d.set(forming=None, inquiry=None, ending=None, held_why="", the_end=TheEnd(outcome=outcome, op=None))
    write_outcome(d)


def accept(d: Draft, outcome: Outcome) -> None:
    """The job had ended before this controller came to lead."""
    d.turn(Turn.FINISHED if outcome.state == "done" else Turn.GAVE_UP)
    d.set(forming=None, inquiry=None, the_end=TheEnd(outcome=outcome, op=None, written=True))


def write_outcome(d: Draft) -> None:
    """Ask for the outcome to be written (again: the same bytes do no harm twice)."""
    end = d.s.the_end
    assert end is not None
    op = d.op()
    d.set(the_end=replace(end, op=op, retry_s=None))
    d.decide(WriteOutcome(op=op, token=d.token, outcome=end.outcome))


def outcome_written(d: Draft) -> None:
    """etcd has it."""
    if d.s.the_end is not None:
        d.set(the_end=replace(d.s.the_end, op=None, written=True))


def outcome_failed(d: Draft) -> None:
    """It may or may not have been written: again, a little later."""
    end = d.s.the_end
    if end is not None:
        failures = end.failures + 1
        d.set(the_end=replace(end, op=None, failures=failures, retry_s=retry_at(d, failures)))


def pursue_end(d: Draft) -> None:
    """Retry the outcome where that is due."""
    end = d.s.the_end
    if end is None or end.written or end.op is not None:
        return
    if end.retry_s is None or d.now >= end.retry_s:
        write_outcome(d)


def step_down(d: Draft, reason: str) -> None:
    """A fenced write was refused: somebody else leads, or nobody. Nothing more is decided under the old token."""
    d.decide(StepDown(reason=reason))
    depose(d, reason)


def depose(d: Draft, reason: str) -> None:
    """Decide nothing until elected again."""
    d.tell(f"deposed: {reason}")
    d.report("leadership", f"stepping down: {reason}")
    d.set(token=None, inquiry=None, listings={}, listing=None)


def hold(d: Draft, why: str) -> None:
    """Refuse to act until the contradiction is gone; looked at again with each listing. Held already: `why` is news, or not."""
    d.set(next_listing_s=d.now + d.s.settings.times.held_look_s)
    if d.s.mind is not Mind.HELD:
        d.turn(Turn.CONTRADICTED)
        d.set(forming=None, inquiry=None, ending=None, held_since_s=d.now)
    if why != d.s.held_why:
        d.report("held", why)
        d.set(held_why=why)
        d.decide(TellHeld(token=d.token, reason=why))


def release(d: Draft) -> None:
    """The contradiction is gone."""
    d.turn(Turn.CLEARED_UP)
    d.set(held_why="")
    d.decide(TellHeld(token=d.token, reason=""))

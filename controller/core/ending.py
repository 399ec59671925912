"""All ranks are done: is the last step committed? PURE.

The job is DONE when every rank's train() returned at the same step and the lineage holds the checkpoint of that step: the
spec's last, or an earlier one where the data ended. Ranks that say they are done without it are a fault.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.controller.core import closing, faults, forming
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.moves import Turn
from surefoot.controller.core.settings import FINAL_LISTINGS
from surefoot.controller.core.standing import all_done, is_done
from surefoot.controller.core.state import Ending, Fault
from surefoot.exitcodes import ExitCode


def pursue(d: Draft) -> None:
    """Look for the last checkpoint once all ranks are done."""
    if not faults.watching(d) or d.plan is None or d.s.inquiry is not None:
        return
    if d.s.ending is None and not _somebody_is_done(d):
        return
    if all_done(d.nodes, d.plan) is None:
        d.set(ending=None)
        return
    ending = d.s.ending or Ending(op=None, looks=0, next_s=d.now)
    if ending.op is None and d.now >= ending.next_s:
        ending = Ending(op=d.list_lineage(), looks=ending.looks + 1, next_s=d.now)
    d.set(ending=ending)


def _somebody_is_done(d: Draft) -> bool:
    """Among those of whom there is news: the rank that is done last brings news, so nobody else need be looked at."""
    statuses = (d.nodes[uid].status for uid in d.touched)
    return any(is_done(r) for s in statuses if s is not None for r in s.ranks)


def listed(d: Draft, op: int) -> None:
    """The lineage was listed for the end."""
    ending = d.s.ending
    if ending is None or ending.op != op or d.plan is None:
        return
    done_at, committed = all_done(d.nodes, d.plan), forming.committed_step(d)
    if committed >= d.s.settings.steps:
        closing.finish(
            d, Turn.FINISHED, ExitCode.DONE, f"all {d.s.settings.steps} steps are committed", step=committed
        )
    elif done_at is not None and 0 < done_at == committed:
        closing.finish(d, Turn.FINISHED, ExitCode.DONE, f"the data ended at step {committed}", step=committed)
    elif done_at is not None and ending.looks >= FINAL_LISTINGS:
        faults.found(d, _without_a_checkpoint(done_at, committed))
    else:
        _again(d, ending)


def store_failed(d: Draft, op: int) -> None:
    """The look came to nothing; it does not count."""
    if d.s.ending is not None and d.s.ending.op == op:
        _again(d, replace(d.s.ending, looks=d.s.ending.looks - 1))


def _again(d: Draft, ending: Ending) -> None:
    next_s = d.now + d.s.settings.times.final_listing_s
    d.set(ending=replace(ending, op=None, next_s=next_s))


def _without_a_checkpoint(done_at: int, committed: int) -> Fault:
    return Fault(
        kind="ended_early",
        cause="workload",
        step=done_at,
        evidence=(f"all ranks are done at step {done_at}, the last committed step is {committed}",),
        rule="a job is done when the checkpoint of its last step is on the lineage",
        signature=f"done at step {done_at} without a checkpoint",
    )

"""What a new leader does: look, compare, and go on with what is there. PURE.

It knows nothing and believes nobody: etcd's keys are listed, and records and manifests. An intact generation is adopted as it
stands, and its ranks notice nothing. A record above the plan in force was left by a leader that did not get to publish it:
the next generation is formed, and the second listing of its own record repeats what the predecessor may have left out. A
contradiction is a loud refusal.

**Two runs on one root: the newest record wins.** A run that has formed nothing yet takes the root over from whatever run was
before; that is what resuming is. A run that has formed a generation and then reads a record of another run above its own was
taken over itself: it forms nothing more, is never done, and ends (`taken_over`, asked with every listing).
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import lineage
from surefoot.controller.core import budget, closing, forming, incidents, starting
from surefoot.controller.core.decisions import FollowWorld
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.events import Elected, PointerSeen, WorldListed
from surefoot.controller.core.moves import Mind, Turn
from surefoot.controller.core.observe import world_listed
from surefoot.controller.core.state import ComingUp, Forming, InForce, Publishing, State, TakingOver, Truth
from surefoot.controller.wire import Plan, PlanPointer, Reason
from surefoot.exitcodes import ExitCode

LOOKING = Reason(kind="resume", detail="a new leader looks")


def elected(d: Draft, event: Elected) -> None:
    """Begin afresh under the new token; only what was learned of the job's pace is kept."""
    old = d.s
    d.turn(Turn.ELECTED)
    d.nodes.clear()
    d.s = State(
        settings=old.settings,
        mind=d.s.mind,
        token=event.token,
        learned_step_s=old.learned_step_s,
        next_op=old.next_op,
        next_listing_s=d.now + old.settings.times.relist_s,
        drift=old.drift,
        story=old.story,
    )
    d.tell(f"elected, token {event.token}")
    d.decide(FollowWorld())
    d.set(forming=Forming(why=LOOKING, stage=TakingOver(op=d.list_lineage()), since_s=d.now))


def world_seen(d: Draft, event: WorldListed) -> None:
    """The keys were listed: for the first time under this token, or again."""
    stage = d.s.forming.stage if d.s.forming is not None else None
    differing = world_listed(d, event)
    if event.revision >= d.s.pointer_revision:
        d.set(pointer=event.pointer, pointer_revision=event.revision)
    if isinstance(stage, TakingOver) and not stage.world:
        d.set(stale_outcome=event.outcome)
        incidents.adopt(d, event.incidents)
        d.form(stage=replace(stage, world=True))
    elif differing:
        d.set(drift=d.s.drift + differing)
        d.report("drift", f"a relist differed from the watch in {differing} nodes ({d.s.drift} in all)")


def pointer_seen(d: Draft, event: PointerSeen) -> None:
    """The plan key changed: by our own hand, most likely."""
    if event.revision >= d.s.pointer_revision:
        d.set(pointer=event.pointer, pointer_revision=event.revision)


def listed(d: Draft) -> None:
    """Records and manifests are there."""
    stage = d.s.forming.stage if d.s.forming is not None else None
    if isinstance(stage, TakingOver):
        d.form(stage=replace(stage, listed=True), retry_s=None, failures=0)


def pursue(d: Draft) -> None:
    """Once both were seen, decide what to go on with."""
    stage = d.s.forming.stage if d.s.forming is not None else None
    if isinstance(stage, TakingOver) and stage.world and stage.listed:
        assess(d)


def assess(d: Draft) -> None:
    """Adopt, form, end, or refuse. The mind is FORMING."""
    truth = d.s.truth
    assert truth is not None
    why_not = contradiction(d, truth)
    if why_not is not None:
        closing.hold(d, why_not)
        return
    outcome = d.s.stale_outcome
    if outcome is not None and outcome.run_id in ("", d.s.settings.run_id):
        closing.accept(d, outcome)
        return
    if taken_over(d):
        return
    step = forming.committed_step(d)
    if step >= d.s.settings.steps:
        closing.finish(
            d, Turn.FINISHED, ExitCode.DONE, f"step {step} of {d.s.settings.steps} is committed", step=step
        )
        return
    _go_on(d, truth, _plan_pointed_to(d, truth))


def contradiction(d: Draft, truth: Truth) -> str | None:
    """Why nothing may be decided; None where all is well."""
    try:
        lineage(truth.records, truth.manifests, forming.ran(d))
    except LineageError as e:
        told = starting.contradiction(truth, d.s.pointer, d.nodes)
        return told if told is not None else str(e)
    return starting.contradiction(truth, d.s.pointer, d.nodes)


def taken_over(d: Draft) -> bool:
    """End if another run has taken the root over; says whether that was so."""
    assert d.s.truth is not None
    found = starting.newer_run(d.s.truth, d.s.settings.run_id)
    if found is None:
        return False
    generation, run = found
    reason = (
        f"another run, {run}, has taken over this root with generation {generation}; "
        f"only one run may train into a root"
    )
    closing.finish(d, Turn.TAKEN_OVER, ExitCode.ENVIRONMENT, reason, step=forming.committed_step(d))
    return True


def _plan_pointed_to(d: Draft, truth: Truth) -> Plan | None:
    """The plan in force, if it is of this run."""
    pointer = d.s.pointer
    plan = budget.plan_of(truth.records[pointer.generation]) if pointer is not None else None
    return plan if plan is not None and plan.run_id == d.s.settings.run_id else None


def _go_on(d: Draft, truth: Truth, plan: Plan | None) -> None:
    if plan is None:
        kind = "resume" if truth.top else "first_start"
        detail = f"run {d.s.settings.run_id} begins" + (" from what is committed" if truth.top else "")
        forming.begin(d, Reason(kind=kind, detail=detail))
        return
    d.set(in_force=InForce(plan=plan, since_s=d.now), progress_s=d.now)
    if truth.top > plan.generation:
        forming.begin(d, superseded(d, truth))
        return
    d.tell(f"adopting generation {plan.generation}")
    d.report("takeover", f"generation {plan.generation} is in force and is left as it is")
    d.set(forming=Forming(why=plan.reason, stage=ComingUp(), since_s=d.now))
    d.touched.update(d.nodes)


def superseded(d: Draft, truth: Truth) -> Reason:
    """Why the next generation is formed where a record stands above the plan in force: that record has charged the cause."""
    left = budget.plan_of(truth.records[truth.top])
    generation = d.plan.generation if d.plan is not None else 0
    return Reason(
        kind="burnt",
        cause="none",
        fault=left.reason.fault if left is not None else "",
        incident=left.reason.incident if left is not None else "",
        detail=f"record {truth.top} stood above the plan in force ({generation})",
    )


def pointer_astray(d: Draft) -> bool:
    """Does ``plan`` name another generation than the one this leader has in force?"""
    if d.s.mind not in (Mind.RUNNING, Mind.HOLD_COMMITS) or d.plan is None:
        return False
    return d.s.pointer is None or d.s.pointer.generation != d.plan.generation


def publishing(d: Draft, pointer: PlanPointer) -> bool:
    """Is this our own plan, on its way?"""
    stage = d.s.forming.stage if d.s.forming is not None else None
    return isinstance(stage, Publishing) and stage.pointer == pointer


def look_again(d: Draft) -> None:
    """What etcd says and what this leader believes differ: look at everything again."""
    d.turn(Turn.SUPERSEDED)
    d.report("takeover", "the plan key is not what this leader has in force: looking again")
    d.set(
        in_force=None,
        inquiry=None,
        ending=None,
        forming=Forming(why=LOOKING, stage=TakingOver(op=d.list_lineage(), world=True), since_s=d.now),
    )

"""From a suspicion to the answer: ask the members, diagnose, charge the budget, form the next generation. PURE.

Nothing is concluded from a suspicion alone. An `Inquiry` asks members directly and ends with `policy.diagnose`. One about a
node's silence asks that node only; what stops the whole generation (`state.HARD`) asks all members, whose fresh statuses
also tell which snapshots there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import lineage
from surefoot.controller.core import budget, closing, detectors, forming, incidents, policy, starting
from surefoot.controller.core.decisions import ProbeNodes, ProbeTarget, SetAside
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.moves import Mind, Turn
from surefoot.controller.core.standing import is_going
from surefoot.controller.core.state import (
    HARD,
    ComingUp,
    Fault,
    Forming,
    Inquiry,
    KnownNode,
    Reviewing,
    StepKey,
    Suspicion,
    SuspicionKind,
)
from surefoot.controller.wire import DamagedStep, Reason
from surefoot.exitcodes import ExitCode

DETECTOR_OF: dict[SuspicionKind, str] = {
    SuspicionKind.EXIT: "exit",
    SuspicionKind.START_FAILURE: "exit",
    SuspicionKind.VANISHED: "node_loss",
    SuspicionKind.REBORN: "node_loss",
    SuspicionKind.QUIET: "node_loss",
    SuspicionKind.NO_PROGRESS: "hang",
    SuspicionKind.NOT_READY: "hang",
    SuspicionKind.ENDED_EARLY: "exit",
    SuspicionKind.LEAVING: "node_loss",
    SuspicionKind.STOPPED: "exit",
}
"""The spec's name (``detect.observe``) of the detector that raises each kind."""


def watching(d: Draft) -> bool:
    """Is there a generation in force to look after?"""
    if d.s.in_force is None:
        return False
    return d.s.mind in (Mind.RUNNING, Mind.HOLD_COMMITS) or (
        d.s.forming is not None and isinstance(d.s.forming.stage, ComingUp)
    )


# ---------------------------------------------------------------- suspicion


def suspect(d: Draft) -> None:
    """Run the detectors over what changed, all of them when time went by; open or widen the inquiry."""
    found = _observe_only(d, _detect(d))
    known = set(d.s.inquiry.suspicions) if d.s.inquiry is not None else set[Suspicion]()
    new = tuple(s for s in found if s not in known)
    if not new:
        return
    for s in new:
        d.tell(f"suspicion: {s.uid} rank {s.rank} {s.kind.value}: {s.detail}")
    inquiry = d.s.inquiry or Inquiry(opened_s=d.now, suspicions=())
    if not inquiry.hard and any(s.kind in HARD for s in new):
        # What was asked about one silent node is no fresh status for a fault that strikes all.
        inquiry = replace(inquiry, opened_s=d.now, asked={})
    d.set(inquiry=replace(inquiry, suspicions=(*inquiry.suspicions, *new)))


def _detect(d: Draft) -> list[Suspicion]:
    assert d.s.in_force is not None
    plan, settings, since_s = d.s.in_force.plan, d.s.settings, d.s.in_force.since_s
    touched = [d.nodes[uid] for uid in sorted(d.touched) if plan.member(uid) is not None]
    found = detectors.detect_exits(plan, touched)
    if d.ticked or any(_may_be_gone(d, n) for n in touched):
        found += detectors.detect_lost_nodes(plan, d.nodes, settings, d.now, since_s=since_s)
    if d.ticked:
        found += detectors.detect_hang(
            plan, d.nodes, settings, d.now, progress_s=d.s.progress_s, learned_s=d.s.learned_step_s
        )
        found += detectors.detect_not_ready(plan, d.nodes, settings, d.now, progress_s=d.s.progress_s)
        found += detectors.detect_early_end(plan, d.nodes, settings, d.now, skew_s=settings.times.end_skew_s)
    return found


def _may_be_gone(d: Draft, node: KnownNode) -> bool:
    return not node.registered or node.incarnation != _meant(d, node.uid) or is_going(node)


def _meant(d: Draft, uid: str) -> str:
    member = d.plan.member(uid) if d.plan is not None else None
    return member.incarnation if member is not None else ""


def _observe_only(d: Draft, found: Iterable[Suspicion]) -> list[Suspicion]:
    """Leave out what detectors in observe-only mode saw; it is reported once per generation."""
    kept: list[Suspicion] = []
    for s in found:
        detector = DETECTOR_OF[s.kind]
        if detector not in d.s.settings.observe:
            kept.append(s)
        elif detector not in d.s.reported:
            d.set(reported=d.s.reported | {detector})
            d.report("observed", f"{detector} (only observed): {s.uid} {s.kind.value}: {s.detail}")
    return kept


# ---------------------------------------------------------------- inquiry


def pursue(d: Draft) -> None:
    """Ask whom has to be asked, and conclude when it can be."""
    inquiry = d.s.inquiry
    if inquiry is None:
        return
    assert d.s.in_force is not None
    if not inquiry.hard:
        ask(d, [s.uid for s in inquiry.suspicions if s.uid not in inquiry.asked])
    verdict = policy.diagnose(_situation(d))
    match verdict:
        case policy.StillAsking():
            return
        case policy.Undecided():
            if d.now >= verdict.not_before_s:
                ask(d, verdict.ask, settled=verdict.settled)
        case policy.Healthy():
            d.report("inquiry", f"no fault: {verdict.why}")
            d.set(inquiry=None)
        case Fault():
            found(d, verdict)


def _situation(d: Draft) -> policy.Situation:
    assert d.s.in_force is not None
    assert d.s.inquiry is not None
    return policy.Situation(
        settings=d.s.settings,
        in_force=d.s.in_force,
        nodes=d.nodes,
        inquiry=d.s.inquiry,
        progress_s=d.s.progress_s,
        learned_step_s=d.s.learned_step_s,
        now_s=d.now,
    )


def ask(d: Draft, uids: Iterable[str], *, settled: bool = False) -> None:
    """Probe these nodes; those whose address is not known cannot be asked."""
    assert d.s.inquiry is not None
    targets: list[ProbeTarget] = []
    for uid in dict.fromkeys(uids):
        node = d.nodes.get(uid)
        if node is not None and node.info is not None:
            d.put(replace(node, asked_s=d.now))
            info = node.info
            targets.append(
                ProbeTarget(uid=uid, incarnation=info.incarnation, host=info.host, port=info.control_port)
            )
    settled = settled or d.s.inquiry.settled
    if not targets:
        d.set(inquiry=replace(d.s.inquiry, settled=settled))
        return
    op = d.op()
    asked = {**d.s.inquiry.asked, **{t.uid: op for t in targets}}
    d.set(inquiry=replace(d.s.inquiry, asked=asked, settled=settled))
    d.decide(ProbeNodes(op=op, targets=tuple(targets), deadline_s=d.s.settings.times.probe_deadline_s))


# ---------------------------------------------------------------- fault


def found(d: Draft, fault: Fault) -> None:
    """A fault is diagnosed: note it, and answer it."""
    assert d.plan is not None
    opened_s = d.s.inquiry.opened_s if d.s.inquiry is not None else d.now
    d.tell(f"fault: {fault.kind} {fault.node} {fault.evidence[:1]}")
    d.turn(Turn.FAULT_FOUND)
    for uid, why in fault.lost.items():
        if uid in d.nodes and d.nodes[uid].incarnation == _meant(d, uid):
            d.put(replace(d.nodes[uid], lost=why))
    if fault.start_at_fault:
        _blame_start(d, fault)
    if fault.damaged is not None:
        _note_damage(d, fault.damaged)
    forming_ = Forming(why=_why(d, fault), stage=Reviewing(op=-1, fault=fault), since_s=opened_s)
    d.set(inquiry=None, ending=None, forming=forming_)
    verdict = _budget(d, fault)
    left = _left(verdict)
    incidents.open_incident(d, fault, opened_s=opened_s, budget_left=left)
    answer(d, fault)


def _blame_start(d: Draft, fault: Fault) -> None:
    assert d.plan is not None
    key = starting.start_key(d.plan.start)
    times = d.s.failed_starts.get(key, 0) + (starting.START_TRIES if fault.start_is_gone else 1)
    d.set(failed_starts={**d.s.failed_starts, key: times})


def _note_damage(d: Draft, damaged: DamagedStep) -> None:
    at = (damaged.generation, damaged.step)
    if at not in d.s.damaged:
        d.set(damaged={**d.s.damaged, at: damaged.detail})
        set_aside(d, at)


def set_aside(d: Draft, at: StepKey) -> None:
    """Have the flag raised beside a step that is known to be damaged."""
    d.decide(SetAside(token=d.token, generation=at[0], step=at[1], reason=d.s.damaged[at]))


def _why(d: Draft, fault: Fault) -> Reason:
    assert d.plan is not None
    detail = fault.evidence[0] if fault.evidence else fault.rule
    if fault.kind == "step_damaged" and fault.damaged is not None:
        # What is wrong with it is told with the choice of another one.
        detail = f"step {fault.damaged.step} of generation {fault.damaged.generation} turned out damaged"
    return Reason(
        kind="start_failed" if fault.start_at_fault or fault.kind == "start_failed" else "restart",
        cause=fault.cause,
        fault=fault.kind,
        incident=incidents.incident_id(d.plan.generation),
        detail=detail,
        signature=fault.signature,
    )


def _budget(d: Draft, fault: Fault) -> budget.BudgetVerdict:
    truth = d.s.truth
    assert truth is not None
    try:
        committed = lineage(truth.records, truth.manifests, forming.ran(d))
    except LineageError:
        committed = []  # choosing a starting point will say so, and hold
    account = budget.spent(truth.records, committed, d.s.settings.run_id)
    return budget.judge(
        d.s.settings, account, cause=fault.cause, signature=fault.signature, permanent=fault.permanent
    )


def _left(verdict: budget.BudgetVerdict) -> int | None:
    """What the cause has left; None where the budget is not what decided."""
    match verdict:
        case budget.Allowed():
            return verdict.left
        case budget.Exhausted():
            return 0
        case budget.CrashLoop() | budget.Hopeless():
            return None


def answer(d: Draft, fault: Fault) -> None:
    """Form the next generation if the budget allows; give up only after a fresh look at what was committed."""
    assert d.s.forming is not None
    assert d.s.truth is not None
    verdict = _budget(d, fault)
    if isinstance(verdict, budget.Allowed):
        forming.begin(d, d.s.forming.why)
    elif d.s.truth.listed_s < d.s.forming.since_s:
        d.stage(Reviewing(op=d.list_lineage(), fault=fault))
    else:
        reason = f"{fault.kind} at step {fault.step}: {fault.evidence[0] if fault.evidence else fault.rule}; {verdict.detail}"
        incidents.decided(d, f"given up: {verdict.detail}", budget_left=_left(verdict))
        closing.finish(d, Turn.GAVE_UP, ExitCode.DO_NOT_REQUEUE, reason, step=forming.committed_step(d))

"""Forming a generation, to the letter of the design's third idea. PURE.

1. Members and starting point are chosen (placement.py, policy.py).
2. Record 1 + the highest is created. *Taken*: everything is listed again, and the next number is tried. *Unknown*: the same
   record is created again until the number is settled.
3. The manifests are listed **again**. If one lies on the lineage beyond the starting point that this record does not leave
   behind on purpose (a rollback: it is set aside, or fails to load), or on one that does not go through it (another run's
   generation has shown that it ran), the number is burnt: no plan ever uses it, and the next record names what was found. So it is where a record above it appeared, or a member was lost
   meanwhile.
4. The plan is published by a transaction on the leader's key. *Refused*: this controller leads no longer. *Unknown*: the key
   is read back, and published again if it is not there.
5. The generation comes up, or a fault is found in it (faults.py).

The cause of a fault is charged to the first record made for it; those that replace a burnt one charge nobody.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import Record, StartRef, lineage, record_key
from surefoot.controller.core import budget, closing, incidents, starting
from surefoot.controller.core.decisions import CreateRecord, PublishPlan, ReadPlan
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.events import (
    CoordStoreUnavailable,
    ObjectStoreDenied,
    ObjectStoreUnavailable,
    PlanPublished,
    PlanRead,
    PlanRefused,
    PlanUnknown,
    RecordCreated,
    RecordTaken,
    RecordUnknown,
)
from surefoot.controller.core.moves import Turn
from surefoot.controller.core.placement import Placement, Shortage, place
from surefoot.controller.core.standing import all_begun, following
from surefoot.controller.core.state import (
    AwaitingNodes,
    CheckingRecord,
    Choosing,
    ComingUp,
    Consulting,
    Forming,
    InForce,
    Publishing,
    Reviewing,
    TakingOver,
    Truth,
    WritingRecord,
)
from surefoot.controller.wire import Plan, PlanPointer, Reason
from surefoot.exitcodes import ExitCode


def begin(d: Draft, why: Reason) -> None:
    """A generation is needed. The mind is FORMING already."""
    d.tell(f"forming: {why.kind} {why.fault}")
    forming = Forming(why=why, stage=Choosing(), since_s=d.now)
    d.set(forming=forming, inquiry=None, ending=None)
    choose(d)


def ran(d: Draft) -> int:
    """The newest generation known to have been in force."""
    assert d.s.truth is not None
    return starting.newest_that_ran(d.s.truth, d.s.pointer, d.nodes)


def committed_step(d: Draft) -> int:
    """The last step on the lineage that is not set aside, as last listed; 0 where there is none, or where the records contradict
    each other."""
    if d.s.truth is None:
        return 0
    aside = starting.set_aside(d.s)
    try:
        found = lineage(d.s.truth.records, d.s.truth.manifests, ran(d))
    except LineageError:
        return 0
    return max((m.step for m in found if (m.generation, m.step) not in aside), default=0)


# ---------------------------------------------------------------- choosing


def choose(d: Draft) -> None:
    """Choose members and starting point, and go as far as can be gone at once."""
    truth = d.s.truth
    assert truth is not None
    if committed_step(d) >= d.s.settings.steps:
        _all_committed(d, truth)
        return
    if (plan := _still_running(d, truth)) is not None:
        _publish(d, plan, _pointer(truth, plan.generation))
        return
    placed = place(d.s.settings, d.nodes, _former(d, truth))
    if isinstance(placed, Shortage):
        _short_of_nodes(d, truth, placed)
        return
    if _standby_is_coming(d, placed):
        d.stage(AwaitingNodes(since_s=d.now, found=len(d.nodes), detail="waiting for the standby"))
        return
    try:
        start = starting.choose_start(
            d.s.settings,
            placed.members,
            d.nodes,
            truth,
            ran=ran(d),
            failed=d.s.failed_starts,
            avoided=starting.passed_over(d.s),
        )
    except LineageError as e:
        closing.hold(d, str(e))
        return
    _with_start(d, truth, placed, start)


def _all_committed(d: Draft, truth: Truth) -> None:
    """Nothing is left to do; but nobody is done on an old listing, for another run may have taken the root over since."""
    assert d.s.forming is not None
    if truth.listed_s < d.s.forming.since_s:
        d.stage(Consulting(op=d.list_lineage()))
    else:
        closing.finish(d, Turn.FINISHED, ExitCode.DONE, "all steps are committed", step=committed_step(d))


def _with_start(d: Draft, truth: Truth, placed: Placement, start: starting.Start | starting.NoStart) -> None:
    assert d.s.forming is not None
    stale = truth.listed_s < d.s.forming.since_s
    if stale and (isinstance(start, starting.NoStart) or start.point.tier != "memory" or _commits_unseen(d)):
        d.stage(Consulting(op=d.list_lineage()))
    elif isinstance(start, starting.NoStart):
        # Another attempt would read the same objects.
        closing.finish(d, Turn.GAVE_UP, ExitCode.DO_NOT_REQUEUE, start.detail, step=committed_step(d))
    else:
        _write(d, truth, placed, start)


def _commits_unseen(d: Draft) -> bool:
    """An agent tells of a commit that the last listing did not show: rather list now than burn a number."""
    assert d.s.truth is not None
    known = {(m.generation, m.step) for m in d.s.truth.manifests}
    told = (n.status.committed for n in d.nodes.values() if n.status is not None)
    return any(
        c is not None and not c.failure and c.step and (c.generation, c.step) not in known for c in told
    )


def _former(d: Draft, truth: Truth) -> Plan | None:
    """The plan whose members keep their places: that in force, or (etcd was wiped) the newest one of this run."""
    if d.plan is not None:
        return d.plan
    plan = budget.plan_of(truth.records[truth.top]) if truth.top else None
    return plan if plan is not None and plan.run_id == d.s.settings.run_id else None


def _still_running(d: Draft, truth: Truth) -> Plan | None:
    """etcd has forgotten the plan, and all of its members follow it still: it only needs to be pointed to again."""
    if d.s.pointer is not None or d.s.in_force is not None or not truth.top:
        return None
    plan = _former(d, truth)
    if plan is None or plan.generation != truth.top:
        return None
    return plan if all(following(d.nodes.get(m.uid), plan) for m in plan.members) else None


def _pointer(truth: Truth, generation: int) -> PlanPointer:
    return PlanPointer(generation=generation, hash=truth.hashes[generation], location=record_key(generation))


# ---------------------------------------------------------------- waiting for nodes


def _short_of_nodes(d: Draft, truth: Truth, shortage: Shortage) -> None:
    """Wait for nodes; but first look whether there is anything left to do (the last step may be committed by now)."""
    assert d.s.forming is not None
    if truth.listed_s < d.s.forming.since_s:
        d.stage(Consulting(op=d.list_lineage()))
    else:
        _await_nodes(d, shortage)


def _standby_is_coming(d: Draft, placed: Placement) -> bool:
    """A single node's copies need a standby, and a plan's peers are for good: at the beginning it is waited for a little."""
    assert d.s.forming is not None
    beginning = d.s.forming.why.kind in ("first_start", "resume")
    wanted = beginning and d.s.settings.standbys > 0 and not placed.peers
    return wanted and d.now - d.s.forming.since_s < d.s.settings.times.standby_s


def _await_nodes(d: Draft, shortage: Shortage) -> None:
    assert d.s.forming is not None
    stage = d.s.forming.stage
    there = shortage.found + len(shortage.coming)
    if isinstance(stage, AwaitingNodes):
        better = there > stage.found
        since_s = d.now if better else stage.since_s
    else:
        d.report("waiting", f"waiting for nodes: {shortage.detail}")
        since_s = d.now
    d.stage(AwaitingNodes(since_s=since_s, found=there, detail=shortage.detail))
    patience_s = d.s.settings.wait_for_node_s
    if there >= shortage.wanted:  # nodes enough, which are not ready yet
        patience_s = max(patience_s, d.s.settings.times.ready_s)
    if d.now - since_s >= patience_s:
        _give_up_waiting(d, shortage, patience_s)


def _give_up_waiting(d: Draft, shortage: Shortage, patience_s: float) -> None:
    standbys = f"no standby is left (layout.standbys = {d.s.settings.standbys})"
    lost = f"node{'s' * (len(shortage.lost) > 1)} {', '.join(shortage.lost)} lost, and {standbys}"
    reason = (
        f"{lost if shortage.lost else 'not enough nodes'}: {shortage.detail}, and that did not get better for"
        f" {patience_s:g} s (policy.wait_for_node_s); {closing.resumes(committed_step(d))}"
    )
    code = ExitCode.FAILED if shortage.lost else ExitCode.ENVIRONMENT
    closing.finish(d, Turn.GAVE_UP, code, reason, step=committed_step(d))


# ---------------------------------------------------------------- the record


def _write(d: Draft, truth: Truth, placed: Placement, start: starting.Start) -> None:
    plan = _plan(d, truth.top + 1, placed, start)
    record = Record(
        generation=plan.generation,
        start=StartRef(generation=start.point.generation, step=start.point.step),
        rollback=start.rollback,
        reason=" ".join(filter(None, (plan.reason.kind, plan.reason.fault, plan.reason.detail))),
        created_by=f"{d.s.settings.controller}@{d.s.token}",
        plan=msgspec.to_builtins(plan),
    )
    op = d.op()
    d.tell(f"record {plan.generation} from ({start.point.generation}, {start.point.step})")
    d.stage(WritingRecord(op=op, record=record, plan=plan))
    d.decide(CreateRecord(op=op, record=record))


def _plan(d: Draft, generation: int, placed: Placement, start: starting.Start) -> Plan:
    settings = d.s.settings
    assert d.s.forming is not None
    why = d.s.forming.why
    if why.kind == "restart" and placed.replaced:
        why = msgspec.structs.replace(why, kind="replace")
    if start.passed_over:
        why = msgspec.structs.replace(why, detail="; ".join(filter(None, (why.detail, *start.passed_over))))
    before, truth = d.s.in_force, d.s.truth
    assert truth is not None
    return Plan(
        job=settings.job,
        run_id=settings.run_id,
        generation=generation,
        members=placed.members,
        world_size=settings.world_size,
        mesh=dict(settings.mesh),
        start=start.point,
        sources=start.sources,
        peers=placed.peers,
        reason=why,
        conditional=not truth.lacks,
        faults=budget.interruptions(truth.records, settings.run_id) + (why.cause != "none"),
        ran_s=before.plan.ran_s + d.now - before.since_s if before is not None else 0.0,
        spec_hash=settings.spec_hash,
        code_version=settings.code_version,
        controller=settings.controller,
    )


def record_created(d: Draft, event: RecordCreated) -> None:
    """The number is ours: list the manifests again before anything is published."""
    stage, truth = _stage(d), d.s.truth
    if not isinstance(stage, WritingRecord) or stage.op != event.op:
        return
    assert truth is not None
    record = stage.record
    d.set(
        truth=replace(
            truth,
            records={**truth.records, record.generation: record},
            hashes={**truth.hashes, record.generation: event.hash},
        ),
    )
    pointer = PlanPointer(generation=event.generation, hash=event.hash, location=event.location)
    d.stage(CheckingRecord(op=d.list_lineage(), record=record, plan=stage.plan, pointer=pointer))


def record_taken(d: Draft, event: RecordTaken) -> None:
    """Somebody else formed that generation: look again. Of this run: go on above it; of another: this run was taken over,
    unless it has formed nothing yet, and takes over itself."""
    stage = _stage(d)
    if isinstance(stage, WritingRecord) and stage.op == event.op:
        d.report("record", f"record {event.generation} was taken by somebody else")
        d.stage(Consulting(op=d.list_lineage()))


def record_unknown(d: Draft, event: RecordUnknown) -> None:
    """It may exist: this very record must be settled before another number is tried."""
    stage = _stage(d)
    if isinstance(stage, WritingRecord) and stage.op == event.op:
        d.form(stage=replace(stage, unknown=True))
        _again_later(d)


# ---------------------------------------------------------------- the second listing, and the plan


def checked(d: Draft, stage: CheckingRecord) -> None:
    """The manifests were listed after the record was created: is the number good?"""
    because = _why_burnt(d, stage)
    if because is None:
        _publish(d, stage.plan, stage.pointer)
        return
    assert d.s.forming is not None
    why = d.s.forming.why
    d.report("burnt", f"record {stage.record.generation} is burnt: {because}")
    detail = f"record {stage.record.generation} is burnt: {because}"
    begin(d, msgspec.structs.replace(why, kind="burnt", cause="none", signature="", detail=detail))


def _why_burnt(d: Draft, stage: CheckingRecord) -> str | None:
    truth, record = d.s.truth, stage.record
    assert truth is not None
    if truth.top > record.generation:
        return f"record {truth.top} appeared above it"
    avoided = starting.passed_over(d.s) if record.rollback else {}
    left = starting.left_behind(truth, record.start, ran=ran(d), avoided=avoided)
    if left is not None:
        return left
    return _why_not_viable(d, stage.plan)


def _why_not_viable(d: Draft, plan: Plan) -> str | None:
    start = (plan.start.generation, plan.start.step)
    if plan.start.tier == "object_store" and (why := starting.passed_over(d.s).get(start)) is not None:
        return f"its starting point is {why}"
    for member in plan.members:
        node = d.nodes.get(member.uid)
        if node is None or node.lost or not node.registered or node.incarnation != member.incarnation:
            return f"its member {member.uid} was lost meanwhile"
    for source in plan.sources:
        node = d.nodes.get(source.uid)
        if node is None or node.lost or not node.registered:
            return f"{source.uid}, which holds the snapshot of rank {source.rank}, was lost meanwhile"
    return None


def _publish(d: Draft, plan: Plan, pointer: PlanPointer) -> None:
    op = d.op()
    d.stage(Publishing(op=op, plan=plan, pointer=pointer))
    d.decide(PublishPlan(op=op, token=d.token, pointer=pointer))


def plan_published(d: Draft, event: PlanPublished) -> None:
    """The generation is in force; its ranks are to come up."""
    stage = _stage(d)
    if isinstance(stage, Publishing) and stage.op == event.op:
        _in_force(d, stage, event.revision)


def _in_force(d: Draft, stage: Publishing, revision: int) -> None:
    d.tell(f"plan {stage.plan.generation} is in force")
    d.stage(ComingUp())
    d.set(
        pointer=stage.pointer,
        pointer_revision=max(revision, d.s.pointer_revision),
        in_force=InForce(plan=stage.plan, since_s=d.now),
        progress_s=d.now,
        reported=frozenset[str](),
        next_listing_s=d.now + d.s.settings.times.relist_s,
    )
    d.touched.update(m.uid for m in stage.plan.members)
    incidents.planned(d, stage.plan)


def plan_refused(d: Draft, event: PlanRefused) -> None:
    """The leader key is not ours any more."""
    stage = _stage(d)
    if isinstance(stage, Publishing) and stage.op == event.op:
        closing.step_down(
            d, f"publishing generation {event.generation} was refused: the leader key is not ours"
        )


def plan_unknown(d: Draft, event: PlanUnknown) -> None:
    """Read the key back."""
    stage = _stage(d)
    if isinstance(stage, Publishing) and stage.op == event.op:
        op = d.op()
        d.form(stage=replace(stage, op=op, reading=True))
        d.decide(ReadPlan(op=op))


def plan_read(d: Draft, event: PlanRead) -> None:
    """Published after all, or to be published (again: the same bytes under the same condition do no harm twice)."""
    stage = _stage(d)
    if not isinstance(stage, Publishing) or stage.op != event.op:
        return
    if event.pointer == stage.pointer:
        _in_force(d, stage, event.revision)
    else:
        _publish(d, stage.plan, stage.pointer)


# ---------------------------------------------------------------- stores that fail, and time


def store_failed(d: Draft, event: ObjectStoreUnavailable | ObjectStoreDenied | CoordStoreUnavailable) -> None:
    """The operation of a stage failed and nothing was done: again later, or the end where nothing runs yet."""
    stage = _stage(d)
    if getattr(stage, "op", None) != event.op:
        return
    nothing_runs = d.s.in_force is None and d.s.pointer is None
    assert d.s.forming is not None
    waited_s = d.now - d.s.forming.since_s
    denied = isinstance(event, ObjectStoreDenied)
    patient = isinstance(event, CoordStoreUnavailable) or waited_s < d.s.settings.times.store_patience_s
    if nothing_runs and (denied or not patient):
        closing.finish(d, Turn.GAVE_UP, ExitCode.ENVIRONMENT, event.detail, step=0)
        return
    if not d.s.forming.failures:
        d.report("store", f"forming waits: {event.detail}")
    _again_later(d)


def _again_later(d: Draft) -> None:
    assert d.s.forming is not None
    failures = d.s.forming.failures + 1
    d.form(failures=failures, retry_s=closing.retry_at(d, failures))


def pursue(d: Draft) -> None:
    """What time and new nodes allow."""
    forming = d.s.forming
    if forming is None:
        return
    if isinstance(forming.stage, AwaitingNodes) and (d.ticked or d.touched):
        choose(d)
    elif isinstance(forming.stage, ComingUp):
        _came_up(d)
    elif forming.retry_s is not None and d.now >= forming.retry_s:
        _retry(d, forming)


def _retry(d: Draft, forming: Forming) -> None:
    """Ask again for what failed; the count of failures goes on until something succeeds."""
    stage = forming.stage
    match stage:
        case WritingRecord(unknown=True):
            op = d.op()
            d.decide(CreateRecord(op=op, record=stage.record))
            d.form(stage=replace(stage, op=op), retry_s=None)
        case WritingRecord():
            d.stage(Choosing())  # nothing was created, and the world may have changed since
            choose(d)
            if d.s.forming is not None:
                d.form(failures=forming.failures)
        case Publishing():
            _publish(d, stage.plan, stage.pointer)
            d.form(failures=forming.failures)
        case TakingOver() | Reviewing() | Consulting() | CheckingRecord():
            d.form(stage=replace(stage, op=d.list_lineage()), retry_s=None)
        case Choosing():
            choose(d)
        case AwaitingNodes() | ComingUp():
            d.form(retry_s=None)


def _came_up(d: Draft) -> None:
    assert d.plan is not None
    if d.s.inquiry is None and all_begun(d.nodes, d.plan):
        d.tell(f"generation {d.plan.generation} came up")
        d.turn(Turn.CAME_UP)
        d.set(
            forming=None,
            failed_starts={},
            next_listing_s=d.now + d.s.settings.times.relist_s,
        )


def _stage(d: Draft) -> object:
    return d.s.forming.stage if d.s.forming is not None else None

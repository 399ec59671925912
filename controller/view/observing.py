"""From what is listed to the snapshot: `observe`. PURE.

With etcd gone (``keys=None``) it shows what the object store proves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import ManifestRef, Record, lineage
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.view.types import (
    CommitView,
    GenerationView,
    JobFacts,
    JobPhase,
    JobView,
    LossPoint,
    NodeView,
    RankView,
)
from surefoot.controller.view.values import outcome_of, plans_of, value_of, values_under
from surefoot.controller.view.words import events_of, now_text

LOSSES_MAX = 2000
"""How many points of the loss curve a view carries along."""


def observe(
    facts: JobFacts,
    *,
    keys: Mapping[str, bytes] | None,
    records: Mapping[int, Record],
    manifests: Sequence[ManifestRef],
    previous: JobView | None = None,
    incidents: Sequence[wire.Incident] = (),
    run_id: str | None = None,
) -> JobView:
    """Put one snapshot together.

    Args:
        facts: of the JobSpec.
        keys: everything under the job's prefix in etcd, key to value; None if etcd cannot be asked.
        records: by generation, as far as they can be read.
        manifests: all that exist, in any order; those off the lineage are left out here.
        previous: an earlier snapshot, whose loss curve is carried on.
        incidents: those of the journal; etcd's, which are newer, win.
        run_id: the outcome of any other run is left out; None: whatever stands there.
    """
    layout = Keys(facts.name)
    held = keys or {}
    pointer = value_of(wire.PlanPointer, held.get(layout.plan))
    outcome = outcome_of(held.get(layout.outcome), run_id)
    hold = value_of(wire.Held, held.get(layout.held))
    infos = values_under(wire.NodeInfo, held, layout.nodes)
    statuses = values_under(wire.NodeStatus, held, layout.statuses)
    told = {i.id: i for i in incidents} | {
        i.id: i for i in values_under(wire.Incident, held, layout.incidents).values()
    }
    plans = plans_of(records)
    generation = _generation_in_force(pointer, outcome, records, blind=keys is None)
    plan = plans.get(generation)
    committed, damage = _committed(records, manifests)
    leader = held.get(layout.leader)
    known_incidents = tuple(sorted(told.values(), key=lambda i: (i.generation, i.id)))
    nodes = _nodes(plan, infos, statuses) if keys is not None else ()
    ranks = [rank for node in nodes if node.generation == generation for rank in node.ranks]
    step = _newest_step(plan, ranks, outcome, committed)
    complete = bool(committed) and committed[-1].step == facts.steps
    phase = _phase(keys is None, complete, hold, pointer, outcome, max(records, default=0), plan, nodes)
    losses = _losses(previous, ranks)
    step_s = [rank.step_s for rank in ranks if rank.step_s]
    generations = tuple(_generation(g, plans.get(g), records[g]) for g in sorted(records))
    return JobView(
        job=facts.name,
        root=facts.root,
        phase=phase,
        now=(damage if phase != "held" else "")  # what the leader holds for says it better
        or now_text(
            facts, phase, hold, plan, nodes, leader is not None, known_incidents, outcome, generations
        ),
        leader=leader.decode(errors="replace") if leader is not None else None,
        generation=generation,
        reason=next((g.reason for g in generations if g.generation == generation), ""),
        step=step,
        steps=facts.steps,
        loss=losses[-1].loss if losses else None,
        steps_per_s=1 / max(step_s) if step_s and phase == "running" else None,
        committed=committed[-1] if committed else None,
        nodes=nodes,
        generations=generations,
        incidents=known_incidents,
        events=events_of(generations, committed, known_incidents, outcome),
        losses=losses,
        outcome=outcome,
    )


def _generation_in_force(
    pointer: wire.PlanPointer | None,
    outcome: wire.Outcome | None,
    records: Mapping[int, Record],
    *,
    blind: bool,
) -> int:
    if pointer is not None:
        return pointer.generation
    # A root that was complete already gets its outcome without a plan.
    return max(records, default=0) if blind or outcome is not None else 0


def restored_from(plan: wire.Plan) -> Literal["nothing", "memory", "peer", "object_store"]:
    """Where a plan's ranks got their state: ``peer`` if any rank's snapshot had to come from another node."""
    if plan.start.tier != "memory":
        return plan.start.tier
    home = {m.first_rank + i: m.uid for m in plan.members for i in range(m.ranks)}
    return "peer" if any(home.get(source.rank) != source.uid for source in plan.sources) else "memory"


def _committed(
    records: Mapping[int, Record], manifests: Sequence[ManifestRef]
) -> tuple[list[CommitView], str]:
    """The lineage, ascending; and what is wrong with the records where they contradict each other."""
    try:
        return [CommitView(generation=m.generation, step=m.step) for m in lineage(records, manifests)], ""
    except LineageError as e:
        return [], str(e)


def _generation(number: int, plan: wire.Plan | None, record: Record) -> GenerationView:
    if plan is None:
        return GenerationView(
            generation=number,
            kind="alone",
            members=(),
            start_generation=record.start.generation,
            start_step=record.start.step,
            restored_from="object_store" if record.start.generation else "nothing",
            reason=record.reason,
        )
    return GenerationView(
        generation=number,
        kind=plan.reason.kind,
        members=tuple(m.uid for m in plan.members),
        start_generation=plan.start.generation,
        start_step=plan.start.step,
        restored_from=restored_from(plan),
        reason=plan.reason.detail or plan.reason.fault or plan.reason.kind.replace("_", " "),
        incident=plan.reason.incident,
    )


def _nodes(
    plan: wire.Plan | None, infos: Mapping[str, wire.NodeInfo], statuses: Mapping[str, wire.NodeStatus]
) -> tuple[NodeView, ...]:
    members = {m.uid: m for m in plan.members} if plan else {}
    views: list[NodeView] = []
    for uid in sorted({*members, *infos, *statuses}, key=_natural):
        info, status, member = infos.get(uid), statuses.get(uid), members.get(uid)
        present = info is not None or status is not None
        views.append(
            NodeView(
                uid=uid,
                role=_role(plan, member, status, present),
                state=status.state if status else "warming" if info else "gone",
                generation=status.generation if status else 0,
                pid=info.pid if info else None,
                ranks=tuple(_rank(r) for r in sorted(status.ranks, key=lambda r: r.rank)) if status else (),
                snapshot_step=_complete_step(status) if status else None,
                copies_step=max((s.step for s in status.snapshots if s.replica), default=None)
                if status
                else None,
                note=status.note if status else "",
            )
        )
    return tuple(views)


def _role(
    plan: wire.Plan | None, member: wire.Member | None, status: wire.NodeStatus | None, present: bool
) -> Literal["member", "standby", "lost", "free"]:
    if plan is None:
        return "free"
    if member is None:
        # Left out of the plan and still telling of ranks of an older one: its agent is dead, only its lease lives on.
        stale = status is not None and status.ranks and status.generation < plan.generation
        return "lost" if stale else "standby"
    return "member" if present else "lost"


def _natural(uid: str) -> tuple[str, int]:
    """n2 before n10."""
    digits = uid[len(uid.rstrip("0123456789")) :]
    return uid.removesuffix(digits), int(digits or 0)


def _rank(status: wire.RankStatus) -> RankView:
    return RankView(
        rank=status.rank,
        pid=status.pid,
        phase=status.phase,
        step=status.step,
        phase_age_s=round(status.phase_age_s, 3),
        loss=float.fromhex(status.loss) if status.loss is not None else None,
        step_s=status.step_s,
        ended=_how_ended(status.exit) if status.exit else "",
    )


def _how_ended(exit_report: wire.ExitReport) -> str:
    if exit_report.error is not None:
        return f"{exit_report.error.type}: {exit_report.error.message}".splitlines()[0]
    if exit_report.signal is not None:
        return f"signal {exit_report.signal}"
    return f"exit code {exit_report.code}"


def _complete_step(status: wire.NodeStatus) -> int | None:
    """The newest step of which the snapshots of all the node's own ranks are there."""
    newest: dict[int, int] = {}
    for snapshot in status.snapshots:
        if not snapshot.replica:
            newest[snapshot.rank] = max(newest.get(snapshot.rank, 0), snapshot.step)
    return min(newest.values(), default=None)


def _newest_step(
    plan: wire.Plan | None,
    ranks: Sequence[RankView],
    outcome: wire.Outcome | None,
    committed: Sequence[CommitView],
) -> int:
    if outcome is not None:
        return outcome.step
    # While ranks start they are in no step yet: the job stands where they will begin.
    begin = [plan.start.step] if plan else [0]
    return max([rank.step for rank in ranks] + [c.step for c in committed] + begin)


def _phase(
    blind: bool,
    complete: bool,
    hold: wire.Held | None,
    pointer: wire.PlanPointer | None,
    outcome: wire.Outcome | None,
    highest_record: int,
    plan: wire.Plan | None,
    nodes: Sequence[NodeView],
) -> JobPhase:
    if outcome is not None:
        return outcome.state
    if blind:
        return "done" if complete else "unknown"
    if hold is not None:
        return "held"
    if pointer is None:
        return "forming" if highest_record and nodes else "waiting"
    members = [node for node in nodes if plan is not None and plan.member(node.uid) is not None]
    if highest_record > pointer.generation or any(node.role == "lost" for node in members):
        return "forming"
    ranks = [rank for node in members if node.generation == pointer.generation for rank in node.ranks]
    if any(rank.ended and rank.phase != "done" for rank in ranks):
        return "forming"
    expected = plan.world_size if plan else 0
    if len(ranks) < expected or any(rank.phase in ("start", "restore", "compile") for rank in ranks):
        return "starting"
    return "running"


def _losses(previous: JobView | None, ranks: Iterable[RankView]) -> tuple[LossPoint, ...]:
    """The curve so far with what the ranks report now; a redone step replaces what it said before."""
    curve = {p.step: p for p in previous.losses} if previous else {}
    for rank in ranks:
        if rank.loss is not None:
            step = rank.step if rank.phase == "done" else rank.step - 1
            curve[step] = LossPoint(step=step, loss=rank.loss)
    return tuple(curve[step] for step in sorted(curve))[-LOSSES_MAX:]

"""What must be true after every `advance`, as functions. PURE.

Each returns the list of what is broken, in words; an empty list is health. They are run after every step of the core's tests
and of the simulation, and may be sampled in production. `Ledger` holds what has to be remembered over several steps and
several controllers: which content was given to which number. Numbers INV-.. are those of the project's list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import Record, encode_record, lineage, on_lineage
from surefoot.controller.core import budget
from surefoot.controller.core.decisions import (
    CreateRecord,
    Decision,
    OpenIncident,
    PublishPlan,
    SetAside,
    StepDown,
    TellHeld,
    UpdateIncident,
    WriteOutcome,
)
from surefoot.controller.core.moves import FINAL, Mind
from surefoot.controller.core.starting import left_behind, newer_run, newest_that_ran, passed_over
from surefoot.controller.core.state import CheckingRecord, State
from surefoot.controller.wire import Plan, PlanPointer


@dataclass(slots=True)
class Ledger:
    """What was given out so far, by any controller of the job."""

    records: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Created records, by number."""
    published: list[PlanPointer] = field(default_factory=list[PlanPointer])
    """In the order of etcd's revisions."""

    def publish(self, pointer: PlanPointer) -> list[str]:
        """A plan came into force (INV-01, INV-02)."""
        broken: list[str] = []
        if self.published:
            last = self.published[-1]
            if pointer.generation < last.generation:
                broken.append(f"INV-01: plan {pointer.generation} was published after {last.generation}")
            if pointer.generation == last.generation and pointer != last:
                broken.append(f"INV-02: generation {pointer.generation} has two plans")
        self.published.append(pointer)
        return broken

    def create(self, record: Record) -> list[str]:
        """A record came to be; conditional creation must have seen to it that it is the only one (INV-02)."""
        data = encode_record(record)
        if self.records.setdefault(record.generation, data) != data:
            return [f"INV-02: generation {record.generation} has two records"]
        return []


def check(before: State, after: State, decisions: Iterable[Decision]) -> list[str]:
    """Everything that one `advance` can break."""
    taken = list(decisions)
    return [
        *only_the_leader_decides(after, before, taken),
        *the_mind_is_whole(after),
        *published_after_the_second_listing(before, after, taken),
        *the_newest_run_has_the_root(before, after, taken),
        *_records(before, after, taken),
    ]


def only_the_leader_decides(after: State, before: State, decisions: list[Decision]) -> list[str]:
    """INV-04: whatever changes etcd bears the token under which this controller leads."""
    broken: list[str] = []
    for decision in decisions:
        if isinstance(
            decision, PublishPlan | WriteOutcome | TellHeld | OpenIncident | UpdateIncident | SetAside
        ) and (decision.token not in (after.token, before.token)):
            broken.append(
                f"INV-04: {type(decision).__name__} under token {decision.token}, not {after.token}"
            )
        if isinstance(decision, CreateRecord | PublishPlan | WriteOutcome) and not after.leads:
            broken.append(f"INV-04: {type(decision).__name__} without leading")
    if before.leads and not after.leads and not decisions:
        broken.append("INV-04: leadership was lost in silence")
    if any(isinstance(x, StepDown) for x in decisions) and after.leads:
        broken.append("INV-04: it steps down and leads on")
    return broken


def the_mind_is_whole(state: State) -> list[str]:
    """The parts of the state fit its mind."""
    if not state.leads:
        return []
    rules = {
        "FORMING has a formation, and nothing else has": (state.mind is Mind.FORMING)
        == (state.forming is not None),
        "a final mind has an outcome, and nothing else has": (state.mind in FINAL)
        == (state.the_end is not None),
        "RUNNING has a plan in force": state.mind not in (Mind.RUNNING, Mind.HOLD_COMMITS)
        or state.in_force is not None,
        "HELD says why": (state.mind is Mind.HELD) == bool(state.held_why),
        "an inquiry needs a plan in force": state.inquiry is None or state.in_force is not None,
    }
    broken = [f"mind: not so: {rule} ({state.mind.name})" for rule, holds in rules.items() if not holds]
    if state.in_force is not None and state.truth is not None:
        generation = state.in_force.plan.generation
        if generation not in state.truth.records:
            broken.append(f"INV-01: generation {generation} is in force without a record")
    return broken


def published_after_the_second_listing(before: State, after: State, decisions: list[Decision]) -> list[str]:
    """The forming rule: a plan is published only if its record was created first, and the manifests were listed after that
    with nothing beyond its starting point."""
    broken: list[str] = []
    for decision in decisions:
        if not isinstance(decision, PublishPlan):
            continue
        generation = decision.pointer.generation
        record = after.truth.records.get(generation) if after.truth is not None else None
        if record is None or after.truth is None:
            broken.append(f"INV-01: plan {generation} is published without a record")
            continue
        broken += _nothing_beyond(before, after, record)
        if after.truth.top > generation:
            broken.append(f"INV-01: plan {generation} is published below record {after.truth.top}")
    return broken


def _nothing_beyond(before: State, after: State, record: Record) -> list[str]:
    stage = before.forming.stage if before.forming is not None else None
    first_time = isinstance(stage, CheckingRecord) and stage.record.generation == record.generation
    if not first_time or after.truth is None:
        return []
    ran = newest_that_ran(after.truth, after.pointer, after.nodes)
    avoided = passed_over(after) if record.rollback else {}
    left = left_behind(after.truth, record.start, ran=ran, avoided=avoided)
    return [f"INV-03: plan {record.generation} is published although {left}"] if left is not None else []


def the_newest_run_has_the_root(before: State, after: State, decisions: list[Decision]) -> list[str]:
    """INV-03: whoever has read a record of another run above its own forms nothing more, and is not done."""
    if after.truth is None or (found := newer_run(after.truth, after.settings.run_id)) is None:
        return []
    return [
        f"INV-03: {type(x).__name__} by {after.settings.run_id} below generation {found[0]} of {found[1]}"
        for x in decisions
        if isinstance(x, CreateRecord | PublishPlan)
        or (isinstance(x, WriteOutcome) and x.outcome.state == "done" and before.mind not in FINAL)
    ]


def _records(before: State, after: State, decisions: list[Decision]) -> list[str]:
    broken: list[str] = []
    for decision in decisions:
        if isinstance(decision, CreateRecord):
            broken += record_is_sound(before, after, decision.record)
    return broken


def record_is_sound(before: State, after: State, record: Record) -> list[str]:
    """A record to be created: its number, its layout, its starting point, its account."""
    plan = budget.plan_of(record)
    if plan is None or after.truth is None:
        return [f"record {record.generation} carries no plan"]
    known = after.truth.top
    broken = [*layout_is_sound(plan), *start_is_sound(after, record, plan)]
    if record.generation != known + 1:
        broken.append(f"INV-01: record {record.generation} is to be created, {known} is the highest")
    cause = plan.reason.cause
    limit = after.settings.limit(cause)
    if limit is not None:
        try:
            ran = newest_that_ran(after.truth, after.pointer, after.nodes)
            committed = lineage(after.truth.records, after.truth.manifests, ran)
        except LineageError as e:
            return [*broken, f"the lineage is broken: {e}"]
        used = budget.spent(after.truth.records, committed, plan.run_id).restarts.get(cause, 0)
        if used >= limit:
            broken.append(f"INV-15: restart {used + 1} of {limit} for {cause}")
    return broken


def layout_is_sound(plan: Plan) -> list[str]:
    """Members are distinct, their rank ranges cover 0 .. world_size - 1 without a gap, the mesh fits, nobody is its own
    peer."""
    broken: list[str] = []
    uids = [m.uid for m in plan.members]
    if len(set(uids)) != len(uids):
        broken.append(f"plan {plan.generation} names a node twice: {uids}")
    ranks = [r for m in plan.members for r in range(m.first_rank, m.first_rank + m.ranks)]
    if sorted(ranks) != list(range(plan.world_size)):
        broken.append(f"plan {plan.generation} does not cover its ranks: {ranks}")
    size = 1
    for n in plan.mesh.values():
        size *= n
    if size != plan.world_size:
        broken.append(f"plan {plan.generation}: mesh {plan.mesh} is not {plan.world_size} ranks")
    broken += [f"plan {plan.generation}: {a} is its own peer" for a, b in plan.peers.items() if a == b]
    return broken


def start_is_sound(after: State, record: Record, plan: Plan) -> list[str]:
    """INV-12: the starting point is on the lineage; from memory, every rank has a source that is not known to be lost; from the
    object store, it is not known to be damaged."""
    assert after.truth is not None
    broken: list[str] = []
    start = plan.start
    if (record.start.generation, record.start.step) != (start.generation, start.step):
        broken.append(f"record {record.generation} and its plan start from different points")
    ran = newest_that_ran(after.truth, after.pointer, after.nodes)
    if not on_lineage(after.truth.records, ran, start.generation, start.step):
        broken.append(f"INV-12: ({start.generation}, {start.step}) is not on the lineage of {ran}")
    match start.tier:
        case "memory":
            if [s.rank for s in plan.sources] != list(range(plan.world_size)):
                broken.append(f"INV-12: not every rank has a source: {plan.sources}")
            lost = [s.uid for s in plan.sources if after.nodes[s.uid].lost]
            broken += [f"INV-12: the source {uid} is lost" for uid in lost]
        case "object_store":
            if not any(
                (m.generation, m.step) == (start.generation, start.step) for m in after.truth.manifests
            ):
                broken.append(f"INV-12: there is no manifest of ({start.generation}, {start.step})")
            if (start.generation, start.step) in passed_over(after):
                broken.append(f"INV-12: ({start.generation}, {start.step}) is set aside")
        case "nothing":
            if (start.generation, start.step) != (0, 0):
                broken.append("INV-12: nothing is restored, yet the start is not the beginning")
    return broken

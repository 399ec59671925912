"""Where to go on from. PURE.

The newest state on the lineage that can be had: a snapshot of which every rank's part is on a living node (its own copy
first, else a replica), unless a manifest is newer; else that manifest; else the beginning. At the same step memory wins:
it is the same state, and nearer. What is set aside as damaged, or could not be served before, is left out; where that makes
a start older than what is committed, the record says so (a rollback, and why), and where nothing that is committed can be
loaded, nothing is started: the beginning is no substitute for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.ckpt.record import ManifestRef, Record, StartRef, beyond, lineage, on_lineage
from surefoot.controller.core import budget
from surefoot.controller.core.settings import START_TRIES, Settings
from surefoot.controller.core.state import KnownNode, StartKey, State, StepKey, Truth
from surefoot.controller.wire import Member, NodeStatus, PlanPointer, SnapshotSource, StartingPoint


def newest_that_ran(truth: Truth, pointer: PlanPointer | None, nodes: Mapping[str, KnownNode]) -> int:
    """The newest generation that is known to have been published: etcd points to it, an agent follows it, or it committed.

    Records above it were never in force as far as anybody can tell, or (another run's, of which only its manifests are seen
    from here) committed nothing; 0 where nothing ever ran.
    """
    ran = pointer.generation if pointer is not None else 0
    followed = (n.status.generation for n in nodes.values() if n.registered and n.status is not None)
    ran = max(ran, *(g for g in followed), 0) if nodes else ran
    return max(ran, max((m.generation for m in truth.manifests), default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A starting point, and for the tier ``memory`` who has each rank's part."""

    point: StartingPoint
    sources: tuple[SnapshotSource, ...] = ()
    rollback: bool = False
    """It leaves committed steps behind, because what is newer could not be served."""
    passed_over: tuple[str, ...] = ()
    """Which steps these are, and why, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStart:
    """Nothing can be started from."""

    detail: str


def start_key(point: StartingPoint) -> StartKey:
    """Names a starting point in `State.failed_starts`."""
    return (point.generation, point.step, point.tier)


def passed_over(state: State) -> dict[StepKey, str]:
    """The committed steps that no generation is to start from, and why: set aside as damaged, or failed to load lately."""
    failed = {
        (generation, step): f"{times} starts from it failed"
        for (generation, step, tier), times in state.failed_starts.items()
        if tier == "object_store" and times >= START_TRIES
    }
    return {**failed, **{at: f"set aside as damaged: {why}" for at, why in set_aside(state).items()}}


def set_aside(state: State) -> dict[StepKey, str]:
    """The committed steps that are known to be damaged, flagged or not yet, and why."""
    return {**(state.truth.aside if state.truth is not None else {}), **state.damaged}


def choose_start(
    settings: Settings,
    members: Sequence[Member],
    nodes: Mapping[str, KnownNode],
    truth: Truth,
    *,
    ran: int,
    failed: Mapping[StartKey, int],
    avoided: Mapping[StepKey, str],
) -> Start | NoStart:
    """Choose by the rule in the module.

    Args:
        ran: the newest generation that was in force; its lineage counts.
        failed: how often starting points could not be served lately.
        avoided: what `passed_over` says.

    Raises:
        LineageError: the records contradict each other.
    """
    committed = lineage(truth.records, truth.manifests, ran)
    usable = [m for m in committed if (m.generation, m.step) not in avoided]
    newest = usable[-1] if usable else None
    memory = _newest_in_memory(settings, members, nodes, truth, ran=ran, failed=failed)
    if memory is not None and (newest is None or memory.point.step >= newest.step):
        return _marked(memory, committed, avoided)
    if newest is not None:
        point = StartingPoint(generation=newest.generation, step=newest.step, tier="object_store")
        return _marked(Start(point=point), committed, avoided)
    if committed:
        return NoStart(detail=_none_loads(committed, avoided))
    return Start(point=StartingPoint())


def _none_loads(committed: Sequence[ManifestRef], avoided: Mapping[StepKey, str]) -> str:
    """Rollbacks have taken the newer ones off the lineage by now: those that were tried are told of as well."""
    tried = {step for _, step in avoided} | {m.step for m in committed}
    steps = ", ".join(map(str, sorted(tried)))
    last = committed[-1]
    return (
        f"none of the committed steps ({steps}) could be loaded (step {last.step}: {avoided[last.generation, last.step]}):"
        " `surefoot ckpt verify ROOT STEP` names what is damaged; put that back and verify it again, or train into another root"
    )


def _marked(start: Start, committed: Sequence[ManifestRef], avoided: Mapping[StepKey, str]) -> Start:
    left = [m for m in committed if m.step > start.point.step]
    words = (f"step {m.step} is passed over: {avoided[m.generation, m.step]}" for m in reversed(left))
    return Start(point=start.point, sources=start.sources, rollback=bool(left), passed_over=tuple(words))


def _newest_in_memory(
    settings: Settings,
    members: Sequence[Member],
    nodes: Mapping[str, KnownNode],
    truth: Truth,
    *,
    ran: int,
    failed: Mapping[StartKey, int],
) -> Start | None:
    """The newest snapshot on the lineage that is complete on living nodes, and was made with the same layout.

    One of the last step is left alone: its generation would have no step to take, and commits come with steps.
    """
    held = _held(nodes)
    for generation, step in sorted(held, key=lambda p: (p[1], p[0]), reverse=True):
        point = StartingPoint(generation=generation, step=step, tier="memory")
        if not 0 < step < settings.steps or failed.get(start_key(point)):
            continue
        if not _same_layout(settings, truth.records.get(generation)):
            continue
        if not on_lineage(truth.records, ran, generation, step):
            continue
        sources = _sources(members, held[generation, step])
        if sources is not None:
            return Start(point=point, sources=sources)
    return None


def _same_layout(settings: Settings, record: Record | None) -> bool:
    plan = budget.plan_of(record) if record is not None else None
    return plan is not None and plan.world_size == settings.world_size and plan.mesh == dict(settings.mesh)


Copies = dict[int, list[tuple[bool, str]]]
"""Rank to its holders: (is it a replica, uid)."""


def _held(nodes: Mapping[str, KnownNode]) -> dict[tuple[int, int], Copies]:
    """(generation, step) to who holds which rank's part, of living nodes."""
    held: dict[tuple[int, int], Copies] = {}
    for node in nodes.values():
        status = _of_living(node)
        for snapshot in status.snapshots if status is not None else ():
            copies = held.setdefault((snapshot.generation, snapshot.step), {})
            copies.setdefault(snapshot.rank, []).append((snapshot.replica, node.uid))
    return held


def _of_living(node: KnownNode) -> NodeStatus | None:
    return node.present_status if node.registered and not node.lost else None


def _sources(members: Sequence[Member], copies: Copies) -> tuple[SnapshotSource, ...] | None:
    """A source for every rank, or None. The member's own memory first, then an original, then a replica."""
    sources: list[SnapshotSource] = []
    for member in members:
        for rank in range(member.first_rank, member.first_rank + member.ranks):
            holders = copies.get(rank)
            if not holders:
                return None
            best = min(holders, key=lambda h, uid=member.uid: (h[1] != uid, h[0], h[1]))
            sources.append(SnapshotSource(rank=rank, uid=best[1]))
    return tuple(sources)


# ---------------------------------------------------------------- the second listing


def left_behind(
    truth: Truth, start: StartRef, *, ran: int, avoided: Mapping[StepKey, str] | None = None
) -> str | None:
    """What a new generation from `start` would leave behind, in words; None where it is nothing.

    Args:
        truth: listed after the record of the new generation was created.
        ran: the newest generation that was in force, by the same listing: another run's may have shown only now that it ran.
        avoided: of a rollback, the steps that it leaves behind on purpose.

    Raises:
        LineageError: the records contradict each other.
    """
    if ran and not on_lineage(truth.records, ran, start.generation, start.step):
        return f"generation {ran} was in force, and does not descend from its starting point"
    beyond_it = beyond(truth.records, truth.manifests, start, in_force=ran or None)
    late = [m for m in beyond_it if (m.generation, m.step) not in (avoided or {})]
    if late:
        return f"step {late[-1].step} of generation {late[-1].generation} was committed beyond its starting point"
    return None


# ---------------------------------------------------------------- what must not be


def newer_run(truth: Truth, run_id: str) -> tuple[int, str] | None:
    """The newest record and its run, if `run_id` has formed a generation before it and it is another run's: the root was
    taken over. None: it was not.

    A number is only ever given out by whoever has read all records below it, and whoever reads this stops; so the records of
    a run stand together, and no run comes back once another has followed it.
    """
    owner = budget.run_of(truth.records[truth.top]) if truth.top else run_id
    if owner == run_id or all(budget.run_of(r) != run_id for r in truth.records.values()):
        return None
    return truth.top, owner


def contradiction(truth: Truth, pointer: PlanPointer | None, nodes: Mapping[str, KnownNode]) -> str | None:
    """Why nothing may be decided: etcd or an agent knows a generation that has no record, or another record. None: all is well.

    Such a world was restored from an old backup, or points to another root. Going on would give a number out twice.
    """
    if pointer is not None and pointer.generation > truth.top:
        return (
            f"etcd's plan names generation {pointer.generation}, but the newest record in the object store is {truth.top}: "
            f"is this the right root? Restore the records, or delete the plan key if they are gone for good"
        )
    if pointer is not None and truth.hashes.get(pointer.generation) not in (None, pointer.hash):
        return f"the record of generation {pointer.generation} is not the one that etcd's plan names: restore it from a backup"
    for node in nodes.values():
        status = _of_living(node)
        if status is not None and status.generation > truth.top:
            return (
                f"the agent of {node.uid} follows generation {status.generation}, but the newest record is {truth.top}: "
                f"end that agent, or restore the records"
            )
    return None

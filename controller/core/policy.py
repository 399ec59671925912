"""What is the matter, and where to go on from: the rules. PURE.

**Who is alive** (`fate`). Who says himself that he ends is lost. Else a probe's answer decides, not a lease: *answered* by the
life the plan means: alive. *Refused*, or answered by another life: lost. *No answer*: lost if its key is gone as well; otherwise silent, and asked again, at most for
the last call (15 s), after which it counts as lost.

**What began it** (`diagnose`). The first rule that holds, in this order, names the fault; everything else is evidence:

1. a lost member: ``node_loss``, infrastructure; preemption where all that are lost had been told to end;
2. a silent member, while something else stopped the generation: wait for its fate, it may be the cause;
3. a rank ended by a signal: ``rank_exit``. A collective error of another rank is an effect of that;
4. a rank found the committed step that it was to restore damaged: ``step_damaged``, infrastructure; then one that raised, or
   exited without a word: ``rank_exception``, ``rank_exit``; an exit with 0 before the end is one;
5. a member that cannot start its ranks: ``start_failed``;
6. only collective errors: wait 0.5 s for what began them, ask everybody once more, then ``collective``, infrastructure: a
   link, or a cause that nobody reported. No rank is blamed;
7. ranks that committed and ended because all were told to: ``stopped``, preemption. The job is not over by that;
8. no progress, still so after everybody was asked: ``hang``, infrastructure, blamed on a rank only where one alone is
   behind all others; or ``not_ready``, ``ended_early``;
9. nothing of all this: a false alarm, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from surefoot.controller.core import budget, detectors
from surefoot.controller.core.settings import Settings
from surefoot.controller.core.standing import (
    following,
    is_done,
    is_going,
    newest_step,
    ranks_heard,
    was_stopped,
    was_told_to_go,
)
from surefoot.controller.core.state import (
    Answer,
    Fault,
    InForce,
    Inquiry,
    KnownNode,
    Suspicion,
    SuspicionKind,
)
from surefoot.controller.wire import (
    Cause,
    ExitReport,
    Member,
    Plan,
    RankStatus,
    StartFailure,
)

# ---------------------------------------------------------------- who is alive


class Fate(Enum):
    """What is known of a member's life."""

    ALIVE = "alive"
    LOST = "lost"
    SILENT = "silent"
    ASKED = "asked"
    """Its answer is still out."""
    UNASKED = "unasked"


@dataclass(frozen=True, slots=True, kw_only=True)
class FateVerdict:
    """`why` in words, for evidence."""

    fate: Fate
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a diagnosis looks at."""

    settings: Settings
    in_force: InForce
    nodes: Mapping[str, KnownNode]
    inquiry: Inquiry
    progress_s: float
    learned_step_s: float | None
    now_s: float

    @property
    def plan(self) -> Plan:
        return self.in_force.plan


def fate(member: Member, node: KnownNode | None, inquiry: Inquiry) -> FateVerdict:
    """Is the life that the plan means over?"""
    if node is None or node.info is None:
        if any(s.uid == member.uid and s.kind is SuspicionKind.VANISHED for s in inquiry.suspicions):
            return FateVerdict(fate=Fate.LOST, why="it never registered with this controller")
        return FateVerdict(fate=Fate.SILENT, why="it has not registered with this controller")
    if node.incarnation != member.incarnation:
        return FateVerdict(fate=Fate.LOST, why=f"its agent came back as {node.incarnation}")
    if node.lost:
        return FateVerdict(fate=Fate.LOST, why=node.lost)
    if is_going(node):
        return FateVerdict(fate=Fate.LOST, why="its agent was told to end, and ends")
    asked = inquiry.asked.get(member.uid)
    if asked is None:
        return FateVerdict(fate=Fate.UNASKED)
    if node.probed is None or node.probed.op < asked:
        return FateVerdict(fate=Fate.ASKED)
    return _fate_by_probe(member, node, node.probed.answer, node.probed.incarnation)


def _fate_by_probe(member: Member, node: KnownNode, answer: Answer, life: str) -> FateVerdict:
    match answer:
        case Answer.ANSWERED if life == member.incarnation:
            return FateVerdict(fate=Fate.ALIVE)
        case Answer.ANSWERED:
            return FateVerdict(fate=Fate.LOST, why=f"another life answered there: {life}")
        case Answer.REFUSED:
            return FateVerdict(fate=Fate.LOST, why="its agent's port refused the connection")
        case Answer.BROKEN | Answer.TIMED_OUT if not node.registered:
            return FateVerdict(fate=Fate.LOST, why=f"its key is gone and it {answer.value}")
        case Answer.BROKEN | Answer.TIMED_OUT:
            return FateVerdict(fate=Fate.SILENT, why=f"it {answer.value}")


# ---------------------------------------------------------------- how one rank ended


class Role(Enum):
    """What an end is evidence of."""

    INITIATING = "initiating"
    CASCADE = "cascade"
    TEARDOWN = "teardown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rank's end, read. `weight` orders initiating ones: the lowest is believed first."""

    uid: str
    rank: RankStatus
    role: Role
    fault: str
    cause: Cause
    weight: int
    words: str


AGENT_LOST_CODE = 77
"""What a rank exits with when its agent is gone (docs/protocol.md): an effect, not a cause."""

TOLD_TO_STOP = (1, 2, 15)
"""SIGHUP, SIGINT, SIGTERM from outside: somebody wants the machine."""

FROM_OUTSIDE = (7, 9)
"""SIGBUS (memory that could not be backed), SIGKILL: the machine's doing. Other signals are the program's own."""


def read_exit(uid: str, rank: RankStatus, report: ExitReport) -> Reading:
    """Read one end, by the rules of the module."""
    role, fault, cause, weight = _read(report)
    words = f"rank {rank.rank} on {uid} ({role.value}): {detectors.exit_words(report)}, in {rank.phase} of step {rank.step}"
    return Reading(uid=uid, rank=rank, role=role, fault=fault, cause=cause, weight=weight, words=words)


def _read(report: ExitReport) -> tuple[Role, str, Cause, int]:
    error = report.error
    if report.teardown:
        return Role.TEARDOWN, "", "none", 9
    if report.code == AGENT_LOST_CODE or (error is not None and error.kind in ("collective", "agent_lost")):
        return Role.CASCADE, "collective", "infrastructure", 8
    if report.signal is not None:
        return Role.INITIATING, "rank_exit", _account_of_signal(report.signal), 0
    if error is not None and error.damaged is not None:
        return Role.INITIATING, "step_damaged", "infrastructure", 1
    if error is not None:
        cause: Cause = "infrastructure" if error.kind == "checkpoint" else "workload"
        return Role.INITIATING, "rank_exception", cause, 2
    return Role.INITIATING, "rank_exit", "workload", 3


def _account_of_signal(number: int) -> Cause:
    if number in FROM_OUTSIDE:
        return "infrastructure"
    return "preemption" if number in TOLD_TO_STOP else "workload"


# ---------------------------------------------------------------- what began it


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A false alarm. `why` in words."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Ask `ask` (again), at the earliest `not_before_s`; `settled`: that ends the wait for what initiated a cascade."""

    ask: tuple[str, ...]
    not_before_s: float
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StillAsking:
    """Answers are out."""


Diagnosis = Healthy | Undecided | StillAsking | Fault


def diagnose(at: Situation) -> Diagnosis:
    """Say what is the matter, or what is needed to say it."""
    fates = {m.uid: fate(m, at.nodes.get(m.uid), at.inquiry) for m in at.plan.members}
    lost = {uid: v.why for uid, v in fates.items() if v.fate is Fate.LOST}
    hard = at.inquiry.hard or bool(lost)
    helpers = _helpers(at) if hard else {}
    if hard and (unasked := _of(fates | helpers, Fate.UNASKED)):
        return Undecided(ask=unasked, not_before_s=at.now_s)
    if _of(fates | helpers, Fate.ASKED):
        return StillAsking()
    silent = _of(fates, Fate.SILENT)
    if hard and silent:
        if at.now_s - at.inquiry.opened_s < at.settings.times.last_call_s:
            return Undecided(ask=silent, not_before_s=_answered_s(at, silent) + at.settings.times.reprobe_s)
        lost |= {uid: f"{fates[uid].why}, for the whole last call" for uid in silent}
    return _conclude(at, lost)


def _helpers(at: Situation) -> dict[str, FateVerdict]:
    """Nodes that keep copies without being members: their fresh statuses are needed, their fate is not."""
    found: dict[str, FateVerdict] = {}
    for uid in at.plan.peers.values():
        node = at.nodes.get(uid)
        if at.plan.member(uid) is not None or node is None or node.info is None or node.lost:
            continue
        asked = at.inquiry.asked.get(uid)
        if asked is None:
            found[uid] = FateVerdict(fate=Fate.UNASKED)
        elif node.probed is None or node.probed.op < asked:
            found[uid] = FateVerdict(fate=Fate.ASKED)
    return found


def _of(fates: Mapping[str, FateVerdict], wanted: Fate) -> tuple[str, ...]:
    return tuple(uid for uid, v in fates.items() if v.fate is wanted)


def _answered_s(at: Situation, uids: Collection[str]) -> float:
    probed = [node.probed for uid in uids if (node := at.nodes.get(uid)) is not None]
    return max((p.at_s for p in probed if p is not None), default=at.now_s)


def _conclude(at: Situation, lost: Mapping[str, str]) -> Diagnosis:
    """Every fate is known. That a step is damaged stays true whatever else struck: it is told with any fault."""
    readings = [r for r in read_exits(at.plan, at.nodes) if r.role is not Role.TEARDOWN]
    verdict = _by_the_rules(at, lost, readings)
    errors = (r.rank.exit.error for r in readings if r.rank.exit is not None)
    damaged = next((e.damaged for e in errors if e is not None and e.damaged is not None), None)
    if damaged is None or not isinstance(verdict, Fault):
        return verdict
    words = (
        f"step {damaged.step} of generation {damaged.generation} is damaged: {damaged.key}: {damaged.detail}"
    )
    return replace(verdict, damaged=damaged, evidence=(words, *verdict.evidence))


def _by_the_rules(at: Situation, lost: Mapping[str, str], readings: Sequence[Reading]) -> Diagnosis:
    """Apply the rules in order."""
    began = sorted((r for r in readings if r.role is Role.INITIATING), key=lambda r: (r.weight, r.rank.rank))
    evidence = tuple(r.words for r in (*began, *(r for r in readings if r.role is Role.CASCADE)))
    if lost:
        return _node_loss(at, lost, evidence)
    if began:
        return _rank_end(at, began[0], evidence)
    if failures := _start_failures(at.plan, at.nodes):
        return _start_failed(at, *failures[0], evidence)
    if readings:
        return _cascade_only(at, evidence)
    return _stopped(at) or _standstill(at)


def read_exits(plan: Plan, nodes: Mapping[str, KnownNode]) -> list[Reading]:
    """All ends of ranks of this generation that were not regular, ascending by rank."""
    readings: list[Reading] = []
    for member in plan.members:
        status = following(nodes.get(member.uid), plan)
        readings.extend(
            read_exit(member.uid, rank, rank.exit)
            for rank in (status.ranks if status is not None else ())
            if rank.exit is not None and not is_done(rank)
        )
    return readings


def _node_loss(at: Situation, lost: Mapping[str, str], evidence: Sequence[str]) -> Fault:
    told_to_go = all(uid in at.nodes and was_told_to_go(at.nodes[uid]) for uid in lost)
    return Fault(
        kind="node_loss",
        cause="preemption" if told_to_go else "infrastructure",
        node=next(iter(lost)),
        step=newest_step(at.nodes, at.plan),
        evidence=(*(f"node {u}: {w}" for u, w in lost.items()), *evidence),
        rule="a member's life is over: its ranks are placed anew, a spare takes the place unless the node came back",
        lost=lost,
    )


def _rank_end(at: Situation, reading: Reading, evidence: Sequence[str]) -> Fault:
    report, rank = reading.rank.exit, reading.rank
    error = report.error if report is not None else None
    loading = error is not None and error.kind == "checkpoint" and rank.phase in ("start", "restore")
    words = (
        budget.signature_of(error, rank.step)
        if error is not None
        else f"{detectors.exit_words(report) if report is not None else ''}, step {rank.step}"
    )
    return Fault(
        kind=reading.fault,
        cause=reading.cause,
        node=reading.uid,
        rank=rank.rank,
        step=rank.step,
        evidence=tuple(evidence),
        rule="a committed step that turns out damaged is set aside, and the next record names the one before"
        if reading.fault == "step_damaged"
        else "a rank ended by itself or by a signal is initiating; communication errors of others are its effects",
        signature=words if reading.cause == "workload" else "",
        start_at_fault=loading,
        permanent=error is not None and error.permanent,
    )


def _start_failures(plan: Plan, nodes: Mapping[str, KnownNode]) -> list[tuple[str, StartFailure]]:
    found: list[tuple[str, StartFailure]] = []
    for member in plan.members:
        status = following(nodes.get(member.uid), plan)
        failure = status.start_failure if status is not None else None
        if failure is not None and failure.generation == plan.generation:
            found.append((member.uid, failure))
    return found


def _start_failed(at: Situation, uid: str, failure: StartFailure, evidence: Sequence[str]) -> Fault:
    launch = failure.kind == "launch_failed"
    serving = failure.kind in ("snapshot_missing", "snapshot_corrupt", "peer_unreachable")
    words = f"node {uid}: {failure.kind}: {failure.detail}"
    return Fault(
        kind="start_failed",
        cause="workload" if launch else "infrastructure",
        node=uid,
        step=at.plan.start.step,
        evidence=(words, *evidence),
        rule="a starting point that cannot be served is given up, and the next record names an older one"
        if serving
        else "a generation that cannot be started is formed again",
        signature=f"{failure.kind}: {failure.detail}" if launch else "",
        start_at_fault=serving,
        start_is_gone=serving,
        permanent=failure.error is not None and failure.error.permanent,
    )


def _cascade_only(at: Situation, evidence: Sequence[str]) -> Undecided | Fault:
    if not at.inquiry.settled:
        return Undecided(
            ask=tuple(m.uid for m in at.plan.members),
            not_before_s=at.inquiry.opened_s + at.settings.times.settle_s,
            settled=True,
        )
    return Fault(
        kind="collective",
        cause="infrastructure",
        step=newest_step(at.nodes, at.plan),
        evidence=tuple(evidence),
        rule=f"only communication errors, {at.settings.times.settle_s} s later still: a link, or a cause nobody reported",
    )


def _stopped(at: Situation) -> Fault | None:
    stopped = [r for r in ranks_heard(at.nodes, at.plan).values() if was_stopped(r)]
    if not stopped:
        return None
    going = {m.uid for m in at.plan.members if m.uid in at.nodes and was_told_to_go(at.nodes[m.uid])}
    return Fault(
        kind="stopped",
        cause="preemption",
        step=max(r.step for r in stopped),
        evidence=(f"all ranks were told to stop, and did at step {max(r.step for r in stopped)}",),
        rule="ranks that stop because they were told to are not at the end of the job: it goes on from where they committed",
        lost=dict.fromkeys(sorted(going), "its agent was told to end"),
    )


def _standstill(at: Situation) -> Healthy | Fault:
    """Nobody ended: is it a hang, a start that does not come up, or nothing?"""
    stalled = (
        detectors.detect_hang(
            at.plan,
            at.nodes,
            at.settings,
            at.now_s,
            progress_s=at.progress_s,
            learned_s=at.learned_step_s,
        )
        if "hang" not in at.settings.observe
        else []
    )
    # Whoever stands still while a rank has left waits for that rank.
    skew_s = 0.0 if stalled else at.settings.times.end_skew_s
    early = detectors.detect_early_end(at.plan, at.nodes, at.settings, at.now_s, skew_s=skew_s)
    missing = detectors.detect_not_ready(at.plan, at.nodes, at.settings, at.now_s, progress_s=at.progress_s)
    for found in (early, stalled, missing):
        if found:
            return _stood_still(at, found)
    return Healthy(why="all members answered, no rank has ended, and there is progress")


_STILL: Mapping[SuspicionKind, tuple[str, Cause, str]] = {
    SuspicionKind.ENDED_EARLY: (
        "ended_early",
        "workload",
        "ranks that end before the last step while others go on leave those waiting for ever",
    ),
    SuspicionKind.NO_PROGRESS: (
        "hang",
        "infrastructure",
        "no rank made progress for longer than the phase of those furthest behind allows, and their agents confirm it",
    ),
    SuspicionKind.NOT_READY: (
        "not_ready",
        "infrastructure",
        "a generation that does not come up by its deadline is formed again",
    ),
}


def _stood_still(at: Situation, found: Sequence[Suspicion]) -> Fault:
    kind, cause, rule = _STILL[found[0].kind]
    ranks = ranks_heard(at.nodes, at.plan)
    alone = found[0] if len(found) == 1 else None
    step = newest_step(at.nodes, at.plan)
    return Fault(
        kind=kind,
        cause=cause,
        node=alone.uid if alone is not None else _one_node(found),
        rank=alone.rank if alone is not None and alone.rank in ranks else None,
        step=step,
        evidence=tuple(
            f"rank {s.rank} on {s.uid}: {s.detail}" if s.rank >= 0 else f"node {s.uid}: {s.detail}"
            for s in found
        ),
        rule=rule,
        signature=f"{kind} at step {step}",
    )


def _one_node(found: Sequence[Suspicion]) -> str:
    uids = {s.uid for s in found}
    return uids.pop() if len(uids) == 1 else ""

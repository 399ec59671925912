"""Detectors: each looks at a snapshot of the job and says what is suspicious, with a typed kind. PURE; none acts.

* *exit*: a rank's process ended, and not because its agent ended it or because it was done.
* *node loss*: a member's key is gone, it came back as another life, it says that it ends, or its status went quiet. The
  first and the last are suspicions; the member is asked directly before anything is concluded (policy.py).
* *hang*: no rank of the job made progress for longer than the phase allows in which the ranks furthest behind are. The
  others wait for those in a collective, whatever phase they call it, so their deadlines do not count. Process states and
  heartbeats prove nothing, and a heartbeat that is missing is not a hang: a verdict needs a fresh answer (policy.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.controller.core.settings import Settings
from surefoot.controller.core.standing import following, holders, is_done, is_going, ranks_heard, was_stopped
from surefoot.controller.core.state import KnownNode, Suspicion, SuspicionKind
from surefoot.controller.wire import ExitReport, Member, Phase, Plan, RankStatus

# ---------------------------------------------------------------- exit


def detect_exits(plan: Plan, nodes: Iterable[KnownNode]) -> list[Suspicion]:
    """Ranks of these nodes whose process ended before they were done or that were stopped, and nodes that say they cannot
    start."""
    found: list[Suspicion] = []
    for node in nodes:
        status = following(node, plan)
        if status is None:
            continue
        found.extend(
            Suspicion(uid=node.uid, rank=rank.rank, kind=SuspicionKind.EXIT, detail=exit_words(rank.exit))
            for rank in status.ranks
            if rank.exit is not None and not rank.exit.teardown and not is_done(rank)
        )
        found.extend(
            Suspicion(uid=node.uid, rank=rank.rank, kind=SuspicionKind.STOPPED, detail=f"at step {rank.step}")
            for rank in status.ranks
            if was_stopped(rank)
        )
        failure = status.start_failure
        if failure is not None and failure.generation == plan.generation:
            detail = f"{failure.kind}: {failure.detail}"
            found.append(Suspicion(uid=node.uid, kind=SuspicionKind.START_FAILURE, detail=detail))
    return found


SIGNAL_NAMES: Mapping[int, str] = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
"""Linux' numbers: what an agent reports is another machine's matter, so this one's `signal` module is not asked."""


WORDS_MAX = 160
"""Characters of an error's message in evidence; the whole of it is in the rank's log."""
LAST_WORDS_MAX = 800
"""The same of an error that no restart can mend: there the message is all that somebody has to go on, and it ends with what to do."""


def exit_words(report: ExitReport) -> str:
    """How a process ended, in a few words."""
    if report.signal is not None:
        how = f"killed by {SIGNAL_NAMES.get(report.signal, f'signal {report.signal}')}"
    else:
        how = f"exit code {report.code}"
    if report.error is None:
        return how
    message = " ".join(report.error.message.split())
    shown = LAST_WORDS_MAX if report.error.permanent else WORDS_MAX
    return f"{how}, {report.error.type}: {message[:shown]}{'…' if len(message) > shown else ''}"


# ---------------------------------------------------------------- node loss


def detect_lost_nodes(
    plan: Plan, nodes: Mapping[str, KnownNode], settings: Settings, now_s: float, *, since_s: float
) -> list[Suspicion]:
    """Members that may be lost. `since_s`: since when the plan is in force for this controller."""
    found: list[Suspicion] = []
    quiet_s = settings.quiet_after_s(len(nodes))
    for member in plan.members:
        node = nodes.get(member.uid)
        if node is None or node.info is None:
            found.extend(_never_seen(member, now_s - since_s, settings.lease_ttl_s))
        elif node.registered and node.incarnation != member.incarnation:
            detail = f"its agent is {node.incarnation} now, the plan means {member.incarnation}"
            found.append(Suspicion(uid=member.uid, kind=SuspicionKind.REBORN, detail=detail))
        elif node.incarnation == member.incarnation and is_going(node):
            found.append(Suspicion(uid=member.uid, kind=SuspicionKind.LEAVING, detail="it ends its ranks"))
        else:
            found.extend(_silent(node, now_s, since_s, quiet_s))
    return found


def _never_seen(member: Member, waited_s: float, lease_ttl_s: float) -> list[Suspicion]:
    """A new leader does not know the address of a node without a key; a living agent registers again within its TTL."""
    if waited_s < lease_ttl_s:
        return []
    detail = f"it has not registered for {waited_s:.1f} s"
    return [Suspicion(uid=member.uid, kind=SuspicionKind.VANISHED, detail=detail)]


def _silent(node: KnownNode, now_s: float, since_s: float, quiet_s: float) -> list[Suspicion]:
    """A key that is gone is asked about at once; after that, and while only the status is missing, once per `quiet_s`."""
    asked_s = node.asked_s if node.asked_s is not None else since_s
    news = node.gone_s is not None and node.gone_s > asked_s
    if not news and now_s - max(node.heard_s, asked_s, since_s) < quiet_s:
        return []
    if not node.registered:
        return [Suspicion(uid=node.uid, kind=SuspicionKind.VANISHED, detail="its key is gone")]
    detail = f"no status for {now_s - node.heard_s:.1f} s"
    return [Suspicion(uid=node.uid, kind=SuspicionKind.QUIET, detail=detail)]


# ---------------------------------------------------------------- hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No rank made progress for `quiet_s`, and `deadline_s` is what the phase of the ranks furthest behind allows."""

    behind: tuple[RankStatus, ...]
    quiet_s: float
    deadline_s: float

    @property
    def over(self) -> bool:
        return self.quiet_s >= self.deadline_s


def _class(phase: Phase) -> int:
    """Order of the phases within a step. A rank enters data and eval from within a step, so these three are one."""
    match phase:
        case "start" | "restore":
            return 0
        case "compile" | "data" | "step" | "eval":
            return 1
        case "save":
            return 2
        case "done":
            return 3


def furthest_behind(ranks: Iterable[RankStatus]) -> tuple[RankStatus, ...]:
    """The ranks that the others wait for, ascending by rank; empty where all are done."""
    alive = [r for r in ranks if not is_done(r)]
    if not alive:
        return ()
    least = min((r.step, _class(r.phase)) for r in alive)
    return tuple(sorted((r for r in alive if (r.step, _class(r.phase)) == least), key=lambda r: r.rank))


def phase_deadline_s(phase: Phase, step: int, settings: Settings, learned_s: float | None) -> float:
    """How long a job may stand still in this phase, warm-up aside.

    A step: the floor, or `hang_factor` times what a step usually takes. Data: twice, the loader may have to open files.
    A save: three times, it copies and waits for the peer; the last one also waits for the object store.
    """
    step_s = max(settings.hang_floor_s, settings.hang_factor * (learned_s or 0.0))
    match phase:
        case "start" | "restore":
            return settings.times.ready_s
        case "compile" | "eval":
            return max(settings.times.slow_phase_s, step_s)
        case "data":
            return 2 * step_s
        case "save" if step >= settings.steps:
            return max(settings.times.slow_phase_s, 3 * step_s)
        case "save":
            return 3 * step_s
        case "step" | "done":
            return step_s


def stall(
    plan: Plan,
    nodes: Mapping[str, KnownNode],
    settings: Settings,
    now_s: float,
    *,
    progress_s: float,
    learned_s: float | None,
) -> Stall | None:
    """How the job stands in comparison with its deadline; None where not all ranks were heard of or all are done."""
    ranks = ranks_heard(nodes, plan)
    behind = furthest_behind(ranks.values())
    if len(ranks) < plan.world_size or not behind:
        return None
    deadline_s = max(phase_deadline_s(r.phase, r.step, settings, learned_s) for r in behind)
    if behind[0].step <= plan.start.step + settings.warmup_steps or learned_s is None:
        deadline_s = max(deadline_s, settings.times.warmup_s)
    return Stall(behind=behind, quiet_s=now_s - progress_s, deadline_s=deadline_s)


def detect_hang(
    plan: Plan,
    nodes: Mapping[str, KnownNode],
    settings: Settings,
    now_s: float,
    *,
    progress_s: float,
    learned_s: float | None,
) -> list[Suspicion]:
    """The ranks that a job at a standstill waits for, or nothing."""
    found = stall(plan, nodes, settings, now_s, progress_s=progress_s, learned_s=learned_s)
    if found is None or not found.over:
        return []
    holder = holders(plan)
    starting = _class(found.behind[0].phase) == 0
    kind = SuspicionKind.NOT_READY if starting else SuspicionKind.NO_PROGRESS
    detail = f"nothing moved for {found.quiet_s:.1f} s, {found.deadline_s:.1f} s are allowed"
    return [
        Suspicion(
            uid=holder[r.rank],
            rank=r.rank,
            kind=kind,
            detail=f"in {r.phase} of step {r.step}, {detail}",
        )
        for r in found.behind
    ]


def detect_not_ready(
    plan: Plan, nodes: Mapping[str, KnownNode], settings: Settings, now_s: float, *, progress_s: float
) -> list[Suspicion]:
    """Members that did not bring up their ranks although nothing moved for `ready_s`."""
    if now_s - progress_s < settings.times.ready_s:
        return []
    found: list[Suspicion] = []
    for member in plan.members:
        status = following(nodes.get(member.uid), plan)
        if status is None or len(status.ranks) < member.ranks:
            detail = f"not all of its ranks came up within {settings.times.ready_s:.0f} s"
            found.append(Suspicion(uid=member.uid, kind=SuspicionKind.NOT_READY, detail=detail))
    return found


# ---------------------------------------------------------------- the end


def detect_early_end(
    plan: Plan, nodes: Mapping[str, KnownNode], settings: Settings, now_s: float, *, skew_s: float
) -> list[Suspicion]:
    """Ranks that were done before the last step `skew_s` ago while others go on: the end of the data comes to all at once."""
    ranks = ranks_heard(nodes, plan)
    if len(ranks) == plan.world_size and all(is_done(r) for r in ranks.values()):
        return []
    holder = holders(plan)
    found: list[Suspicion] = []
    for rank in ranks.values():
        if not is_done(rank) or rank.step >= settings.steps:
            continue
        mark = nodes[holder[rank.rank]].marks.get(rank.rank)
        if mark is not None and now_s - mark.since_s >= skew_s:
            detail = f"done at step {rank.step} of {settings.steps}, and others are not"
            found.append(
                Suspicion(
                    uid=holder[rank.rank], rank=rank.rank, kind=SuspicionKind.ENDED_EARLY, detail=detail
                )
            )
    return found

"""How a plan stands: questions about nodes and ranks that several parts of the core ask. PURE.

Only words of this plan's own lives and of this generation count: a status of another incarnation or of another generation
says nothing about it (scenario CTL-30).
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.controller.core.state import KnownNode
from surefoot.controller.wire import NodeStatus, Plan, RankStatus

BEGUN = frozenset({"data", "step", "save", "eval", "done"})
"""Phases of a rank that has begun its first step."""


def following(node: KnownNode | None, plan: Plan) -> NodeStatus | None:
    """The node's status, if it is of the very life the plan means and follows this generation."""
    if node is None or node.status is None:
        return None
    member = plan.member(node.uid)
    status = node.status
    if member is None or status.incarnation != member.incarnation or status.generation != plan.generation:
        return None
    return status


def ranks_heard(nodes: Mapping[str, KnownNode], plan: Plan) -> dict[int, RankStatus]:
    """All ranks of the plan that have been heard of under it."""
    ranks: dict[int, RankStatus] = {}
    for member in plan.members:
        status = following(nodes.get(member.uid), plan)
        if status is not None:
            ranks.update({r.rank: r for r in status.ranks})
    return ranks


def holders(plan: Plan) -> dict[int, str]:
    """Rank to the uid of the member that runs it."""
    return {rank: m.uid for m in plan.members for rank in range(m.first_rank, m.first_rank + m.ranks)}


def is_done(rank: RankStatus) -> bool:
    """Its train() returned, and what it had to commit is committed. How the process ends after that matters to nobody."""
    return rank.phase == "done"


def was_stopped(rank: RankStatus) -> bool:
    """Its loop ended because all ranks were told to stop: the job is not over by that."""
    return is_done(rank) and rank.ended == "stopped"


def is_going(node: KnownNode) -> bool:
    """Its agent was told to end, and ends its ranks or has ended: its life is over, whether a probe still reaches it or not."""
    return node.present_status is not None and node.present_status.state == "stopping"


def was_told_to_go(node: KnownNode) -> bool:
    """Its agent was told to end: if it is lost now, that was somebody's wish and no fault of the machine."""
    return node.present_status is not None and node.present_status.state in ("leaving", "stopping")


def finished_step(rank: RankStatus) -> int:
    """The last step that the rank has finished."""
    return rank.step if is_done(rank) else rank.step - 1


def all_begun(nodes: Mapping[str, KnownNode], plan: Plan) -> bool:
    """Every rank of the plan lives and is in its first step, or past it."""
    ranks = ranks_heard(nodes, plan)
    return len(ranks) == plan.world_size and all(
        r.phase in BEGUN and (r.exit is None or is_done(r)) for r in ranks.values()
    )


def all_done(nodes: Mapping[str, KnownNode], plan: Plan) -> int | None:
    """The step at which all ranks of the plan are done, the same for all; None where they are not, or were stopped there."""
    ranks = ranks_heard(nodes, plan)
    done = [r for r in ranks.values() if is_done(r) and not was_stopped(r)]
    steps = {r.step for r in done}
    if len(done) < plan.world_size or len(steps) != 1:
        return None
    return steps.pop()


def least_finished(nodes: Mapping[str, KnownNode], plan: Plan) -> int | None:
    """The last step that all ranks of the plan have finished; None where not all were heard of."""
    ranks = ranks_heard(nodes, plan)
    if len(ranks) < plan.world_size:
        return None
    return min(finished_step(r) for r in ranks.values())


def newest_step(nodes: Mapping[str, KnownNode], plan: Plan) -> int:
    """The newest step that any rank of the plan is in; the starting point's where none was heard of."""
    return max((r.step for r in ranks_heard(nodes, plan).values()), default=plan.start.step)

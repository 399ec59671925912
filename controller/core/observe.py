"""Facts into state: what etcd and the probes show of nodes and ranks. PURE; decides nothing.

Three rules:

* A status is news if it is of the life that is registered and its ``seq`` did not go back; probe answers and watch events
  come by different ways and may overtake each other.
* Progress is a change of (step, phase) of a rank of the plan in force, seen by this controller's clock. A beating heart is
  none.
* A key that is gone is a suspicion. Only a refused probe, another life, or silence without a key ends a life (policy.py).
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.controller.core.draft import Draft
from surefoot.controller.core.events import (
    NodeAppeared,
    NodeVanished,
    ProbeAnswered,
    ProbeBroken,
    ProbeOutcome,
    ProbeRefused,
    ProbeTimedOut,
    WorldListed,
)
from surefoot.controller.core.state import Answer, KnownNode, Mark, Probed
from surefoot.controller.wire import NodeStatus, Plan, RankStatus

LEARNING = 0.2
"""Weight of the newest step time in what is learned: a handful of steps, so that one slow step teaches little."""


def node_appeared(d: Draft, event: NodeAppeared) -> None:
    """A presence key was written: a new life, or the same one again."""
    node = d.nodes.get(event.info.uid) or KnownNode(uid=event.info.uid)
    if event.revision <= node.revision:
        return  # a relist shows again what the watch has shown, or what is over already
    if node.info is not None and node.incarnation != event.info.incarnation:
        d.tell(f"{node.uid} is back as incarnation {event.info.incarnation}")
    d.put(
        replace(
            node,
            info=event.info,
            revision=event.revision,
            registered=True,
            gone_s=None,
            lost="",
        )
    )


def node_vanished(d: Draft, event: NodeVanished) -> None:
    """A presence key is gone."""
    node = d.nodes.get(event.uid)
    if node is not None and node.registered and event.revision > node.revision:
        d.put(replace(node, registered=False, revision=event.revision, gone_s=d.now))
        d.tell(f"the key of {event.uid} is gone")


def status_reported(d: Draft, status: NodeStatus) -> bool:
    """Take a status if it is news; says whether it was."""
    node = d.nodes.get(status.uid) or KnownNode(uid=status.uid)
    old = node.status
    if old is not None and old.incarnation == status.incarnation and status.seq < old.seq:
        return False
    if old is not None and old.incarnation == node.incarnation != status.incarnation:
        # Words of another life than the registered one: of a former one, which nobody needs, or of one that is about to
        # register, which will say so again.
        return False
    d.put(replace(node, status=status, heard_s=d.now, marks=_marks(d, node, status)))
    return True


def _marks(d: Draft, node: KnownNode, status: NodeStatus) -> dict[int, Mark]:
    """Where its ranks stand; notes job-wide progress and learns the step time on the way."""
    old = node.status
    same = old is not None and (old.incarnation, old.generation) == (status.incarnation, status.generation)
    before = node.marks if same else dict[int, Mark]()
    marks: dict[int, Mark] = {}
    plan = d.plan
    for rank in status.ranks:
        mark = before.get(rank.rank)
        if mark is None or (mark.step, mark.phase) != (rank.step, rank.phase):
            mark = Mark(step=rank.step, phase=rank.phase, since_s=d.now)
            if plan is not None and status.generation == plan.generation:
                _progress(d, plan, rank)
        marks[rank.rank] = mark
    return marks


def _progress(d: Draft, plan: Plan, rank: RankStatus) -> None:
    learned = d.s.learned_step_s
    warm = rank.step - 1 > plan.start.step + d.s.settings.warmup_steps
    if rank.step_s is not None and warm:
        learned = rank.step_s if learned is None else learned + LEARNING * (rank.step_s - learned)
    d.set(progress_s=d.now, learned_step_s=learned)


def probe_ended(d: Draft, event: ProbeOutcome) -> None:
    """A probe came to an end; an answer is a status as well."""
    if isinstance(event, ProbeAnswered):
        status_reported(d, event.status)
    node = d.nodes.get(event.uid)
    if node is None or (node.probed is not None and node.probed.op > event.op):
        return
    life = event.status.incarnation if isinstance(event, ProbeAnswered) else ""
    d.put(replace(node, probed=Probed(answer=_answer(event), op=event.op, at_s=d.now, incarnation=life)))


def _answer(event: ProbeOutcome) -> Answer:
    match event:
        case ProbeAnswered():
            return Answer.ANSWERED
        case ProbeRefused():
            return Answer.REFUSED
        case ProbeBroken():
            return Answer.BROKEN
        case ProbeTimedOut():
            return Answer.TIMED_OUT


def world_listed(d: Draft, event: WorldListed) -> int:
    """Make the view of nodes equal to the listing; returns how many nodes it had wrong."""
    before = {uid: (n.registered, n.incarnation) for uid, n in d.nodes.items()}
    listed = {n.info.uid for n in event.nodes}
    for uid in [u for u, n in d.nodes.items() if n.registered and u not in listed]:
        node_vanished(d, NodeVanished(uid=uid, revision=event.revision))
    for item in event.nodes:
        node_appeared(d, NodeAppeared(info=item.info, revision=item.revision))
    for status in event.statuses:
        status_reported(d, status)
    after = {uid: (n.registered, n.incarnation) for uid, n in d.nodes.items()}
    return sum(before.get(uid, (False, "")) != what for uid, what in after.items())

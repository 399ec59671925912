"""The incident that is being handled: opened at the diagnosis, added to as the answer takes effect, closed by the first step
after it. PURE.

Its id is made of the generation it struck, so a successor that diagnoses the same fault writes the same incident.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from surefoot.controller.core.decisions import OpenIncident, UpdateIncident
from surefoot.controller.core.draft import Draft
from surefoot.controller.core.standing import all_begun, least_finished
from surefoot.controller.core.state import Fault, Tracked
from surefoot.controller.wire import Incident, Plan

EVIDENCE_MAX = 32
"""Lines of evidence kept; a job of thousands of ranks can lose them all at once."""


def incident_id(generation: int) -> str:
    """``inc-0004``: generation 4 was struck."""
    return f"inc-{generation:04d}"


def open_incident(d: Draft, fault: Fault, *, opened_s: float, budget_left: int | None) -> None:
    """A fault was diagnosed; `opened_s` is when it was first suspected."""
    assert d.plan is not None
    close(d)
    more = len(fault.evidence) - EVIDENCE_MAX
    incident = Incident(
        id=incident_id(d.plan.generation),
        fault=fault.kind,
        cause=fault.cause,
        generation=d.plan.generation,
        step=fault.step,
        node=fault.node,
        rank=fault.rank,
        evidence=(*fault.evidence[:EVIDENCE_MAX], *([f"and {more} more"] if more > 0 else [])),
        rule=fault.rule,
        decided_s=d.now - opened_s,
        budget_left=budget_left,
    )
    d.set(tracked=Tracked(incident=incident, opened_s=opened_s))
    d.decide(OpenIncident(token=d.token, incident=incident, cause_id=incident.id))


def _update(d: Draft, **changes: object) -> None:
    tracked = d.s.tracked
    if tracked is None or d.s.token is None:
        return
    incident = msgspec.structs.replace(tracked.incident, **changes)
    d.set(tracked=None if incident.closed else replace(tracked, incident=incident))
    d.decide(UpdateIncident(token=d.token, incident=incident, cause_id=incident.id))


def decided(d: Draft, decision: str, *, budget_left: int | None = None) -> None:
    """What will be done, where it is not a new generation."""
    _update(d, decision=decision, budget_left=budget_left)


def planned(d: Draft, plan: Plan) -> None:
    """The plan that answers the incident is in force."""
    if d.s.tracked is None:
        return
    nodes = ", ".join(m.uid for m in plan.members)
    tiers = {"memory": "in memory", "object_store": "in the object store", "nothing": "(the beginning)"}
    start = f"step {plan.start.step} {tiers[plan.start.tier]}"
    _update(
        d,
        decision=f"{plan.reason.kind}: generation {plan.generation} on {nodes} from {start}",
        new_generation=plan.generation,
        start=plan.start,
        planned_s=d.now - d.s.tracked.opened_s,
    )


def follow(d: Draft) -> None:
    """Note when all ranks of the new generation have begun, and when they have finished their first step."""
    tracked, plan = d.s.tracked, d.plan
    if tracked is None or plan is None or tracked.incident.new_generation != plan.generation:
        return
    since_s = d.now - tracked.opened_s
    if tracked.incident.running_s is None and all_begun(d.nodes, plan):
        _update(d, running_s=since_s)
    least = least_finished(d.nodes, plan)
    if least is not None and least > plan.start.step:
        _update(d, first_step_s=since_s, closed=True)


def close(d: Draft) -> None:
    """Whatever is still open ends here: another fault, or the end of the job, took its place."""
    _update(d, closed=True)


def adopt(d: Draft, incidents: tuple[Incident, ...]) -> None:
    """A successor goes on with the newest incident that its predecessor left open. Its times go on from now: two controllers'
    clocks are not compared, so what the predecessor had measured is kept and what it had not is counted from here."""
    left = [i for i in incidents if not i.closed]
    if left:
        newest = max(left, key=lambda i: i.generation)
        d.set(tracked=Tracked(incident=newest, opened_s=d.now - (newest.planned_s or 0.0)))

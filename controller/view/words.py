"""What is said of a job: incidents and generations in a line, the story, what goes on now, and what is new. PURE."""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.controller import wire
from surefoot.controller.view.types import (
    QUIET_S,
    CommitView,
    EventView,
    GenerationView,
    JobFacts,
    JobPhase,
    JobView,
    NodeView,
)

_FAULTS = {
    "rank_exit": "rank {rank} on {node} died",
    "rank_exception": "rank {rank} on {node} raised an error",
    "hang": "rank {rank} on {node} stopped making progress",
    "node_loss": "node {node} was lost",
    "stopped": "all ranks were told to stop",
    "step_damaged": "a committed step turned out damaged",
}

_TIERS = {
    "nothing": "from the beginning",
    "memory": "from step {step} in memory",
    "peer": "from step {step} in a peer's memory",
    "object_store": "from checkpoint {step} in the object store",
}


def _generation_text(g: GenerationView) -> str:
    start = _TIERS[g.restored_from].format(step=g.start_step)
    where = f" on {', '.join(g.members)}" if g.members else ""
    if g.kind == "burnt":
        return f"generation {g.generation} is burnt: {g.reason}"
    why = f"answers {g.incident}" if g.incident else g.reason
    return f"generation {g.generation}{where} {start}: {why}"


def incident_text(incident: wire.Incident) -> str:
    """One line: what struck, what was done, and how long it took."""
    first = incident.evidence[0] if incident.evidence else ""
    # The evidence names who and where as well: once is enough.
    first = re.sub(rf"^rank {incident.rank} on {re.escape(incident.node)}\b( \(initiating\))?:? *", "", first)
    evidence = f" ({first})" if first else ""
    answer = f"; {incident.decision}" if incident.decision else ""
    took = (
        f"; stepping again after {incident.first_step_s:.1f} s" if incident.first_step_s is not None else ""
    )
    return f"step {incident.step}: {_what(incident)}{evidence}{answer}{took}"


def _what(incident: wire.Incident) -> str:
    what = _FAULTS.get(incident.fault, incident.fault.replace("_", " "))
    if incident.rank is None and "{rank}" in what:  # nobody knows whose fault a hang is
        what = what.replace("rank {rank} on {node}", "the job")
    return what.format(rank=incident.rank, node=incident.node or "?")


def incident_story(incident: wire.Incident) -> list[str]:
    """Lines that tell the whole of one incident."""
    i = incident
    charged = "" if i.cause == "none" else f"; charged to the budget of {i.cause} failures"
    left = "" if i.budget_left is None else f" ({i.budget_left} left)"
    start = (
        ""
        if i.start is None
        else f" from step {i.start.step} of generation {i.start.generation} ({i.start.tier})"
    )
    times = (
        ("decided", i.decided_s),
        ("planned", i.planned_s),
        ("running", i.running_s),
        ("first step", i.first_step_s),
    )
    rows = [
        ("incident", f"{i.id} ({'closed' if i.closed else 'open'})"),
        ("what", _what(i)),
        ("struck", f"generation {i.generation}, step {i.step}"),
        *(("evidence", line) for line in i.evidence),
        ("cause", f"{i.fault}{charged}{left}" if i.fault else ""),
        ("rule", i.rule),
        ("decision", i.decision),
        ("answer", "" if i.new_generation is None else f"generation {i.new_generation}{start}"),
        ("cost", ", ".join(f"{name} after {s:.2f} s" for name, s in times if s is not None)),
    ]
    return [f"{name + ':':<10} {text}" for name, text in rows if text]


def events_of(
    generations: Sequence[GenerationView],
    committed: Sequence[CommitView],
    incidents: Sequence[wire.Incident],
    outcome: wire.Outcome | None,
) -> tuple[EventView, ...]:
    """The story, oldest first: each generation, what it committed, and the incident that ended it."""
    events: list[tuple[tuple[int, int, int], EventView]] = []
    for g in generations:
        event = EventView(
            kind="generation", generation=g.generation, step=g.start_step, text=_generation_text(g)
        )
        events.append(((g.generation, 0, 0), event))
    for c in committed:
        event = EventView(
            kind="commit", generation=c.generation, step=c.step, text=f"step {c.step} is committed"
        )
        events.append(((c.generation, 1, c.step), event))
    for i in incidents:
        event = EventView(
            kind="incident", generation=i.generation, step=i.step, text=f"{i.id}: {incident_text(i)}"
        )
        events.append(((i.generation, 2, i.step), event))
    ordered = [event for _, event in sorted(events, key=lambda pair: pair[0])]
    if outcome is not None:
        text = f"{outcome.state}: {outcome.reason}"
        ordered.append(EventView(kind="outcome", generation=outcome.generation, step=outcome.step, text=text))
    return tuple(ordered)


def now_text(
    facts: JobFacts,
    phase: JobPhase,
    hold: wire.Held | None,
    plan: wire.Plan | None,
    nodes: Sequence[NodeView],
    led: bool,
    incidents: Sequence[wire.Incident],
    outcome: wire.Outcome | None,
    generations: Sequence[GenerationView],
) -> str:
    """What is happening and why, in one sentence. `led`: some controller leads."""
    match phase:
        case "done" | "failed":
            return outcome.reason if outcome else "all steps are committed"
        case "unknown" if not generations:
            return "nothing is recorded yet"
        case "unknown":
            return "no etcd to ask: this is the committed history; ranks may well be training on"
        case "waiting" if not led:
            return "no controller leads yet"
        case "waiting":
            up = sum(node.state != "warming" for node in nodes)
            return f"waiting for nodes: {up} ready" + (f", {facts.nodes} wanted" if facts.nodes else "")
        case "forming":
            open_incidents = [i for i in incidents if not i.closed]
            if not led:
                return "a new generation is due, and waits for a controller to lead"
            if open_incidents:
                return f"forming a new generation: {incident_text(open_incidents[-1])}"
            return "forming a new generation"
        case "starting":
            return _starting(plan, generations)
        case "held":
            return f"held: {hold.reason}" if hold is not None else "held"
        case "running":
            return _running(plan, nodes, led)


def _starting(plan: wire.Plan | None, generations: Sequence[GenerationView]) -> str:
    view = next((g for g in generations if plan and g.generation == plan.generation), None)
    return f"starting {_generation_text(view)}" if view else "starting a generation"


def _running(plan: wire.Plan | None, nodes: Sequence[NodeView], led: bool) -> str:
    quiet = [
        (node, rank)
        for node in nodes
        for rank in node.ranks
        if rank.phase in ("step", "data", "save") and rank.phase_age_s >= QUIET_S
    ]
    if quiet:
        node, rank = max(quiet, key=lambda pair: pair[1].phase_age_s)
        return f"rank {rank.rank} on {node.uid} has shown no progress for {rank.phase_age_s:.0f} s (phase {rank.phase})"
    if not led:
        return "training on; no controller leads at the moment"
    if plan is None or plan.reason.kind == "first_start":
        return "training"
    return f"training; last restart: {plan.reason.detail or plan.reason.fault or plan.reason.kind}"


def news(previous: JobView | None, current: JobView) -> list[str]:
    """Lines for a log: what happened between two snapshots of a job. Its outcome is left to whoever asked for the run."""
    seen = {event.text for event in previous.events} if previous else set[str]()
    before = {i.id: i for i in previous.incidents} if previous else {}
    told_apart = ("incident", "outcome")
    lines = [line for i in current.incidents for line in _incident_news(before.get(i.id), i)]
    lines += [e.text for e in current.events if e.kind not in told_apart and e.text not in seen]
    noted = {(n.uid, n.note) for n in previous.nodes} if previous else set[tuple[str, str]]()
    lines += [f"{n.uid}: {n.note}" for n in current.nodes if n.note and (n.uid, n.note) not in noted]
    if current.phase in ("waiting", "held") and (previous is None or previous.now != current.now):
        lines.append(current.now)
    return lines


def _incident_news(before: wire.Incident | None, now: wire.Incident) -> list[str]:
    """An incident is told once it is decided upon, and again when it is over."""
    told = before is not None and bool(before.decision or before.closed)
    if not told and (now.decision or now.closed):
        return [f"{now.id}: {incident_text(now)}"]
    if before is not None and before.first_step_s is None and now.first_step_s is not None:
        return [f"{now.id}: stepping again {now.first_step_s:.1f} s after it was noticed"]
    return []

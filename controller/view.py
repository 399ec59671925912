"""What a job looks like: a pure function from what etcd and the object store hold to one frozen `JobView`, and its picture.

`observe` decides nothing and asks nobody: `surefoot status`, `surefoot run` and the demo feed it what they listed, print
the very snapshot with ``--json``, and draw it with `render`. With etcd gone (``keys=None``) it shows what the object store
proves. rich is imported only where something is drawn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from surefoot.ckpt.errors import LineageError
from surefoot.ckpt.record import ManifestRef, Record, lineage
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.store import KeyValue

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

JobPhase = Literal["waiting", "forming", "starting", "running", "held", "done", "failed", "unknown"]
"""``waiting``: no plan yet; ``forming``: a record without its plan, or a fault not yet answered; ``starting``: not all ranks
of the plan have begun a step; ``held``: what etcd, records and agents say contradicts itself, and until that is mended nothing
is decided; ``unknown``: etcd is not there to say."""

QUIET_S = 3.0
"""A rank without a sign of progress for this long is mentioned. A matter of display only: verdicts are the detectors'."""

LOSSES_MAX = 2000
"""How many points of the loss curve a view carries along."""

EVENTS_SHOWN = 7


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the snapshot."""


class JobFacts(_View, frozen=True, kw_only=True):
    """What the JobSpec says, as far as a view needs it; `steps` and `nodes` are None where no job file is at hand."""

    name: str
    steps: int | None
    nodes: int | None
    root: str


class RankView(_View, frozen=True, kw_only=True):
    """One rank as its agent last told. `ended`: how its process ended, in words; empty while it lives."""

    rank: int
    pid: int
    phase: wire.Phase
    step: int
    phase_age_s: float
    loss: float | None
    step_s: float | None
    ended: str = ""


class NodeView(_View, frozen=True, kw_only=True):
    """One node. `role`: ``member`` of the plan in force, ``standby``, ``lost`` (a member whose keys are gone), or ``free`` as
    long as there is no plan."""

    uid: str
    role: Literal["member", "standby", "lost", "free"]
    state: str
    generation: int
    pid: int | None
    ranks: tuple[RankView, ...]
    snapshot_step: int | None
    """The newest step of which the node holds the snapshots of all its own ranks."""
    copies_step: int | None
    """The newest step of which it holds a copy for another node."""
    note: str


class CommitView(_View, frozen=True, kw_only=True):
    """A checkpoint on the lineage."""

    generation: int
    step: int


class GenerationView(_View, frozen=True, kw_only=True):
    """One record: a generation, why it came to be, and what it started from."""

    generation: int
    kind: str
    members: tuple[str, ...]
    start_generation: int
    start_step: int
    restored_from: Literal["nothing", "memory", "peer", "object_store"]
    reason: str
    incident: str = ""
    """The incident that it answers; empty where there is none."""


class EventView(_View, frozen=True, kw_only=True):
    """One line of the story. Order is by generation and step, never by clocks."""

    kind: Literal["generation", "commit", "incident", "outcome"]
    generation: int
    step: int
    text: str


class LossPoint(_View, frozen=True, kw_only=True):
    step: int
    loss: float


class JobView(_View, frozen=True, kw_only=True):
    """A snapshot of one job. `step` is the newest step any rank is in (or, done, the last one)."""

    job: str
    root: str
    phase: JobPhase
    now: str
    """What is happening and why, in one sentence."""
    leader: str | None
    generation: int
    """The generation in force; 0 before the first."""
    reason: str
    step: int
    steps: int | None
    loss: float | None
    steps_per_s: float | None
    committed: CommitView | None
    nodes: tuple[NodeView, ...]
    generations: tuple[GenerationView, ...]
    incidents: tuple[wire.Incident, ...]
    events: tuple[EventView, ...]
    losses: tuple[LossPoint, ...]
    outcome: wire.Outcome | None


# ---------------------------------------------------------------- from what is listed to the snapshot


def observe(
    facts: JobFacts,
    *,
    keys: Sequence[KeyValue] | None,
    records: Mapping[int, Record],
    manifests: Sequence[ManifestRef],
    previous: JobView | None = None,
    incidents: Sequence[wire.Incident] = (),
    run_id: str | None = None,
) -> JobView:
    """Put one snapshot together.

    Args:
        facts: of the JobSpec.
        keys: everything under the job's prefix in etcd; None if etcd cannot be asked.
        records: by generation, as far as they can be read.
        manifests: all that exist, in any order; those off the lineage are left out here.
        previous: an earlier snapshot, whose loss curve is carried on.
        incidents: those of the journal; etcd's, which are newer, win.
        run_id: the outcome of any other run is left out; None: whatever stands there.
    """
    layout = Keys(facts.name)
    held = {kv.key: kv.value for kv in keys or ()}
    pointer = _read(wire.PlanPointer, held.get(layout.plan))
    outcome = outcome_of(held.get(layout.outcome), run_id)
    hold = _read(wire.Held, held.get(layout.held))
    infos = _read_all(wire.NodeInfo, held, layout.nodes)
    statuses = _read_all(wire.NodeStatus, held, layout.statuses)
    told = {i.id: i for i in incidents} | {
        i.id: i for i in _read_all(wire.Incident, held, layout.incidents).values()
    }
    plans = _plans(records)
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
        or _now(facts, phase, hold, plan, nodes, leader is not None, known_incidents, outcome, generations),
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
        events=_events(generations, committed, known_incidents, outcome),
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


def outcome_of(value: bytes | None, run_id: str | None) -> wire.Outcome | None:
    """The outcome that stands in etcd, unless it is that of another run than `run_id`."""
    outcome = _read(wire.Outcome, value)
    return outcome if outcome is not None and (run_id is None or outcome.run_id in ("", run_id)) else None


def told(layout: Keys, items: Sequence[KeyValue]) -> tuple[int, tuple[int, int]]:
    """The generation that the plan's key names, and the newest commit, (generation, step), that any node reports."""
    held = {kv.key: kv.value for kv in items}
    pointer = _read(wire.PlanPointer, held.get(layout.plan))
    commits = [s.committed for s in _read_all(wire.NodeStatus, held, layout.statuses).values() if s.committed]
    acknowledged = [(c.generation, c.step) for c in commits if c.fenced_by is None and not c.failure]
    return pointer.generation if pointer else 0, max(acknowledged, default=(0, 0))


T = TypeVar("T")


def _read(kind: type[T], value: bytes | None) -> T | None:
    """A value, or None where there is none or it is of a future format: a view never fails over one key."""
    if value is None:
        return None
    try:
        return wire.decode(kind, value)
    except msgspec.DecodeError:
        return None


def _read_all(kind: type[T], held: Mapping[str, bytes], prefix: str) -> dict[str, T]:
    """All readable values under a prefix, by the rest of the key."""
    read = {
        key.removeprefix(prefix): _read(kind, value) for key, value in held.items() if key.startswith(prefix)
    }
    return {name: value for name, value in read.items() if value is not None}


def _committed(
    records: Mapping[int, Record], manifests: Sequence[ManifestRef]
) -> tuple[list[CommitView], str]:
    """The lineage, ascending; and what is wrong with the records where they contradict each other."""
    try:
        return [CommitView(generation=m.generation, step=m.step) for m in lineage(records, manifests)], ""
    except LineageError as e:
        return [], str(e)


def _plans(records: Mapping[int, Record]) -> dict[int, wire.Plan]:
    plans: dict[int, wire.Plan] = {}
    for generation, record in records.items():
        try:
            plans[generation] = msgspec.convert(record.plan, wire.Plan)
        except msgspec.ValidationError:
            continue  # made by `ckpt` alone, without a plan, or by a newer controller
    return plans


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
        loss=status.loss,
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


# ---------------------------------------------------------------- words


_FAULTS = {
    "rank_exit": "rank {rank} on {node} died",
    "rank_exception": "rank {rank} on {node} raised an error",
    "hang": "rank {rank} on {node} stopped making progress",
    "node_loss": "node {node} was lost",
    "step_damaged": "a committed step turned out damaged",
}

_TIERS = {
    "nothing": "from the beginning",
    "memory": "from step {step} in memory",
    "peer": "from step {step} in a peer's memory",
    "object_store": "from checkpoint {step} in the object store",
}


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


def _events(
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


def _now(
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
    seen = {event.text for event in previous.events} if previous else set()
    before = {i.id: i for i in previous.incidents} if previous else {}
    told_apart = ("incident", "outcome")
    lines = [line for i in current.incidents for line in _incident_news(before.get(i.id), i)]
    lines += [e.text for e in current.events if e.kind not in told_apart and e.text not in seen]
    noted = {(n.uid, n.note) for n in previous.nodes} if previous else set()
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


# ---------------------------------------------------------------- the picture

_PHASE_STYLE = {
    "start": "yellow",
    "restore": "yellow",
    "compile": "yellow",
    "data": "blue",
    "step": "green",
    "save": "cyan",
    "eval": "magenta",
    "done": "bright_green",
}
_JOB_STYLE = {
    "waiting": "yellow",
    "forming": "bold yellow",
    "starting": "yellow",
    "running": "bold green",
    "held": "bold red",
    "done": "bold bright_green",
    "failed": "bold red",
    "unknown": "magenta",
}
_EVENT_STYLE = {"generation": "yellow", "commit": "green", "incident": "red", "outcome": "bold"}
_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks, each the mean of its share; higher is more."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def render(view: JobView, *, width: int = 100) -> RenderableType:
    """The whole picture for a terminal of `width` columns."""
    from rich.console import Group

    parts: list[RenderableType] = [_header(view), _progress(view, width), _sentence(view)]
    if view.nodes:
        parts.append(_node_table(view))
    parts.extend(_event_line(event) for event in view.events[-EVENTS_SHOWN:])
    return Group(*parts)


def _header(view: JobView) -> Text:
    from rich.text import Text

    line = Text.assemble(
        (view.job, "bold"), "  ", (f" {view.phase.upper()} ", f"reverse {_JOB_STYLE[view.phase]}")
    )
    facts = [
        ("generation", str(view.generation) if view.generation else "–"),
        ("leader", view.leader or "none"),
        ("step", f"{view.step}/{view.steps or '?'}"),
        ("loss", f"{view.loss:.4f}" if view.loss is not None else "–"),
        ("steps/s", f"{view.steps_per_s:.1f}" if view.steps_per_s else "–"),
        ("committed", str(view.committed.step) if view.committed else "–"),
    ]
    for name, value in facts:
        line.append(f"   {name} ", style="dim")
        line.append(value, style="bold")
    return line


def _progress(view: JobView, width: int) -> Text:
    """The bar: committed steps, then those that memory holds, then the rest; the loss curve behind it."""
    from rich.text import Text

    room = max(10, width // 2)
    committed = view.committed.step if view.committed else 0
    in_memory = max(view.step if view.phase == "done" else view.step - 1, committed, 0)
    steps = view.steps or max(view.step, 1)
    durable = room * min(committed, steps) // steps
    reached = room * min(in_memory, steps) // steps
    line = Text()
    line.append("━" * durable, style="bright_green")
    line.append("━" * (reached - durable), style="cyan")
    line.append("─" * (room - reached), style="bright_black")
    curve = sparkline([p.loss for p in view.losses], max(0, width - room - 4))
    line.append(f"  {curve}", style="magenta")
    return line


def _sentence(view: JobView) -> Text:
    from rich.text import Text

    return Text(view.now, style="italic")


def _node_table(view: JobView) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("node", "state", "ranks", "in memory", "copies", "note"):
        table.add_column(title, no_wrap=title != "note")
    for node in view.nodes:
        style = {"lost": "red", "standby": "dim", "member": "", "free": ""}[node.role]
        state = (
            f"standby, {node.state}"
            if node.role == "standby"
            else "lost"
            if node.role == "lost"
            else node.state
        )
        table.add_row(
            Text(node.uid, style=style or "bold"),
            Text(state, style=style),
            Text("   ").join(_rank_cell(rank) for rank in node.ranks),
            _step_cell(node.snapshot_step),
            _step_cell(node.copies_step),
            Text(node.note, style="dim"),
        )
    return table


def _step_cell(step: int | None) -> Text:
    from rich.text import Text

    return Text("–" if step is None else f"step {step}", style="dim" if step is None else "")


def _rank_cell(rank: RankView) -> Text:
    from rich.text import Text

    if rank.ended and rank.phase != "done":
        return Text(f"{rank.rank} ✗ {rank.ended}"[:40], style="red")
    style = "bold red" if rank.phase_age_s >= QUIET_S and rank.phase == "step" else _PHASE_STYLE[rank.phase]
    return Text.assemble((f"{rank.rank} ", "bold"), (f"{rank.phase:<7} {rank.step:>4}", style))


def _event_line(event: EventView) -> Text:
    from rich.text import Text

    mark = {"generation": "▸", "commit": "✓", "incident": "!", "outcome": "■"}[event.kind]
    line = Text(overflow="ellipsis", no_wrap=True)
    line.append(f"{mark} ", style=_EVENT_STYLE[event.kind])
    line.append(event.text)
    return line

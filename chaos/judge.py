"""From the evidence of two runs, one undisturbed and one with faults, to a verdict. PURE but for reading the objects.

`judge` compares what was committed (through `checkers`, which shares no code with the product) and what every rank traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.chaos import checkers
from surefoot.chaos.checkers import Json
from surefoot.chaos.faults import Fired
from surefoot.chaos.trace import Event

RESTARTS = frozenset({"rank_kill", "rank_hang", "node_loss"})
"""The faults after which a new generation must come up."""

EXPECTED_TIER = {"rank_kill": "memory", "rank_hang": "memory", "node_loss": "peer"}
RECOMPUTED_MAX = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """What a run left: its objects, the traces of its ranks and of its controllers, in order of time."""

    objects: checkers.Objects
    ranks: Sequence[Event]
    controllers: Sequence[Event]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """One fault as it was survived. Times are seconds from the injection, on the machine's monotonic clock.

    `detected_s`: until a controller knew (for a killed controller: until another one led). The rest is None where nothing
    restarts: `first_step_s` until every rank had finished its first step of the next generation, `steps_recomputed`
    finished steps that were executed again, `restored_from` memory, peer or object_store.
    """

    kind: str
    step: int
    where: str
    detected_s: float | None
    first_step_s: float | None = None
    steps_recomputed: int | None = None
    restored_from: str | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the demo prints with ``--json``, and the reasons why it is not green (empty: it is)."""

    steps: int
    generations: int
    faults: tuple[FaultReport, ...]
    loss_identical: bool
    params_identical: bool
    samples: Mapping[str, int]
    goodput: float
    wall_s: float
    failures: tuple[str, ...]

    def as_json(self) -> Json:
        return {**asdict(self), "ok": not self.failures}


# ---------------------------------------------------------------- one fault


def next_generation(fired: Fired, trace: Iterable[Event], world_size: int) -> tuple[int, float] | None:
    """The first generation after the struck one in which every rank finished a step, and when the last of them had."""
    first: dict[int, dict[int, float]] = {}
    for event in trace:
        if event["kind"] == "step_end" and event["generation"] > fired.generation and event["t"] > fired.at_s:
            first.setdefault(event["generation"], {}).setdefault(event["rank"], event["t"])
    whole = {g: max(ranks.values()) for g, ranks in first.items() if len(ranks) == world_size}
    return min(whole.items()) if whole else None


def restored_from(record: Json) -> str | None:
    """Where the ranks of a generation took their state from, as its record says."""
    plan = record["plan"]
    tier = plan["start"]["tier"]
    if tier != "memory":
        return tier if tier == "object_store" else None
    runs = {
        rank: member["uid"]
        for member in plan["members"]
        for rank in range(member["first_rank"], member["first_rank"] + member["ranks"])
    }
    return "memory" if all(runs[s["rank"]] == s["uid"] for s in plan["sources"]) else "peer"


def finished_before(trace: Iterable[Event], generation: int, start_step: int) -> int:
    """Steps after `start_step` that some rank had finished in a generation before `generation`."""
    done = {e["step"] for e in trace if e["kind"] == "step_end" and e["generation"] < generation}
    return sum(step > start_step for step in done)


def detected_at(fired: Fired, controllers: Iterable[Event]) -> float | None:
    """When a controller first knew: it opened an incident; or, after the death of the leader, another one was elected."""
    kind = "elected" if fired.kind == "controller_kill" else "incident"
    return next(
        (
            e["t"]
            for e in controllers
            if e["kind"] == kind and e["t"] > fired.at_s and e["pid"] not in fired.pids
        ),
        None,
    )


def report_fault(fired: Fired, run: RunEvidence, recs: Mapping[int, Json], world_size: int) -> FaultReport:
    """What became of one fault."""
    seen = detected_at(fired, run.controllers)
    detected_s = None if seen is None else seen - fired.at_s
    facts: dict[str, Any] = {
        "kind": fired.kind,
        "step": fired.step,
        "where": fired.where,
        "detected_s": detected_s,
    }
    if fired.kind not in RESTARTS:
        return FaultReport(**facts)
    came_up = next_generation(fired, run.ranks, world_size)
    if came_up is None:
        return FaultReport(**facts)
    generation, at_s = came_up
    start = recs[generation]["start"]["step"]
    return FaultReport(
        **facts,
        generation=generation,
        first_step_s=at_s - fired.at_s,
        steps_recomputed=finished_before(run.ranks, generation, start),
        restored_from=restored_from(recs[generation]),
    )


def fault_failures(report: FaultReport) -> list[str]:
    """Why a fault was not survived as promised."""
    if report.detected_s is None:
        return [f"{report.kind}: no controller noticed it"]
    if report.kind not in RESTARTS:
        return []
    if report.first_step_s is None:
        return [f"{report.kind}: no later generation finished a step"]
    failures = []
    if report.restored_from != EXPECTED_TIER[report.kind]:
        failures.append(
            f"{report.kind}: restored from {report.restored_from}, not {EXPECTED_TIER[report.kind]}"
        )
    if report.steps_recomputed is None or report.steps_recomputed > RECOMPUTED_MAX:
        failures.append(
            f"{report.kind}: {report.steps_recomputed} steps were recomputed, at most {RECOMPUTED_MAX} is promised"
        )
    return failures


# ---------------------------------------------------------------- the whole


def steps_while(trace: Iterable[Event], since_s: float, until_s: float) -> int:
    """Steps that some rank finished between two moments."""
    return len({e["step"] for e in trace if e["kind"] == "step_end" and since_s < e["t"] < until_s})


def judge(
    reference: RunEvidence,
    disturbed: RunEvidence,
    fired: Sequence[Fired],
    expected: Sequence[Sequence[str]],
    *,
    world_size: int,
    kinds: Sequence[str],
) -> Verdict:
    """Compare the two runs; `expected[t - 1]` are the sample ids of step t, `kinds` the faults that had to take place."""
    reference_recs, disturbed_recs = checkers.records(reference.objects), checkers.records(disturbed.objects)
    reference_last = checkers.newest_manifest(reference.objects, reference_recs)
    disturbed_last = checkers.newest_manifest(disturbed.objects, disturbed_recs)
    steps = len(expected)

    reports = tuple(report_fault(f, disturbed, disturbed_recs, world_size) for f in fired)
    loss_diff = checkers.differing_losses(
        checkers.step_losses(reference.ranks), checkers.step_losses(disturbed.ranks)
    )
    param_diff = checkers.differing_tensors(
        checkers.tensors(reference.objects, reference_last),
        checkers.tensors(disturbed.objects, disturbed_last),
    )
    rows = checkers.committed_rows(disturbed.objects, disturbed_last, disturbed_recs)
    samples = checkers.judge_samples(expected, rows)
    reference_rows = checkers.committed_rows(reference.objects, reference_last, reference_recs)
    ledger_losses = {(r["step"], r.get("loss")) for r in rows}

    failures = [f"{kind}: it did not take place" for kind in kinds if kind not in [f.kind for f in fired]]
    for report in reports:
        failures += fault_failures(report)
    for fault, report in zip(fired, reports, strict=True):
        if fault.kind == "controller_kill" and report.detected_s is not None:
            last = max((e["step"] for e in disturbed.ranks if e["kind"] == "step_end"), default=0)
            if last < steps and not steps_while(disturbed.ranks, fault.at_s, fault.at_s + report.detected_s):
                failures.append("controller_kill: training stood still without a leader")
    if loss_diff:
        failures.append(f"the loss differs from the reference in steps {_some(loss_diff)}")
    if ledger_losses != {(r["step"], r.get("loss")) for r in reference_rows}:
        failures.append("the losses committed by the two runs differ")
    if param_diff:
        failures.append(f"final tensors differ: {_some(param_diff)}")
    if disturbed_last["step"] != steps or reference_last["step"] != steps:
        failures.append(
            f"the last committed steps are {reference_last['step']} (reference) and {disturbed_last['step']}, not {steps}"
        )
    if not samples.exact:
        failures.append(
            f"samples are not committed exactly once: {samples.missing} missing, {samples.repeated} repeated, "
            f"in the wrong step {_some(samples.misplaced)}"
        )
    if not checkers.judge_samples(expected, reference_rows).exact:
        failures.append("the reference run itself did not commit every sample exactly once")
    return Verdict(
        steps=disturbed_last["step"],
        generations=len(disturbed_recs),
        faults=reports,
        loss_identical=not loss_diff,
        params_identical=not param_diff,
        samples={
            "expected": samples.expected,
            "committed": samples.committed,
            "missing": samples.missing,
            "repeated": samples.repeated,
        },
        goodput=checkers.committed_seconds(disturbed.ranks, disturbed_recs) / disturbed.wall_s,
        wall_s=disturbed.wall_s,
        failures=tuple(failures),
    )


def _some(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")

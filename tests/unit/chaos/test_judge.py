"""What the judge makes of one fault, from traces and records written by hand."""

from typing import Any

import pytest

from surefoot.chaos import judge as j
from surefoot.chaos.checkers import Objects
from surefoot.chaos.faults import Fired

WORLD = 2


def fired(kind: str = "rank_kill", at_s: float = 10.0, generation: int = 1) -> Fired:
    return Fired(kind=kind, at_s=at_s, generation=generation, step=5, pids=(77,), where="", proof=None)


def step_end(step: int, generation: int, rank: int, t: float) -> dict[str, Any]:
    return {"kind": "step_end", "step": step, "generation": generation, "rank": rank, "t": t, "loss": "0x1p0"}


def record(
    generation: int, step: int, tier: str = "memory", sources: dict[int, str] | None = None
) -> dict[str, Any]:
    members = [{"uid": f"n{i}", "first_rank": i, "ranks": 1} for i in range(WORLD)]
    held = {0: "n0", 1: "n1"} | (sources or {})
    plan = {
        "members": members,
        "start": {"generation": generation - 1, "step": step, "tier": tier},
        "sources": [{"rank": r, "uid": u} for r, u in held.items()],
    }
    return {"generation": generation, "start": {"generation": generation - 1, "step": step}, "plan": plan}


BEFORE = [step_end(s, 1, r, float(s)) for s in range(1, 5) for r in range(WORLD)]


def run(ranks: list[dict[str, Any]], controllers: list[dict[str, Any]]) -> j.RunEvidence:
    return j.RunEvidence(objects=Objects("file:///nowhere"), ranks=ranks, controllers=controllers, wall_s=1.0)


INCIDENT = {"kind": "incident", "t": 10.2, "pid": 1}


def test_a_killed_rank_restored_from_memory():
    after = [step_end(5, 2, 0, 12.0), step_end(5, 2, 1, 12.5)]
    report = j.report_fault(fired(), run(BEFORE + after, [INCIDENT]), {2: record(2, 4)}, WORLD)
    assert (report.generation, report.steps_recomputed, report.restored_from) == (2, 0, "memory")
    assert report.detected_s == pytest.approx(0.2)
    assert report.first_step_s == pytest.approx(2.5)
    assert j.fault_failures(report) == []


def test_a_generation_that_never_stepped_as_a_whole_does_not_count():
    after = [step_end(5, 2, 0, 12.0), step_end(4, 3, 0, 14.0), step_end(4, 3, 1, 14.0)]
    report = j.report_fault(fired(), run(BEFORE + after, [INCIDENT]), {3: record(3, 3)}, WORLD)
    assert (report.generation, report.steps_recomputed) == (3, 2)
    assert "recomputed" in j.fault_failures(report)[0]


@pytest.mark.parametrize(
    ("rec", "tier"),
    [
        (record(2, 4), "memory"),
        (record(2, 4, sources={1: "n0"}), "peer"),
        (record(2, 4, tier="object_store"), "object_store"),
        (record(2, 0, tier="nothing"), None),
    ],
)
def test_where_the_state_came_from(rec: dict[str, Any], tier: str | None):
    assert j.restored_from(rec) == tier


@pytest.mark.parametrize("kind", ["rank_kill", "rank_hang", "node_loss"])
def test_the_wrong_tier_is_a_failure(kind: str):
    wrong = record(2, 4, sources={1: "n0"}) if kind != "node_loss" else record(2, 4)
    after = [step_end(5, 2, r, 12.0) for r in range(WORLD)]
    report = j.report_fault(fired(kind), run(BEFORE + after, [INCIDENT]), {2: wrong}, WORLD)
    assert "restored from" in j.fault_failures(report)[0]


def test_nobody_noticing_or_nothing_coming_up_is_a_failure():
    assert "noticed" in j.fault_failures(j.report_fault(fired(), run(BEFORE, []), {}, WORLD))[0]
    assert (
        "no later generation"
        in j.fault_failures(j.report_fault(fired(), run(BEFORE, [INCIDENT]), {}, WORLD))[0]
    )


def test_a_killed_controller_is_detected_by_the_election_of_another():
    elected = [{"kind": "elected", "t": 5.0, "pid": 77}, {"kind": "elected", "t": 18.0, "pid": 78}]
    report = j.report_fault(fired("controller_kill"), run(BEFORE, elected), {}, WORLD)
    assert report.detected_s == pytest.approx(8.0)
    assert (report.first_step_s, report.steps_recomputed, report.restored_from) == (None, None, None)
    assert j.fault_failures(report) == []

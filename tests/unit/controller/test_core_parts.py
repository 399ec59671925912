"""The parts of the core by themselves: placement, budget, causes, starting points, deadlines, invariants."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from surefoot.ckpt.record import Record, StartRef
from surefoot.controller import wire
from surefoot.controller.core import budget, detectors, invariants, placement, policy, starting
from surefoot.controller.core import decisions as dec
from surefoot.controller.core.settings import Settings
from surefoot.controller.core.state import KnownNode, Truth

SETTINGS = Settings(
    job="toy",
    run_id="run1",
    controller="a",
    code_version="t",
    spec_hash="h",
    steps=60,
    nodes=2,
    ranks_per_node=2,
    mesh={"dp": 4},
)


def known(uid: str, *, revision: int = 1, state: str = "parked", **facts: Any) -> KnownNode:
    info = wire.NodeInfo(
        uid=uid,
        incarnation="a",
        host="h",
        control_port=1,
        flight_port=2,
        pid=1,
        slots=facts.pop("slots", 2),
        code_version="t",
    )
    snapshots = facts.pop("snapshots", ())
    status = wire.NodeStatus(uid=uid, incarnation="a", seq=1, state=state, snapshots=snapshots)
    return KnownNode(uid=uid, info=info, registered=True, revision=revision, status=status, **facts)


def fleet(*nodes: KnownNode) -> dict[str, KnownNode]:
    return {n.uid: n for n in nodes}


def plan_of(generation: int, *uids: str, **reason: Any) -> wire.Plan:
    members = tuple(
        wire.Member(uid=u, incarnation="a", index=i, first_rank=2 * i, ranks=2) for i, u in enumerate(uids)
    )
    return wire.Plan(
        job="toy",
        run_id=reason.pop("run_id", "run1"),
        generation=generation,
        members=members,
        world_size=4,
        mesh={"dp": 4},
        start=wire.StartingPoint(),
        reason=wire.Reason(**({"kind": "restart"} | reason)),
        spec_hash="h",
        code_version="t",
        controller="a",
    )


def record(generation: int, start: tuple[int, int] = (0, 0), **reason: Any) -> Record:
    plan = plan_of(generation, "n0", "n1", **reason)
    return Record(
        generation=generation,
        start=StartRef(generation=start[0], step=start[1]),
        reason="r",
        created_by="a@1",
        plan=msgspec.to_builtins(plan),
    )


# ---------------------------------------------------------------- placement


def test_standby_with_the_copies_is_preferred() -> None:
    copy = wire.SnapshotRef(generation=1, step=5, rank=2, replica=True)
    nodes = fleet(known("n0"), known("n2", revision=2), known("n3", revision=3, snapshots=(copy,)))
    placed = placement.place(SETTINGS, nodes, plan_of(1, "n0", "n1"))
    assert isinstance(placed, placement.Placement)
    assert [m.uid for m in placed.members] == ["n0", "n3"]
    assert placed.replaced


def test_without_copies_the_longest_there_is_preferred() -> None:
    nodes = fleet(known("n0"), known("n2", revision=9), known("n3", revision=3))
    placed = placement.place(SETTINGS, nodes, plan_of(1, "n0", "n1"))
    assert isinstance(placed, placement.Placement)
    assert placed.members[1].uid == "n3"


@pytest.mark.parametrize(
    ("spare", "why"),
    [
        (known("n2", state="warming"), "n2 is warming"),
        (known("n2", state="leaving"), "n2 is leaving"),
        (known("n2", state="stopping"), "n2 is stopping"),
        (known("n2", slots=1), "n2 has room for 1 ranks, 2 are wanted"),
        (known("n2", lost="refused"), "n2 was lost (refused)"),
    ],
)
def test_spares_that_cannot_serve(spare: KnownNode, why: str) -> None:
    placed = placement.place(SETTINGS, fleet(known("n0"), spare), plan_of(1, "n0", "n1"))
    assert isinstance(placed, placement.Shortage)
    assert placed.detail == f"1 of 2 nodes are ready; {why}"


def test_former_member_keeps_its_place_whatever_it_is_doing() -> None:
    nodes = fleet(known("n2"), known("n1", state="running"), known("n0", state="starting"))
    placed = placement.place(SETTINGS, nodes, plan_of(1, "n0", "n1"))
    assert isinstance(placed, placement.Placement)
    assert [m.uid for m in placed.members] == ["n0", "n1"]
    assert not placed.replaced


# ---------------------------------------------------------------- budget


def test_burnt_records_are_not_charged(committed: Any) -> None:
    records = {
        1: record(1, kind="first_start"),
        2: record(2, (1, 5), cause="workload"),
        3: record(3, (1, 5), kind="burnt"),
        4: record(4, (3, 8), cause="infrastructure"),
    }
    assert budget.spent(records, [], "run1").restarts == {"workload": 1, "infrastructure": 1}
    assert budget.spent(records, [committed(3, 8)], "run1").restarts == {"infrastructure": 1}
    assert budget.spent(records, [committed(4, 9)], "run1").restarts == {}
    assert budget.spent(records, [], "run2").restarts == {}


def test_signatures_add_up_only_while_nothing_is_committed(committed: Any) -> None:
    records = {1: record(1, kind="first_start")} | {
        g: record(g, cause="workload", signature="E at x:1, step 1") for g in (2, 3)
    }
    account = budget.spent(records, [], "run1")
    verdict = budget.judge(SETTINGS, account, cause="workload", signature="E at x:1, step 1")
    assert isinstance(verdict, budget.CrashLoop)
    other = budget.judge(SETTINGS, account, cause="workload", signature="E at x:2, step 1")
    assert other == budget.Allowed(left=0)
    account = budget.spent(records, [committed(2, 4)], "run1")
    verdict = budget.judge(SETTINGS, account, cause="workload", signature="E at x:1, step 1")
    assert verdict == budget.Allowed(left=1)


def test_signature_leaves_out_what_varies() -> None:
    one = wire.ErrorReport(kind="workload", type="E", message="at 0x7f12 after 31 s")
    two = wire.ErrorReport(kind="workload", type="E", message="at 0x8f00 after 4 s")
    assert budget.signature_of(one, 3) == budget.signature_of(two, 3)
    assert budget.signature_of(one, 3) != budget.signature_of(one, 4)


# ---------------------------------------------------------------- causes


@pytest.mark.parametrize(
    ("report", "role", "fault", "cause"),
    [
        ({"signal": 9}, "INITIATING", "rank_exit", "infrastructure"),
        ({"signal": 11}, "INITIATING", "rank_exit", "workload"),
        ({"signal": 15}, "INITIATING", "rank_exit", "preemption"),
        ({"code": 0}, "INITIATING", "rank_exit", "workload"),
        ({"code": 3}, "INITIATING", "rank_exit", "workload"),
        ({"code": 77}, "CASCADE", "collective", "infrastructure"),
        ({"signal": 9, "teardown": True}, "TEARDOWN", "", "none"),
        ({"code": 1, "kind": "collective"}, "CASCADE", "collective", "infrastructure"),
        ({"signal": 6, "kind": "collective"}, "CASCADE", "collective", "infrastructure"),
        ({"code": 1, "kind": "data"}, "INITIATING", "rank_exception", "workload"),
        ({"code": 1, "kind": "checkpoint"}, "INITIATING", "rank_exception", "infrastructure"),
    ],
)
def test_reading_of_ends(report: dict[str, Any], role: str, fault: str, cause: str) -> None:
    kind = report.pop("kind", None)
    error = wire.ErrorReport(kind=kind, type="E", message="m") if kind else None
    rank = wire.RankStatus(rank=1, pid=1, phase="step", step=4, phase_age_s=0)
    reading = policy.read_exit("n0", rank, wire.ExitReport(error=error, **report))
    assert (reading.role.name, reading.fault, reading.cause) == (role, fault, cause)


# ---------------------------------------------------------------- starting points


def snapshots(generation: int, step: int, ranks: list[int], *, replica: bool = False) -> tuple[Any, ...]:
    return tuple(wire.SnapshotRef(generation=generation, step=step, rank=r, replica=replica) for r in ranks)


def truth(records: dict[int, Record], manifests: Any = ()) -> Truth:
    return Truth(records=records, hashes={}, manifests=tuple(manifests), listed_s=0)


def choose(nodes: dict[str, KnownNode], what: Truth, ran: int, failed: Any = None) -> Any:
    members = plan_of(9, "n0", "n1").members
    return starting.choose_start(SETTINGS, members, nodes, what, ran=ran, failed=failed or {}, avoided={})


def test_incomplete_snapshot_is_none() -> None:
    nodes = fleet(
        known("n0", snapshots=snapshots(1, 5, [0, 1]) + snapshots(1, 4, [0, 1])),
        known("n1", snapshots=snapshots(1, 5, [2]) + snapshots(1, 4, [2, 3])),
    )
    assert choose(nodes, truth({1: record(1)}), 1).point.step == 4


def test_snapshots_off_the_lineage_do_not_count() -> None:
    """Generation 1 went on to 9 after it was cut off at 5."""
    nodes = fleet(
        known("n0", snapshots=snapshots(1, 9, [0, 1]) + snapshots(2, 6, [0, 1])),
        known("n1", snapshots=snapshots(1, 9, [2, 3]) + snapshots(2, 6, [2, 3])),
    )
    start = choose(nodes, truth({1: record(1), 2: record(2, (1, 5))}), 2)
    assert (start.point.generation, start.point.step) == (2, 6)


def test_lost_nodes_serve_nothing() -> None:
    nodes = fleet(
        known("n0", snapshots=snapshots(1, 5, [0, 1])),
        known("n1", snapshots=snapshots(1, 5, [2, 3]), lost="refused"),
    )
    assert choose(nodes, truth({1: record(1)}), 1).point.tier == "nothing"


def test_snapshot_of_the_last_step_is_left_alone(committed: Any) -> None:
    nodes = fleet(
        known("n0", snapshots=snapshots(1, 60, [0, 1])), known("n1", snapshots=snapshots(1, 60, [2, 3]))
    )
    assert choose(nodes, truth({1: record(1)}, [committed(1, 40)]), 1).point.step == 40


def test_manifests_of_cut_off_generations_do_not_count(committed: Any) -> None:
    what = truth({1: record(1), 2: record(2, (1, 20))}, [committed(1, 20), committed(1, 40)])
    start = choose(fleet(known("n0"), known("n1")), what, 2)
    assert (start.point.generation, start.point.step, start.rollback) == (1, 20, False)


# ---------------------------------------------------------------- deadlines


def test_deadlines_follow_what_was_learned() -> None:
    assert detectors.phase_deadline_s("step", 5, SETTINGS, 0.2) == 5.0
    assert detectors.phase_deadline_s("step", 5, SETTINGS, 4.0) == 20.0
    assert detectors.phase_deadline_s("save", 60, SETTINGS, 0.2) == 600.0
    assert detectors.phase_deadline_s("eval", 5, SETTINGS, 0.2) == 600.0


@pytest.mark.parametrize(("permanent", "whole"), [(True, True), (False, False)])
def test_what_no_restart_can_mend_is_told_to_its_end(permanent: bool, whole: bool) -> None:
    message = "x" * 400 + ": write it so"
    error = wire.ErrorReport(kind="startup", type="MisuseError", message=message, permanent=permanent)
    words = detectors.exit_words(wire.ExitReport(code=1, error=error))
    assert words.endswith(": write it so") == whole
    assert len(words) < 1000


def test_quiet_limit_stretches_with_the_job() -> None:
    assert SETTINGS.quiet_after_s(3) == 3.0
    assert SETTINGS.quiet_after_s(12_500) == 100.0


# ---------------------------------------------------------------- the invariants can turn red


def test_two_plans_under_one_number() -> None:
    ledger = invariants.Ledger()
    assert ledger.publish(wire.PlanPointer(generation=3, hash="a", location="x")) == []
    assert ledger.publish(wire.PlanPointer(generation=3, hash="b", location="x"))[0].startswith("INV-02")
    assert ledger.publish(wire.PlanPointer(generation=2, hash="c", location="x"))[0].startswith("INV-01")


def test_writes_under_another_token(bench: Any) -> None:
    bench.running(step=4)
    pointer = wire.PlanPointer(generation=1, hash="h", location="x")
    stray = dec.PublishPlan(op=1, token=99, pointer=pointer)
    assert "INV-04" in invariants.check(bench.state, bench.state, [stray])[0]


def test_plan_without_a_second_listing(bench: Any, committed: Any) -> None:
    """Skipping the second listing is what INV-03 is for."""
    bench.running(step=8)
    bench.end(1, signal=9)
    bench.perform(leave=(dec.CreateRecord,))
    create = bench.take(dec.CreateRecord)
    bench.send(bench.create(create.op, create.record))
    before = bench.state
    listed = dataclasses.replace(before.truth, manifests=(committed(1, 20),))
    after = dataclasses.replace(before, truth=listed)
    publish = dec.PublishPlan(op=9, token=before.token, pointer=before.forming.stage.pointer)
    assert any("INV-03" in b for b in invariants.check(before, after, [publish]))


def test_start_from_what_is_set_aside(bench: Any, committed: Any) -> None:
    bench.running(step=8)
    held = dataclasses.replace(truth(bench.records, [committed(1, 5)]), aside={(1, 5): "damaged"})
    state = dataclasses.replace(bench.state, truth=held)
    plan = plan_of(2, "n0", "n1")
    start = wire.StartingPoint(generation=1, step=5, tier="object_store")
    plan = msgspec.structs.replace(plan, start=start)
    broken = invariants.start_is_sound(state, record(2, (1, 5)), plan)
    assert broken == ["INV-12: (1, 5) is set aside"]


def test_record_over_budget(bench: Any) -> None:
    bench.running(step=8)
    records = {g: record(g, cause="workload") for g in (1, 2, 3)}
    state = dataclasses.replace(bench.state, truth=truth(records))
    over = record(4, (1, 7), cause="workload")
    assert any("INV-15" in b for b in invariants.record_is_sound(state, state, over))

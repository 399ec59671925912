"""`observe`: from listings to the snapshot."""

import math

import msgspec
import pytest
from view_listings import (
    KEYS,
    info,
    manifest,
    plan,
    pointer,
    put,
    rank,
    running,
    seen_of,
    status,
)

from surefoot.ckpt.record import ManifestRef
from surefoot.controller import wire
from surefoot.controller.view.observing import restored_from
from surefoot.controller.view.types import CommitView, JobView, LossPoint


def test_nothing_yet() -> None:
    seen = seen_of([])
    assert (seen.phase, seen.generation, seen.step, seen.nodes) == ("waiting", 0, 0, ())
    assert "no controller leads" in seen.now


def test_waiting_for_nodes_counts_the_ready_ones() -> None:
    seen = seen_of(
        [put(KEYS.leader, b"a"), info("n0"), info("n1"), status("n0", generation=0, state="parked")]
    )
    assert seen.phase == "waiting"
    assert seen.now == "waiting for nodes: 1 ready, 2 wanted"


def test_running() -> None:
    seen = seen_of(running(), plan(1), manifests=[manifest(1, 20)])
    assert (seen.phase, seen.leader, seen.generation, seen.step) == ("running", "a", 1, 23)
    assert (seen.loss, seen.steps_per_s) == (2.5, 4.0)
    assert seen.committed == CommitView(generation=1, step=20)
    assert [(n.uid, n.role, n.state) for n in seen.nodes] == [
        ("n0", "member", "running"),
        ("n1", "member", "running"),
        ("n2", "standby", "parked"),
    ]
    assert [r.rank for n in seen.nodes for r in n.ranks] == [0, 1, 2, 3]
    assert seen.now == "training"
    assert [e.kind for e in seen.events] == ["generation", "commit"]


def test_starting_until_all_ranks_step() -> None:
    seen = seen_of(running(n1=[rank(2, "restore", 0)]), plan(1))
    assert seen.phase == "starting"
    assert "starting generation 1" in seen.now


def test_a_quiet_rank_is_mentioned() -> None:
    seen = seen_of(running(n1=[rank(2, phase_age_s=4.2), rank(3)]), plan(1))
    assert seen.now == "rank 2 on n1 has shown no progress for 4 s (phase step)"


def test_training_goes_on_without_a_leader() -> None:
    seen = seen_of(running(leader=False), plan(1))
    assert (seen.phase, seen.leader) == ("running", None)
    assert "no controller leads" in seen.now


def test_a_dead_rank_means_that_a_generation_is_due() -> None:
    incident = wire.Incident(
        id="i1",
        fault="rank_exit",
        cause="infrastructure",
        generation=1,
        step=23,
        node="n1",
        rank=2,
        evidence=("signal 9",),
    )
    keys = [
        *running(n1=[rank(2, exit=wire.ExitReport(signal=9)), rank(3)]),
        put(KEYS.incident("i1"), incident),
    ]
    seen = seen_of(keys, plan(1))
    assert seen.phase == "forming"
    assert seen.now == "forming a new generation: step 23: rank 2 on n1 died (signal 9)"
    assert seen.nodes[1].ranks[0].ended == "signal 9"


def test_a_record_above_the_plan_means_forming() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    assert seen_of(running(), plan(1), plan(2, start=start)).phase == "forming"


def test_a_replaced_node_whose_lease_lives_on_is_shown_as_lost() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    moved = plan(2, start=start)
    other = msgspec.structs.replace(moved.members[1], uid="n2")
    moved = msgspec.structs.replace(moved, members=(moved.members[0], other))
    keys = [pointer(2), *((key, value) for key, value in running() if key != KEYS.plan)]
    seen = seen_of(keys, plan(1), moved)
    assert {n.uid: n.role for n in seen.nodes} == {"n0": "member", "n1": "lost", "n2": "member"}


def test_a_lost_member_is_shown_as_lost() -> None:
    keys = [(key, value) for key, value in running() if not key.endswith("/n1")]
    seen = seen_of(keys, plan(1))
    assert [(n.uid, n.role) for n in seen.nodes] == [("n0", "member"), ("n1", "lost"), ("n2", "standby")]
    assert seen.phase == "forming"


@pytest.mark.parametrize(
    ("tier", "sources", "expected"),
    [
        ("nothing", (), "nothing"),
        ("object_store", (), "object_store"),
        ("memory", ("n0", "n0", "n1", "n1"), "memory"),
        ("memory", ("n0", "n0", "n0", "n0"), "peer"),
    ],
)
def test_restored_from(tier, sources: tuple[str, ...], expected: str) -> None:
    start = wire.StartingPoint(generation=1, step=22, tier=tier)
    given = tuple(wire.SnapshotSource(rank=r, uid=uid) for r, uid in enumerate(sources))
    assert restored_from(plan(2, start=start, sources=given)) == expected


def test_commits_off_the_lineage_are_left_out() -> None:
    start = wire.StartingPoint(generation=1, step=20, tier="object_store")
    seen = seen_of(
        running(generation=2),
        plan(1),
        plan(2, start=start),
        manifests=[manifest(1, 20), manifest(1, 40), manifest(2, 40)],
    )
    commits = [(e.generation, e.step) for e in seen.events if e.kind == "commit"]
    assert commits == [(1, 20), (2, 40)]


def test_without_etcd_the_committed_history_is_shown() -> None:
    seen = seen_of(None, plan(1), manifests=[manifest(1, 20)])
    assert (seen.phase, seen.generation, seen.step, seen.nodes) == ("unknown", 1, 20, ())
    assert "no etcd to ask" in seen.now
    assert seen_of(None, plan(1), manifests=[manifest(1, 60)]).phase == "done"
    assert seen_of(None).now == "nothing is recorded yet"


def test_outcome() -> None:
    outcome = wire.Outcome(
        state="failed", exit_code=4, step=0, reason="ZeroDivisionError in train.py:3", generation=3
    )
    seen = seen_of([*running(), put(KEYS.outcome, outcome)], plan(1))
    assert (seen.phase, seen.step, seen.now) == ("failed", 0, "ZeroDivisionError in train.py:3")
    assert seen.events[-1].kind == "outcome"


def test_the_outcome_of_another_run_is_left_out() -> None:
    outcome = wire.Outcome(state="done", exit_code=0, step=60, reason="done", generation=3, run_id="old")
    keys = [*running(), put(KEYS.outcome, outcome)]
    assert seen_of(keys, plan(1), run_id="new").phase == "running"
    assert seen_of(keys, plan(1), run_id="old").phase == "done"
    assert seen_of(keys, plan(1)).phase == "done"


def test_values_that_cannot_be_read_are_passed_over() -> None:
    keys = [
        put(KEYS.plan, b"\xff"),
        put(KEYS.node("n0"), b"{}"),
        put(KEYS.status("n1"), b"[]"),
        put(KEYS.outcome, b"null"),
    ]
    assert seen_of(keys).phase == "waiting"


def test_records_that_contradict_each_other_are_said_aloud() -> None:
    start = wire.StartingPoint(generation=1, step=20, tier="object_store")
    seen = seen_of(running(generation=2), plan(2, start=start))
    assert "record of generation 1 is missing" in seen.now
    assert seen.committed is None


def test_the_loss_curve_is_carried_on_and_redone_steps_replace_theirs() -> None:
    first = seen_of(running(), plan(1))
    assert first.losses == (LossPoint(step=22, loss=2.5),)
    again = seen_of(
        running(n1=[rank(2, loss=(2.4).hex()), rank(3, loss=(2.4).hex())]), plan(1), previous=first
    )
    assert [p.loss for p in again.losses] == [2.4]
    later = seen_of(running(n1=[rank(2, step=24, loss=(2.0).hex())]), plan(1), previous=first)
    assert [(p.step, p.loss) for p in later.losses] == [(22, 2.5), (23, 2.0)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_shown(loss: float) -> None:
    seen = seen_of(running(n1=[rank(2, loss=loss.hex()), rank(3, loss=loss.hex())]), plan(1))
    assert str(seen.loss) == str(loss)


def test_snapshot_columns() -> None:
    held = (
        wire.SnapshotRef(generation=1, step=22, rank=0),
        wire.SnapshotRef(generation=1, step=23, rank=0),
        wire.SnapshotRef(generation=1, step=22, rank=1),
        wire.SnapshotRef(generation=1, step=21, rank=2, replica=True),
    )
    keys = [(key, value) for key, value in running() if key != KEYS.status("n0")]
    seen = seen_of([*keys, status("n0", [rank(0), rank(1)], snapshots=held)], plan(1))
    assert (seen.nodes[0].snapshot_step, seen.nodes[0].copies_step) == (22, 21)


def test_a_node_named_n10_stands_behind_n2() -> None:
    seen = seen_of([info("n10"), info("n2"), info("gpu")])
    assert [n.uid for n in seen.nodes] == ["gpu", "n2", "n10"]


def test_json_round_trip() -> None:
    seen = seen_of(running(), plan(1), manifests=[manifest(1, 20)])
    assert msgspec.json.decode(msgspec.json.encode(seen), type=JobView) == seen


def test_held_is_said_before_anything_else() -> None:
    """Whatever ranks and nodes do, and whatever else is wrong with the records: what the leader holds for is the news."""
    reason = "generations/0001.json is damaged: restore it"
    held = put(KEYS.held, wire.Held(reason=reason))
    for keys in ([held], [*running(), held]):
        seen = seen_of(keys, plan(1), manifests=[ManifestRef(generation=9, step=1, key="k")])
        assert (seen.phase, seen.now) == ("held", f"held: {reason}")


def test_an_outcome_is_said_before_what_was_held() -> None:
    outcome = wire.Outcome(state="failed", exit_code=5, step=0, reason="x", generation=0)
    keys = [put(KEYS.held, wire.Held(reason="x")), put(KEYS.outcome, outcome)]
    assert seen_of(keys).phase == "failed"

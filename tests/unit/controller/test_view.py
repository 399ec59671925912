"""`observe` from listings to the snapshot, and what is drawn of it."""

import io
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from surefoot.ckpt.record import ManifestRef, Record, StartRef
from surefoot.controller import view, wire
from surefoot.controller.keys import Keys
from surefoot.controller.store import KeyValue
from surefoot.controller.view import JobFacts, JobView

FACTS = JobFacts(name="gpt", steps=60, nodes=2, root="file:///data/gpt")
KEYS = Keys("gpt")


def put(key: str, value: msgspec.Struct | bytes) -> KeyValue:
    data = value if isinstance(value, bytes) else wire.encode(value)
    return KeyValue(key=key, value=data, create_revision=1, mod_revision=1)


def plan(
    generation: int, *, start: wire.StartingPoint | None = None, reason: wire.Reason | None = None, **changes
) -> wire.Plan:
    values = {
        "job": "gpt",
        "run_id": "r",
        "generation": generation,
        "members": (
            wire.Member(uid="n0", incarnation="a", index=0, first_rank=0, ranks=2),
            wire.Member(uid="n1", incarnation="b", index=1, first_rank=2, ranks=2),
        ),
        "world_size": 4,
        "mesh": {"pp": 1, "dp": 4, "tp": 1},
        "start": start or wire.StartingPoint(),
        "reason": reason or wire.Reason(kind="first_start"),
        "spec_hash": "h",
        "code_version": "v",
        "controller": "a",
    }
    return wire.Plan(**(values | changes))


def record(of: wire.Plan) -> Record:
    return Record(
        generation=of.generation,
        start=StartRef(generation=of.start.generation, step=of.start.step),
        reason=of.reason.kind,
        created_by="a",
        plan=msgspec.to_builtins(of),
    )


def pointer(generation: int) -> KeyValue:
    return put(KEYS.plan, wire.PlanPointer(generation=generation, hash="h", location="l"))


def info(uid: str) -> KeyValue:
    return put(
        KEYS.node(uid),
        wire.NodeInfo(
            uid=uid,
            incarnation="a",
            host="127.0.0.1",
            control_port=1,
            flight_port=2,
            pid=100,
            slots=2,
            code_version="v",
        ),
    )


def rank(number: int, phase: wire.Phase = "step", step: int = 23, **changes) -> wire.RankStatus:
    values = {"rank": number, "pid": 1000 + number, "phase": phase, "step": step, "phase_age_s": 0.1}
    return wire.RankStatus(**(values | {"loss": 2.5, "step_s": 0.25} | changes))


def status(
    uid: str, ranks: Sequence[wire.RankStatus] = (), *, generation: int = 1, state="running", **changes
) -> KeyValue:
    value = wire.NodeStatus(
        uid=uid, incarnation="a", seq=1, generation=generation, state=state, ranks=tuple(ranks), **changes
    )
    return put(KEYS.status(uid), value)


def running(
    *, generation: int = 1, leader: bool = True, n1: Sequence[wire.RankStatus] | None = None
) -> list[KeyValue]:
    keys = [
        pointer(generation),
        info("n0"),
        info("n1"),
        info("n2"),
        status("n0", [rank(0), rank(1)], generation=generation),
        status("n1", [rank(2), rank(3)] if n1 is None else n1, generation=generation),
        status("n2", generation=0, state="parked"),
    ]
    return [put(KEYS.leader, b"a"), *keys] if leader else keys


def observe(
    keys: Sequence[KeyValue] | None, *plans: wire.Plan, manifests: Sequence[ManifestRef] = (), **more
) -> JobView:
    return view.observe(
        FACTS, keys=keys, records={p.generation: record(p) for p in plans}, manifests=manifests, **more
    )


def manifest(generation: int, step: int) -> ManifestRef:
    return ManifestRef(
        generation=generation, step=step, key=f"gen-{generation:04d}/step-{step:010d}/manifest.json"
    )


def test_nothing_yet() -> None:
    seen = observe([])
    assert (seen.phase, seen.generation, seen.step, seen.nodes) == ("waiting", 0, 0, ())
    assert "no controller leads" in seen.now


def test_waiting_for_nodes_counts_the_ready_ones() -> None:
    seen = observe(
        [put(KEYS.leader, b"a"), info("n0"), info("n1"), status("n0", generation=0, state="parked")]
    )
    assert seen.phase == "waiting"
    assert seen.now == "waiting for nodes: 1 ready, 2 wanted"


def test_running() -> None:
    seen = observe(running(), plan(1), manifests=[manifest(1, 20)])
    assert (seen.phase, seen.leader, seen.generation, seen.step) == ("running", "a", 1, 23)
    assert (seen.loss, seen.steps_per_s) == (2.5, 4.0)
    assert seen.committed == view.CommitView(generation=1, step=20)
    assert [(n.uid, n.role, n.state) for n in seen.nodes] == [
        ("n0", "member", "running"),
        ("n1", "member", "running"),
        ("n2", "standby", "parked"),
    ]
    assert [r.rank for n in seen.nodes for r in n.ranks] == [0, 1, 2, 3]
    assert seen.now == "training"
    assert [e.kind for e in seen.events] == ["generation", "commit"]


def test_starting_until_all_ranks_step() -> None:
    seen = observe(running(n1=[rank(2, "restore", 0)]), plan(1))
    assert seen.phase == "starting"
    assert "starting generation 1" in seen.now


def test_a_quiet_rank_is_mentioned() -> None:
    seen = observe(running(n1=[rank(2, phase_age_s=4.2), rank(3)]), plan(1))
    assert seen.now == "rank 2 on n1 has shown no progress for 4 s (phase step)"


def test_training_goes_on_without_a_leader() -> None:
    seen = observe(running(leader=False), plan(1))
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
    seen = observe(keys, plan(1))
    assert seen.phase == "forming"
    assert seen.now == "forming a new generation: step 23: rank 2 on n1 died (signal 9)"
    assert seen.nodes[1].ranks[0].ended == "signal 9"


def test_a_record_above_the_plan_means_forming() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    assert observe(running(), plan(1), plan(2, start=start)).phase == "forming"


def test_a_replaced_node_whose_lease_lives_on_is_shown_as_lost() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    moved = plan(2, start=start)
    other = msgspec.structs.replace(moved.members[1], uid="n2")
    moved = msgspec.structs.replace(moved, members=(moved.members[0], other))
    keys = [pointer(2), *(kv for kv in running() if kv.key != KEYS.plan)]
    seen = observe(keys, plan(1), moved)
    assert {n.uid: n.role for n in seen.nodes} == {"n0": "member", "n1": "lost", "n2": "member"}


def test_a_lost_member_is_shown_as_lost() -> None:
    keys = [kv for kv in running() if not kv.key.endswith("/n1")]
    seen = observe(keys, plan(1))
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
    assert view.restored_from(plan(2, start=start, sources=given)) == expected


def test_commits_off_the_lineage_are_left_out() -> None:
    start = wire.StartingPoint(generation=1, step=20, tier="object_store")
    seen = observe(
        running(generation=2),
        plan(1),
        plan(2, start=start),
        manifests=[manifest(1, 20), manifest(1, 40), manifest(2, 40)],
    )
    commits = [(e.generation, e.step) for e in seen.events if e.kind == "commit"]
    assert commits == [(1, 20), (2, 40)]


def test_the_story_is_in_causal_order() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    incident = wire.Incident(
        id="i1", fault="node_loss", cause="infrastructure", generation=1, step=23, node="n1", new_generation=2,
        decision="n2 takes its place", first_step_s=1.25, closed=True,
    )  # fmt: skip
    keys = [*running(generation=2), put(KEYS.incident("i1"), incident)]
    reason = wire.Reason(kind="replace", cause="infrastructure", fault="node_loss", detail="node n1 was lost")
    seen = observe(
        keys, plan(1), plan(2, start=start, reason=reason), manifests=[manifest(1, 20), manifest(2, 40)]
    )
    assert [(e.kind, e.generation) for e in seen.events] == [
        ("generation", 1),
        ("commit", 1),
        ("incident", 1),
        ("generation", 2),
        ("commit", 2),
    ]
    assert (
        seen.events[2].text == "i1: step 23: node n1 was lost; n2 takes its place; stepping again after 1.2 s"
    )
    assert seen.now == "training; last restart: node n1 was lost"


def test_without_etcd_the_committed_history_is_shown() -> None:
    seen = observe(None, plan(1), manifests=[manifest(1, 20)])
    assert (seen.phase, seen.generation, seen.step, seen.nodes) == ("unknown", 1, 20, ())
    assert "no etcd to ask" in seen.now
    assert observe(None, plan(1), manifests=[manifest(1, 60)]).phase == "done"
    assert observe(None).now == "nothing is recorded yet"


def test_outcome() -> None:
    outcome = wire.Outcome(
        state="failed", exit_code=4, step=0, reason="ZeroDivisionError in train.py:3", generation=3
    )
    seen = observe([*running(), put(KEYS.outcome, outcome)], plan(1))
    assert (seen.phase, seen.step, seen.now) == ("failed", 0, "ZeroDivisionError in train.py:3")
    assert seen.events[-1].kind == "outcome"


def test_the_outcome_of_another_run_is_left_out() -> None:
    outcome = wire.Outcome(state="done", exit_code=0, step=60, reason="done", generation=3, run_id="old")
    keys = [*running(), put(KEYS.outcome, outcome)]
    assert observe(keys, plan(1), run_id="new").phase == "running"
    assert observe(keys, plan(1), run_id="old").phase == "done"
    assert observe(keys, plan(1)).phase == "done"


def test_values_that_cannot_be_read_are_passed_over() -> None:
    keys = [
        put(KEYS.plan, b"\xff"),
        put(KEYS.node("n0"), b"{}"),
        put(KEYS.status("n1"), b"[]"),
        put(KEYS.outcome, b"null"),
    ]
    assert observe(keys).phase == "waiting"


def test_records_that_contradict_each_other_are_said_aloud() -> None:
    start = wire.StartingPoint(generation=1, step=20, tier="object_store")
    seen = observe(running(generation=2), plan(2, start=start))
    assert "record of generation 1 is missing" in seen.now
    assert seen.committed is None


def test_the_loss_curve_is_carried_on_and_redone_steps_replace_theirs() -> None:
    first = observe(running(), plan(1))
    assert first.losses == (view.LossPoint(step=22, loss=2.5),)
    again = observe(running(n1=[rank(2, loss=2.4), rank(3, loss=2.4)]), plan(1), previous=first)
    assert [p.loss for p in again.losses] == [2.4]
    later = observe(running(n1=[rank(2, step=24, loss=2.0)]), plan(1), previous=first)
    assert [(p.step, p.loss) for p in later.losses] == [(22, 2.5), (23, 2.0)]


def test_snapshot_columns() -> None:
    held = (
        wire.SnapshotRef(generation=1, step=22, rank=0),
        wire.SnapshotRef(generation=1, step=23, rank=0),
        wire.SnapshotRef(generation=1, step=22, rank=1),
        wire.SnapshotRef(generation=1, step=21, rank=2, replica=True),
    )
    keys = [kv for kv in running() if kv.key != KEYS.status("n0")]
    seen = observe([*keys, status("n0", [rank(0), rank(1)], snapshots=held)], plan(1))
    assert (seen.nodes[0].snapshot_step, seen.nodes[0].copies_step) == (22, 21)


def test_a_node_named_n10_stands_behind_n2() -> None:
    seen = observe([info("n10"), info("n2"), info("gpu")])
    assert [n.uid for n in seen.nodes] == ["gpu", "n2", "n10"]


def test_json_round_trip() -> None:
    seen = observe(running(), plan(1), manifests=[manifest(1, 20)])
    assert msgspec.json.decode(msgspec.json.encode(seen), type=JobView) == seen


def test_news_tells_each_thing_once() -> None:
    first = observe([put(KEYS.leader, b"a")])
    assert view.news(None, first) == ["waiting for nodes: 0 ready, 2 wanted"]
    assert view.news(first, first) == []
    second = observe(running(), plan(1))
    assert view.news(first, second) == ["generation 1 on n0, n1 from the beginning: first start"]


def test_news_of_an_incident_come_with_its_decision_and_with_its_end() -> None:
    stages = [
        {},
        {"decision": "restart"},
        {"decision": "restart", "first_step_s": 1.3, "closed": True},
    ]
    told: list[list[str]] = []
    before = observe(running(), plan(1))
    for stage in stages:
        incident = wire.Incident(
            id="i1", fault="rank_exit", cause="infrastructure", generation=1, step=23, node="n1", rank=2,
            evidence=("rank 2 on n1 (initiating): signal 9",), **stage,
        )  # fmt: skip
        now = observe([*running(), put(KEYS.incident("i1"), incident)], plan(1))
        told.append(view.news(before, now))
        before = now
    assert told == [
        [],
        ["i1: step 23: rank 2 on n1 died (signal 9); restart"],
        ["i1: stepping again 1.3 s after it was noticed"],
    ]


def test_the_whole_of_an_incident() -> None:
    incident = wire.Incident(
        id="i1", fault="hang", cause="workload", generation=1, step=23, evidence=("rank 0: nothing moved", "stacks kept"),
        rule="no progress", decision="restart", new_generation=2, budget_left=2, decided_s=0.1, first_step_s=1.5, closed=True,
        start=wire.StartingPoint(generation=1, step=22, tier="memory"),
    )  # fmt: skip
    assert view.incident_story(incident) == [
        "incident:  i1 (closed)",
        "what:      the job stopped making progress",
        "struck:    generation 1, step 23",
        "evidence:  rank 0: nothing moved",
        "evidence:  stacks kept",
        "cause:     hang; charged to the budget of workload failures (2 left)",
        "rule:      no progress",
        "decision:  restart",
        "answer:    generation 2 from step 22 of generation 1 (memory)",
        "cost:      decided after 0.10 s, first step after 1.50 s",
    ]


def test_sparkline() -> None:
    assert view.sparkline([], 10) == ""
    assert view.sparkline([1.0], 10) == "▁"
    assert view.sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert view.sparkline(list(range(100)), 4) == "▁▃▆█"


def drawn(seen: JobView, *, width: int = 110, color: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="truecolor" if color else None
    )
    console.print(view.render(seen, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_render_shows_what_matters_and_fits() -> None:
    incident = wire.Incident(
        id="i1", fault="hang", cause="workload", generation=1, step=23, node="n1", rank=2
    )
    seen = observe([*running(), put(KEYS.incident("i1"), incident)], plan(1), manifests=[manifest(1, 20)])
    text = drawn(seen)
    for expected in (
        "gpt",
        "RUNNING",
        "23/60",
        "2.5000",
        "n0",
        "parked",
        "step 20 is committed",
        "stopped making progress",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 110
    assert "\x1b[" not in text
    assert "\x1b[" in drawn(seen, color=True)


def test_render_of_an_empty_job_and_of_a_dead_rank() -> None:
    assert "WAITING" in drawn(observe([]))
    seen = observe(running(n1=[rank(2, exit=wire.ExitReport(code=1)), rank(3)]), plan(1))
    assert "2 ✗ exit code 1" in drawn(seen)


def test_held_is_said_before_anything_else() -> None:
    """Whatever ranks and nodes do, and whatever else is wrong with the records: what the leader holds for is the news."""
    reason = "generations/0001.json is damaged: restore it"
    held = put(KEYS.held, wire.Held(reason=reason))
    for keys in ([held], [*running(), held]):
        seen = observe(keys, plan(1), manifests=[ManifestRef(generation=9, step=1, key="k")])
        assert (seen.phase, seen.now) == ("held", f"held: {reason}")
        assert view.news(None, seen)[-1] == f"held: {reason}"
        assert view.news(seen, seen) == []
    assert "HELD" in drawn(observe([*running(), held], plan(1)))


def test_an_outcome_is_said_before_what_was_held() -> None:
    outcome = wire.Outcome(state="failed", exit_code=5, step=0, reason="x", generation=0)
    keys = [put(KEYS.held, wire.Held(reason="x")), put(KEYS.outcome, outcome)]
    assert observe(keys).phase == "failed"

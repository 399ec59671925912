"""A rank ends, hangs, or a node is lost: the core asks, names the cause, and forms the next generation."""

from __future__ import annotations

from typing import Any

from surefoot.controller import wire
from surefoot.controller.core import decisions as dec
from surefoot.controller.core import events as ev
from surefoot.controller.core.moves import Mind


def test_first_start(bench: Any) -> None:
    """Leader, one node: it waits. Two nodes: record 1 from nothing, listed again, published, running."""
    bench.lead()
    assert (bench.mind, bench.stage()) == (Mind.FORMING, "AwaitingNodes")
    bench.appear("n0")
    assert bench.records == {}
    bench.appear("n1")
    assert [
        type(x).__name__
        for x in bench.history
        if isinstance(x, dec.CreateRecord | dec.ListLineage | dec.PublishPlan)
    ] == [
        "ListLineage",  # a leader looks
        "ListLineage",  # waiting for nodes, it looks whether anything is left to do
        "CreateRecord",
        "ListLineage",
        "PublishPlan",
    ]
    assert bench.stage() == "ComingUp"
    plan = bench.plan
    assert [(m.uid, m.first_rank, m.ranks) for m in plan.members] == [("n0", 0, 2), ("n1", 2, 2)]
    assert (plan.reason.kind, plan.reason.cause) == ("first_start", "none")
    assert plan.start == wire.StartingPoint()
    assert plan.peers == {"n0": "n1", "n1": "n0"}
    bench.follow(phase="restore")
    assert bench.mind is Mind.FORMING
    bench.follow()
    assert bench.mind is Mind.RUNNING
    assert bench.incidents == {}


def test_killed_rank_restarts_in_place_from_memory(bench: Any) -> None:
    bench.running(step=8)
    decided = bench.end(1, signal=9)
    assert [t.uid for t in next(x for x in decided if isinstance(x, dec.ProbeNodes)).targets] == ["n0", "n1"]
    bench.perform()
    plan = bench.plan
    assert plan.generation == 2
    assert (plan.reason.kind, plan.reason.cause, plan.reason.fault) == (
        "restart",
        "infrastructure",
        "rank_exit",
    )
    assert (plan.start.generation, plan.start.step, plan.start.tier) == (1, 7, "memory")
    assert [(s.rank, s.uid) for s in plan.sources] == [(0, "n0"), (1, "n0"), (2, "n1"), (3, "n1")]
    incident = bench.incidents["inc-0001"]
    assert (incident.fault, incident.rank, incident.node, incident.step) == ("rank_exit", 1, "n0", 8)
    assert incident.new_generation == 2
    assert incident.budget_left == 19
    bench.follow()
    assert bench.mind is Mind.RUNNING
    bench.step(9)
    incident = bench.incidents["inc-0001"]
    assert incident.closed
    assert incident.first_step_s > incident.running_s > incident.planned_s > incident.decided_s > 0


def test_cascade_error_first_is_not_the_cause(bench: Any) -> None:
    """1. A neighbour's collective error is told before the death. 2. Within the settle time the death is told."""
    bench.running(step=4)
    error = wire.ErrorReport(kind="collective", type="RuntimeError", message="Connection reset by peer")
    bench.end(2, code=1, error=error)
    bench.perform()
    assert bench.mind is Mind.RUNNING
    bench.tick(0.1)
    assert bench.mind is Mind.RUNNING
    bench.end(0, signal=9)
    bench.perform()
    incident = bench.incidents["inc-0001"]
    assert (incident.fault, incident.rank) == ("rank_exit", 0)
    assert len(incident.evidence) == 2


def test_only_cascade_evidence_blames_nobody(bench: Any) -> None:
    bench.running(step=4)
    error = wire.ErrorReport(kind="collective", type="RuntimeError", message="Connection reset by peer")
    bench.end(2, code=1, error=error)
    bench.perform()
    bench.tick(0.3)
    assert bench.mind is Mind.RUNNING
    bench.tick(0.3)
    assert bench.incidents["inc-0001"].fault == "collective"
    assert bench.incidents["inc-0001"].rank is None
    assert bench.plan.generation == 2


def test_node_lost_behind_cascade_errors(bench: Any) -> None:
    """The survivors' errors come at once, the lease would last 10 s: the refused probe tells."""
    bench.running("n0", "n1", "n2", step=6)
    bench.lose("n1")
    error = wire.ErrorReport(kind="collective", type="RuntimeError", message="Connection closed by peer")
    bench.end(0, code=1, error=error)
    bench.perform()
    plan = bench.plan
    assert (plan.reason.kind, plan.reason.fault, plan.reason.cause) == (
        "replace",
        "node_loss",
        "infrastructure",
    )
    assert [m.uid for m in plan.members] == ["n0", "n2"]
    assert plan.member("n2").first_rank == 2
    assert (plan.start.step, plan.start.tier) == (5, "memory")
    assert [(s.rank, s.uid) for s in plan.sources] == [(0, "n0"), (1, "n0"), (2, "n0"), (3, "n0")]
    assert bench.incidents["inc-0001"].node == "n1"


def test_lost_node_without_a_standby_is_waited_for_and_taken_back(bench: Any) -> None:
    bench.running(step=6)
    bench.lose("n1")
    bench.end(0, signal=6)
    bench.perform()
    assert bench.stage() == "AwaitingNodes"
    bench.vanish("n1")
    bench.tick(5.0)
    assert bench.mind is Mind.FORMING
    bench.appear("n1", incarnation="b")
    plan = bench.plan
    assert [(m.uid, m.incarnation) for m in plan.members] == [("n0", "a"), ("n1", "b")]
    assert plan.reason.kind == "replace"
    assert (plan.start.step, plan.start.tier) == (5, "memory")


def test_waiting_for_a_node_ends(bench: Any) -> None:
    bench.running(step=6)
    bench.lose("n1")
    bench.end(0, signal=9)
    bench.perform()
    bench.tick(59)
    assert bench.mind is Mind.FORMING
    bench.tick(2)
    assert bench.mind is Mind.FAILED
    assert (bench.outcome.state, bench.outcome.exit_code) == ("failed", 3)
    assert "1 of 2 nodes" in bench.outcome.reason


def test_warming_nodes_are_given_time(bench: Any) -> None:
    bench.lead()
    bench.appear("n0", "n1", state="warming")
    bench.tick(100)
    assert bench.mind is Mind.FORMING
    bench.tick(21)
    assert bench.mind is Mind.FAILED
    assert "n0 is warming" in bench.outcome.reason


def test_lost_lease_alone_changes_nothing(bench: Any) -> None:
    """All leases are revoked while the agents live (CTL-18): each is asked, answers, and nothing happens."""
    bench.running(step=6)
    for uid in ("n0", "n1"):
        bench.vanish(uid)
    bench.tick()
    assert bench.mind is Mind.RUNNING
    assert len(bench.records) == 1
    for uid in ("n0", "n1"):
        bench.revision += 1
        bench.send(ev.NodeAppeared(info=bench.nodes[uid].info, revision=bench.revision))
    for step in range(7, 40):
        bench.step(step)
        bench.tick()
    assert bench.mind is Mind.RUNNING
    assert bench.incidents == {}


def test_frozen_agent_is_lost_when_its_lease_ends(bench: Any) -> None:
    """CTL-01: no answer and a key: wait. No answer and no key: lost."""
    bench.running("n0", "n1", "n2", step=6)
    bench.nodes["n1"].answer = "times_out"
    for _ in range(30):
        bench.report("n0")
        bench.tick(0.25)
    assert bench.mind is Mind.RUNNING
    bench.vanish("n1")
    assert bench.plan.generation == 2
    assert [m.uid for m in bench.plan.members] == ["n0", "n2"]


def test_silent_member_gets_a_last_call(bench: Any) -> None:
    """A rank died elsewhere and one member does not answer: it is asked again for 15 s, then the standby takes its place."""
    bench.running("n0", "n1", "n2", step=6)
    bench.nodes["n1"].answer = "times_out"
    bench.end(0, signal=9)
    bench.perform()
    for _ in range(50):
        bench.tick(0.25)
    assert bench.mind is Mind.RUNNING
    assert len(bench.records) == 1
    for _ in range(20):
        bench.tick(0.25)
    assert [m.uid for m in bench.plan.members] == ["n0", "n2"]


def test_slow_member_that_answers_in_time_keeps_its_place(bench: Any) -> None:
    bench.running("n0", "n1", "n2", step=6)
    bench.nodes["n1"].answer = "times_out"
    bench.end(0, signal=9)
    bench.perform()
    bench.tick(5.0)
    bench.nodes["n1"].answer = "answers"
    bench.tick(0.5)
    assert [m.uid for m in bench.plan.members] == ["n0", "n1"]


def test_broken_probe_is_repeated_not_believed(bench: Any) -> None:
    bench.running("n0", "n1", "n2", step=6)
    bench.nodes["n1"].answer = "breaks"
    bench.end(0, signal=9)
    bench.perform()
    assert len(bench.records) == 1
    bench.lose("n1")
    bench.tick(0.3)
    assert [m.uid for m in bench.plan.members] == ["n0", "n2"]


def test_agent_reborn(bench: Any) -> None:
    """An agent died and is back under a new incarnation before its lease ended: its ranks are lost, its place is not."""
    bench.running(step=6)
    held = bench.nodes["n1"].snapshots
    bench.appear("n1", incarnation="b", snapshots=held)
    plan = bench.plan
    assert (plan.generation, plan.reason.fault) == (2, "node_loss")
    assert [(m.uid, m.incarnation) for m in plan.members] == [("n0", "a"), ("n1", "b")]
    assert plan.start.tier == "memory"


def test_hang(bench: Any) -> None:
    """Nothing moves, heartbeats go on: after the deadline everybody is asked, then the generation is formed again."""
    bench.running(step=9)
    for _ in range(19):
        bench.report("n0")
        bench.report("n1")
        bench.tick(0.25)
    assert bench.mind is Mind.RUNNING
    for _ in range(2):
        bench.tick(0.25)
    plan = bench.plan
    assert (plan.generation, plan.reason.fault, plan.reason.cause) == (2, "hang", "infrastructure")
    assert bench.incidents["inc-0001"].rank is None
    assert plan.start.tier == "memory"


def test_hang_blames_the_rank_that_is_alone_behind(bench: Any) -> None:
    bench.running(step=9)
    for rank in (0, 1, 3):
        bench.rank(rank, phase="save")
    bench.report("n0")
    bench.report("n1")
    bench.tick(5.1)
    assert (bench.incidents["inc-0001"].fault, bench.incidents["inc-0001"].rank) == ("hang", 2)


def test_no_news_is_no_hang(bench: Any) -> None:
    """etcd shows nothing new for a long time; asked directly, the ranks turn out to have moved on."""
    bench.running(step=9)
    for node in bench.nodes.values():
        for rank in node.ranks:
            node.ranks[rank] = wire.RankStatus(rank=rank, pid=1, phase="step", step=40, phase_age_s=0.0)
    bench.tick(30.0)
    assert bench.mind is Mind.RUNNING
    assert bench.incidents == {}


def test_slow_save_is_no_hang_and_a_long_one_is(bench: Any) -> None:
    bench.running(step=9)
    bench.follow(phase="save", step=9)
    bench.tick(10.0)
    assert bench.mind is Mind.RUNNING
    bench.tick(6.0)
    assert bench.plan.reason.fault == "hang"


def test_others_waiting_for_a_slow_save_are_no_hang(bench: Any) -> None:
    """One rank saves slowly, the others stand in the next step's collective: the saver's deadline counts."""
    bench.running(step=9)
    bench.rank(0, phase="save", step=8)
    bench.report("n0")
    bench.tick(14.0)
    assert bench.mind is Mind.RUNNING


def test_warm_up_has_time(bench: Any) -> None:
    bench.running(step=2)
    bench.tick(50.0)
    assert bench.mind is Mind.RUNNING
    bench.tick(11.0)
    assert bench.plan.reason.fault == "hang"


def test_hang_detector_in_observe_only_reports(make_bench: Any) -> None:
    bench = make_bench(observe=frozenset({"hang"})).running(step=9)
    for _ in range(3):
        bench.tick(100.0)
    assert bench.mind is Mind.RUNNING
    assert len([r for r in bench.decided(dec.Report) if r.topic == "observed"]) == 1


def test_exception_is_charged_to_the_workload(bench: Any) -> None:
    bench.running(step=4)
    error = wire.ErrorReport(
        kind="workload", type="ValueError", message="bad", traceback='File "/x/train.py", line 33, in train'
    )
    bench.end(3, code=1, error=error)
    bench.perform()
    reason = bench.plan.reason
    assert (reason.fault, reason.cause) == ("rank_exception", "workload")
    assert reason.signature == "ValueError at train.py:33, step 4"


def test_exit_with_zero_before_the_end_is_a_fault(bench: Any) -> None:
    bench.running(step=4)
    bench.end(3, code=0)
    bench.perform()
    assert (bench.plan.generation, bench.plan.reason.fault) == (2, "rank_exit")


def test_torn_down_and_lost_agent_exits_are_no_causes(bench: Any) -> None:
    bench.running(step=4)
    bench.end(3, code=77)
    bench.end(0, signal=9, teardown=True)
    bench.perform()
    bench.tick(0.6)
    assert bench.incidents["inc-0001"].fault == "collective"


def test_exits_of_a_former_generation_do_not_count(bench: Any) -> None:
    """CTL-30 and its siblings: the old generation's words stay in the statuses until the agents follow the new plan."""
    bench.running(step=8)
    bench.end(1, signal=9)
    bench.perform()
    assert bench.plan.generation == 2
    for _ in range(5):
        bench.report("n0")
        bench.tick(0.25)
    assert bench.plan.generation == 2
    bench.follow()
    assert bench.mind is Mind.RUNNING


def test_second_fault_while_coming_up(bench: Any) -> None:
    bench.running("n0", "n1", "n2", step=8)
    bench.end(1, signal=9)
    bench.perform()
    bench.follow(phase="restore")
    bench.lose("n1")
    bench.end(0, signal=9)
    bench.perform()
    plan = bench.plan
    assert (plan.generation, plan.reason.kind) == (3, "replace")
    assert (plan.start.generation, plan.start.step) == (1, 7)
    assert set(bench.incidents) == {"inc-0001", "inc-0002"}
    assert bench.incidents["inc-0001"].closed


def test_generation_that_does_not_come_up(bench: Any) -> None:
    bench.running(step=8)
    bench.end(1, signal=9)
    bench.perform()
    bench.follow(phase="start")
    bench.tick(119.0)
    assert bench.plan.generation == 2
    bench.tick(2.0)
    assert (bench.plan.generation, bench.plan.reason.fault) == (3, "not_ready")


def test_member_that_never_follows_the_plan(bench: Any) -> None:
    bench.running(step=8)
    bench.end(1, signal=9)
    bench.perform()
    bench.nodes["n1"].answer = "answers"
    bench.tick(121.0)
    assert (bench.plan.generation, bench.plan.reason.fault) == (3, "not_ready")


def test_single_member_copies_to_the_standby(make_bench: Any) -> None:
    bench = make_bench(nodes=1, mesh={"dp": 2}, standbys=1)
    bench.lead()
    bench.appear("n0")
    assert bench.records == {}
    bench.appear("n1")
    bench.follow()
    for step in (2, 3, 4, 5):
        bench.step(step)
    assert bench.plan.peers == {"n0": "n1"}
    bench.lose("n0")
    bench.vanish("n0")
    plan = bench.plan
    assert [m.uid for m in plan.members] == ["n1"]
    assert (plan.start.step, plan.start.tier) == (4, "memory")
    assert plan.peers == {}


def test_single_member_begins_without_a_standby_in_the_end(make_bench: Any) -> None:
    bench = make_bench(nodes=1, mesh={"dp": 2}, standbys=1)
    bench.lead()
    bench.appear("n0")
    bench.tick(21.0)
    assert bench.plan.peers == {}


def test_a_lost_node_without_a_standby(make_bench: Any, committed: Any) -> None:
    """It is waited for; then the job ends, and says which node was lost, what was missing, and what to do."""
    bench = make_bench(wait_for_node_s=30.0)
    bench.running(step=22)
    bench.manifests.append(committed(1, 20))
    bench.lose("n1")
    bench.vanish("n1")
    bench.tick(1.0)
    bench.tick(28.0)
    assert bench.mind is Mind.FORMING
    bench.tick(3.0)
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 3
    for words in (
        "node n1 lost, and no standby is left (layout.standbys = 0): 1 of 2 nodes are ready; n1 was lost (its agent's port",
        "for 30 s (policy.wait_for_node_s); run again: it resumes from step 20",
    ):
        assert words in bench.outcome.reason


def test_a_lost_node_that_comes_back_in_time(make_bench: Any) -> None:
    bench = make_bench(wait_for_node_s=30.0)
    bench.running(step=8)
    bench.lose("n1")
    bench.vanish("n1")
    bench.tick(20.0)
    bench.appear("n1", incarnation="b")
    assert (bench.plan.generation, bench.plan.reason.kind) == (2, "replace")


def test_nodes_that_never_came(make_bench: Any) -> None:
    bench = make_bench(wait_for_node_s=30.0)
    bench.lead()
    bench.appear("n0")
    bench.tick(31.0)
    assert bench.mind is Mind.FAILED
    assert bench.outcome.exit_code == 5
    assert bench.outcome.reason.startswith("not enough nodes: 1 of 2 nodes are ready, and")
    assert bench.outcome.reason.endswith("run again: it begins at the first step")

"""Agents end to end: real etcd, real processes, plans published by hand, ranks that speak the protocol without torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_world import AgentWorld, alive, steps_of, until

from surefoot import marks
from surefoot.ckpt import record
from surefoot.controller import wire
from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.store import CoordStore

pytestmark = pytest.mark.slow

MakeWorld = Callable[..., AgentWorld]


@pytest.fixture
def make_world(etcd: EmbeddedEtcd, coord: CoordStore, tmp_path: Path, job: str) -> Iterator[MakeWorld]:
    with ExitStack() as stack:

        def make(**settings: Any) -> AgentWorld:
            return stack.enter_context(AgentWorld(tmp_path, coord, etcd.endpoint, job, **settings))

        yield make


def test_a_job_of_two_nodes_runs_commits_and_leaves_nothing(make_world: MakeWorld) -> None:
    world = make_world(nodes=2, steps=12, every=5)
    agents = [world.start("n0"), world.start("n1")]
    for uid in ("n0", "n1"):
        world.parked(uid)
    world.publish(world.plan("n0", "n1"))
    status = world.wait_status(
        lambda s: len(s.ranks) == 2 and all(r.exit is not None for r in s.ranks), "all ranks ended"
    )
    assert [(r.phase, r.step, r.exit and r.exit.code) for r in status.ranks] == [("done", 12, 0)] * 2
    assert "before train() returned" not in world.log()
    told = status.committed
    assert (told.generation, told.step, told.fenced_by, told.failure) == (1, 12, None, "")
    assert {12} <= {m.step for m in record.list_manifests(world.store)} <= {5, 10, 12}
    # n1 holds copies of n0's ranks and the other way round.
    world.wait_status(lambda s: {(0, 1, 12), (1, 1, 12)} <= steps_of(s, replica=True), "copies on n1", "n1")
    for rank, uid in enumerate(("n0", "n0", "n1", "n1")):
        assert "failure=''" in world.rank_log(rank, 1, uid)
    launches = [e for e in world.history() if e["kind"] == "invoke" and e.get("what") == "ranks"]
    assert [(e["generation"], e["ranks"]) for e in launches] == [(1, [0, 1])]
    outcome = wire.Outcome(state="done", exit_code=0, step=12, reason="test", generation=1, run_id="another")
    world.coord.put(world.keys.outcome, wire.encode(outcome))
    time.sleep(0.3)  # that of another run changes nothing, and nothing tells when nothing happens
    assert [a.poll() for a in agents] == [None, None]
    outcome = wire.Outcome(state="done", exit_code=0, step=12, reason="test", generation=1)
    world.coord.put(world.keys.outcome, wire.encode(outcome))
    assert [a.wait(10) for a in agents] == [0, 0]
    assert not world.shm_dir("n0").exists()
    assert marks.find(run_id=world.owner.run_id) == []
    assert world.all_keys() == {"plan", "outcome"}


@pytest.mark.parametrize(("code", "ends_with"), [(3, 3), (4, 4), (5, 5), (99, 3)])
def test_a_failed_outcome_ends_ranks_and_the_agent_with_its_code(
    make_world: MakeWorld, code: int, ends_with: int
) -> None:
    world = make_world(params={"hang_at": 3})
    agent = world.start()
    world.parked()
    world.publish(world.plan("n0"))
    world.wait_status(lambda s: any(r.step == 3 for r in s.ranks), "the rank hangs")
    outcome = wire.Outcome(state="failed", exit_code=code, step=3, reason="test", generation=1)
    world.coord.put(world.keys.outcome, wire.encode(outcome))
    assert agent.wait(10) == ends_with
    assert marks.find(run_id=world.owner.run_id) == []
    assert not world.shm_dir("n0").exists()


def test_a_killed_rank_is_told_at_once_and_the_next_generation_starts_from_its_snapshots(
    make_world: MakeWorld,
) -> None:
    world = make_world(params={"kill_at": 6, "step_s": 0.05})
    world.start()
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: any(r.exit for r in s.ranks), "a rank is dead")
    dead = next(r for r in status.ranks if r.exit)
    assert dead.exit is not None
    assert (dead.rank, dead.exit.signal, dead.exit.teardown) == (0, 9, False)
    assert (0, 1, 5) in steps_of(status, replica=False)
    survivor = next(r for r in status.ranks if not r.exit)
    world.publish(world.plan("n0", **world.from_memory(5, {0: "n0", 1: "n0"})))
    started = world.wait_status(lambda s: s.generation == 2 and s.state == "running", "generation 2 runs")
    assert not alive(survivor.pid)
    assert {r.pid for r in started.ranks}.isdisjoint({dead.pid, survivor.pid})
    world.wait_status(lambda s: all(r.phase == "done" and r.exit for r in s.ranks), "finished")
    assert "restored generation 1 step 5" in world.rank_log(0, 2)
    assert "restored generation 1 step 5" in world.rank_log(1, 2)
    # An older plan, or the same once more, changes nothing for ever.
    world.point(1, "whatever")
    world.coord.put(world.keys.plan, wire.encode(wire.PlanPointer(generation=2, hash="x", location="y")))
    time.sleep(0.3)
    status = world.status()
    assert status is not None
    assert (status.generation, status.start_failure) == (2, None)


def test_a_lost_node_is_replaced_and_its_ranks_come_from_the_peer(make_world: MakeWorld) -> None:
    world = make_world(nodes=2, steps=20, params={"step_s": 0.05})
    for uid in ("n0", "n1", "n2"):
        world.start(uid)
    for uid in ("n0", "n1", "n2"):
        world.parked(uid)
    world.publish(world.plan("n0", "n1"))
    world.wait_status(lambda s: len({x for _, _, x in steps_of(s, replica=True)}) >= 3, "copies on n0")
    for process in marks.find(run_id=world.owner.run_id, node="n1"):
        os.kill(process.pid, signal.SIGKILL)
    world.agents["n1"].wait()
    answer = world.probe("n0")
    assert isinstance(answer, wire.ProbeReplyMsg)
    held = steps_of(answer.status, replica=False) | steps_of(answer.status, replica=True)
    step = max(s for s in range(100) if {(r, 1, s) for r in range(4)} <= held)
    world.publish(world.plan("n0", "n2", **world.from_memory(step, {0: "n0", 1: "n0", 2: "n0", 3: "n0"})))
    for uid in ("n0", "n2"):
        world.wait_status(
            lambda s: s.generation == 2 and len(s.ranks) == 2 and all(r.exit for r in s.ranks),
            "finished",
            uid,
        )
    for rank, uid in enumerate(("n0", "n0", "n2", "n2")):
        assert f"restored generation 1 step {step} from {world.shm_dir(uid)}/own/r{rank}" in world.rank_log(
            rank, 2, uid
        )
    status = world.status("n2")
    assert status is not None
    assert status.note == ""


@pytest.mark.parametrize(
    ("sources", "kind"),
    [({0: "n0", 1: "n0"}, "snapshot_missing"), ({0: "n9", 1: "n9"}, "peer_unreachable")],
)
def test_a_starting_point_that_cannot_be_served_is_a_start_failure(
    make_world: MakeWorld, sources: dict[int, str], kind: str
) -> None:
    world = make_world()
    world.start()
    world.parked()
    world.generation = 6
    world.publish(world.plan("n0", **world.from_memory(5, sources)))
    status = world.wait_status(lambda s: s.start_failure is not None, "start failure")
    assert status.start_failure is not None
    assert (status.start_failure.generation, status.start_failure.kind) == (7, kind)
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: s.generation == 8 and s.state == "running", "the next plan works")
    assert status.start_failure is None


def test_a_record_that_is_not_what_the_plan_key_says(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.parked()
    world.publish(world.plan("n0"), hash_of=b"something else")
    status = world.wait_status(lambda s: s.start_failure is not None, "start failure")
    assert status.start_failure is not None
    assert status.start_failure.kind == "record_unreadable"
    assert "the plan key says" in status.start_failure.detail
    world.point(5, "abc")
    status = world.wait_status(lambda s: s.generation == 5, "no such record")
    assert status.start_failure is not None
    assert (status.start_failure.generation, status.start_failure.kind) == (5, "record_unreadable")


def test_plans_of_another_run_another_life_or_without_us(make_world: MakeWorld) -> None:
    world = make_world(params={"hang_at": 2})
    world.start()
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: s.state == "running" and len(s.ranks) == 2, "runs")
    pids = [r.pid for r in status.ranks]
    world.publish(world.plan("n0", run_id="another"))
    until(lambda: "is left alone" in world.log(), "the foreign plan is seen")
    assert all(map(alive, pids))
    plan = world.plan("n0")
    other = tuple(wire.Member(uid="n0", incarnation="other", index=0, first_rank=0, ranks=2) for _ in [0])
    world.publish(world.plan("n0", members=other, generation=plan.generation))
    status = world.wait_status(lambda s: s.generation == 3 and s.state == "parked", "parked")
    assert status.ranks == ()
    assert not any(map(alive, pids))


def test_stacks_of_a_hang_are_on_disk_before_the_ranks_end(make_world: MakeWorld) -> None:
    world = make_world(params={"hang_at": 3})
    world.start()
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: any(r.step == 3 for r in s.ranks), "a rank hangs")
    hung = next(r for r in status.ranks if r.rank == 0)
    os.kill(hung.pid, signal.SIGSTOP)  # not even a stopped process keeps its stack to itself
    reason = wire.Reason(kind="restart", cause="workload", fault="hang")
    world.publish(world.plan("n0", **world.from_memory(2, {0: "n0", 1: "n0"}, reason=reason)))
    world.wait_status(lambda s: s.generation == 2 and s.state == "running", "generation 2 runs")
    stack = (world.state_dir("n0") / "logs" / "stacks-g1-r0.txt").read_text()
    assert "_strike" in stack
    assert "train_in_images" in stack
    assert not alive(hung.pid)


def test_an_exception_and_its_last_words_are_told(make_world: MakeWorld) -> None:
    world = make_world(params={"raise_at": 3})
    world.start()
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: any(r.exit for r in s.ranks), "a rank has ended")
    dead = next(r for r in status.ranks if r.exit)
    assert dead.exit is not None
    assert dead.exit.code == 1
    assert "RuntimeError: as ordered" in dead.exit.last_words


def test_a_module_that_does_not_exist_is_one_error_and_no_loop(make_world: MakeWorld) -> None:
    world = make_world(preload=["no_such_module"])
    world.start()
    world.parked()
    status = world.status()
    assert status is not None
    assert "no_such_module" in status.note
    for generation in (1, 2):
        world.publish(world.plan("n0"))
        status = world.wait_status(
            lambda s, g=generation: s.start_failure is not None and s.start_failure.generation == g, "told"
        )
        failure = status.start_failure
        assert failure is not None
        assert failure.kind == "launch_failed"
        assert failure.error is not None
        assert (failure.error.kind, failure.error.type) == ("startup", "ModuleNotFoundError")
    assert world.log().count("the zygote is warm") == 1


def test_too_small_a_budget_is_one_error(make_world: MakeWorld) -> None:
    world = make_world(budget="50KB")
    world.start()
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: s.start_failure is not None, "told")
    assert status.start_failure is not None
    assert "checkpoint.memory_budget allows 50,000" in status.start_failure.detail
    assert status.start_failure.error is not None


def test_probes_are_answered_with_a_fresh_status_and_ask_for_the_token(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.parked()
    first, second = world.probe(), world.probe()
    assert isinstance(first, wire.ProbeReplyMsg)
    assert isinstance(second, wire.ProbeReplyMsg)
    assert second.status.seq > first.status.seq
    assert isinstance(world.probe(token="wrong"), wire.RefusedMsg)
    assert isinstance(world.probe(job="another"), wire.RefusedMsg)


@pytest.mark.parametrize("lie", [{"STAND_IN_TOKEN": "wrong"}, {"STAND_IN_GENERATION": "7"}])
def test_a_rank_with_a_wrong_token_or_generation_is_not_let_in(
    make_world: MakeWorld, lie: dict[str, str]
) -> None:
    world = make_world()
    world.start(env=lie)
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: any(r.exit for r in s.ranks), "it found the door closed")
    assert {r.exit.code for r in status.ranks if r.exit} == {77}
    assert "is refused" in world.log()


def test_a_lease_that_is_revoked_is_replaced_and_ranks_notice_nothing(make_world: MakeWorld) -> None:
    world = make_world(params={"hang_at": 3})
    world.start()
    info = world.parked()
    world.publish(world.plan("n0"))
    before = world.wait_status(lambda s: any(r.step == 3 for r in s.ranks), "runs")
    found = world.coord.get(world.keys.node("n0"))
    assert found is not None
    world.coord.revoke(found.lease)
    again = until(lambda: world.coord.get(world.keys.node("n0")), "registered again")
    assert again.create_revision > found.create_revision
    assert wire.decode(wire.NodeInfo, again.value) == info
    after = world.wait_status(lambda s: s.state == "running", "status is back")
    assert [r.pid for r in after.ranks] == [r.pid for r in before.ranks]
    assert all(alive(r.pid) for r in after.ranks)


def helpers(world: AgentWorld, name: str) -> list[int]:
    """Pids of a node's processes by the name that they gave themselves."""
    found = marks.find(run_id=world.owner.run_id, node="n0")
    return [p.pid for p in found if Path(f"/proc/{p.pid}/comm").read_text().strip() == name]


def test_helpers_that_die_are_replaced_and_ranks_train_on(make_world: MakeWorld) -> None:
    world = make_world(steps=60, every=5, params={"step_s": 0.05, "hang_at": 50})
    world.start()
    info = world.parked()
    world.publish(world.plan("n0"))
    world.wait_status(lambda s: any(r.step > 3 for r in s.ranks), "runs")
    before = world.status()
    assert before is not None
    for name in ("sf-zygote", "sf-snapshots", "sf-store"):
        (pid,) = helpers(world, name)[:1]
        os.kill(pid, signal.SIGKILL)
        if name != "sf-store":
            until(lambda n=name, p=pid: helpers(world, n) not in ([], [p]), f"another {name}")
    changed = until(
        lambda: (i := world.info("n0")) and i.flight_port not in (0, info.flight_port) and i, "told"
    )
    assert changed.incarnation == info.incarnation
    status = world.wait_status(lambda s: any(r.step == 50 for r in s.ranks), "trains on")
    assert [r.pid for r in status.ranks] == [r.pid for r in before.ranks]
    assert status.committed is not None
    assert status.committed.failure == ""
    world.publish(world.plan("n0", **world.from_memory(49, {0: "n0", 1: "n0"})))
    world.wait_status(
        lambda s: s.generation == 2 and all(r.exit for r in s.ranks) and len(s.ranks) == 2, "done"
    )


def test_what_is_wrong_from_the_start_is_said_and_has_its_exit_code(make_world: MakeWorld) -> None:
    world = make_world()
    endpoint = world.endpoint
    world.endpoint = "127.0.0.1:1"
    assert world.start().wait(30) == 5
    assert "no etcd answers at 127.0.0.1:1" in world.log()
    world.endpoint = endpoint
    token, job_file = world.owner.token_file.read_text(), world.job_file.read_text()
    world.owner.token_file.unlink()
    assert world.start().wait(30) == 2
    assert "the token file" in world.log()
    world.owner.token_file.write_text(token)
    world.job_file.write_text(job_file.replace("steps = ", "stepps = "))
    assert world.start().wait(30) == 2
    assert "did you mean 'steps'" in world.log()
    assert marks.find(run_id=world.owner.run_id) == []


def test_two_agents_in_one_state_folder(make_world: MakeWorld) -> None:
    world = make_world()
    first = world.start()
    world.parked()
    second = world.start()
    assert second.wait(20) == 2
    assert "another agent lives in" in world.log()
    assert first.poll() is None
    first.kill()
    first.wait()

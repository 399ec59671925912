"""Scenario rows CTL-17, CTL-33, CTL-34, CTL-35 and the agent's side of CTL-03, as far as agents go."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_world import AgentWorld, alive, steps_of, until

from surefoot import marks
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


@pytest.fixture
def bystanders() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A child of the launcher that has nothing to do with the job, and one that looks just like a rank (CTL-34)."""
    environ = {k: v for k, v in os.environ.items() if k != marks.MARK_ENV}
    sleep = "import time; time.sleep(600)"
    unrelated = subprocess.Popen([sys.executable, "-c", sleep], env=environ)
    look_alike = subprocess.Popen(
        [sys.executable, "-c", sleep, "-m", "surefoot.agent.zygote", "--fd", "5"],
        env={**environ, "RANK": "0", "WORLD_SIZE": "2", "SUREFOOT_GENERATION": "1"},
    )
    yield [unrelated, look_alike]
    for process in (unrelated, look_alike):
        process.kill()
        process.wait()


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def workers(world: AgentWorld, generation: int) -> list[int]:
    """Pids of a rank and of its four workers."""
    path = world.folder / f"workers-{generation}"
    return until(lambda: [int(p) for p in path.read_text().split()] if path.exists() else None, "workers")


def test_ctl_33_a_new_agent_ends_what_the_former_one_left_before_it_starts_a_rank(
    make_world: MakeWorld, bystanders: list[subprocess.Popen[bytes]]
) -> None:
    world = make_world(ranks=1)
    world.start(entry="wait_with_workers")
    first = world.parked()
    world.publish(world.plan("n0"))
    pids = workers(world, 1)
    assert len(pids) == 5
    assert all(map(alive, pids))
    world.wait_status(lambda s: any(r.step == 1 for r in s.ranks), "the rank is known")
    world.crash("n0")
    until(lambda: not alive(pids[0]), "the rank is dead")
    assert all(map(alive, pids[1:])), "the workers outlive agent and rank, or the row tests nothing"
    began = time.monotonic()
    world.start(entry="wait_with_workers")
    world.parked(incarnation_before=first.incarnation)
    world.publish(world.plan("n0"))
    again = workers(world, 2)
    assert time.monotonic() - began < 10
    assert not any(map(alive, pids))
    # Before: the kill is in the history ahead of the first launch of the new life.
    life = [e for e in world.history() if e["pid"] == world.agents["n0"].pid]
    stopped = next(n for n, e in enumerate(life) if e.get("what") == "predecessors")
    launched = next(n for n, e in enumerate(life) if e.get("op") == "launch")
    assert stopped < launched
    assert life[stopped]["pids"]
    assert all(map(alive, again))
    assert [b.poll() for b in bystanders] == [None, None]


def test_ctl_34_a_generation_is_cleaned_up_and_nobody_else_notices(
    make_world: MakeWorld, bystanders: list[subprocess.Popen[bytes]]
) -> None:
    world = make_world(ranks=1)
    agent = world.start(entry="wait_with_workers")
    world.parked()
    world.publish(world.plan("n0"))
    pids = workers(world, 1)
    world.publish(world.plan("n0"))
    workers(world, 2)
    assert not any(map(alive, pids))
    assert agent.poll() is None
    assert [b.poll() for b in bystanders] == [None, None]
    # The job ends: still nobody else does.
    outcome = wire.Outcome(state="done", exit_code=0, step=1, reason="test", generation=2)
    world.coord.put(world.keys.outcome, wire.encode(outcome))
    assert agent.wait(10) == 0
    assert marks.find(run_id=world.owner.run_id) == []
    assert [b.poll() for b in bystanders] == [None, None]


def test_snapshots_of_a_former_life_are_adopted_if_they_are_whole(make_world: MakeWorld) -> None:
    world = make_world(params={"hang_at": 6})
    world.start()
    first = world.parked()
    world.publish(world.plan("n0"))
    world.wait_status(
        lambda s: {(0, 1, 5), (1, 1, 5)} <= steps_of(s, replica=False) and len(s.ranks) == 2, "snapshots"
    )
    world.crash("n0")
    damaged = world.shm_dir("n0") / "own" / "r0" / "slot0"
    held = damaged.read_bytes()
    damaged.write_bytes(held[:6000] + bytes([held[6000] ^ 1]) + held[6001:])
    world.start()
    world.parked(incarnation_before=first.incarnation)
    status = world.wait_status(lambda s: s.snapshots != (), "adopted")
    adopted = steps_of(status, replica=False)
    assert len({s for r, _, s in adopted if r == 1}) == 3
    assert len({s for r, _, s in adopted if r == 0}) == 2, "the damaged one is not among them"
    step = max({s for r, _, s in adopted if r == 0} & {s for r, _, s in adopted if r == 1})
    world.publish(world.plan("n0", **world.from_memory(step, {0: "n0", 1: "n0"})))
    world.wait_status(lambda s: len(s.ranks) == 2 and all(r.exit for r in s.ranks), "finished")
    assert f"restored generation 1 step {step}" in world.rank_log(0, 2)
    logs = sorted(p.name for p in (world.state_dir("n0") / "logs").glob("rank-*"))
    assert logs == ["rank-0-g1.log", "rank-0-g2.log", "rank-1-g1.log", "rank-1-g2.log"]


def test_ctl_17_an_address_of_an_older_generation_is_never_read(make_world: MakeWorld) -> None:
    """Three nodes; the one that hosts the rendezvous is lost, its keys still stand, and its old port swallows packets."""
    world = make_world(nodes=3, ranks=1, params={"hang_at": 4})
    for uid in ("n0", "n1", "n2"):
        world.start(uid)
    for uid in ("n0", "n1", "n2"):
        world.parked(uid)
    world.publish(world.plan("n0", "n1", "n2"))
    old = world.wait_status(lambda s: any(r.step == 4 for r in s.ranks), "runs").rendezvous
    assert old is not None
    doomed = {p.pid: command(p.pid) for p in marks.find(run_id=world.owner.run_id, node="n0")}
    # A stopped host still takes connections, and never answers. First, for it would leave when the agent does.
    for pid, name in sorted(doomed.items(), key=lambda item: item[1] != "sf-store"):
        os.kill(pid, signal.SIGSTOP if name == "sf-store" else signal.SIGKILL)
    world.agents["n0"].wait()
    socket.create_connection((old.host, old.port), timeout=5).close()
    found = world.status("n0")
    assert found is not None, "the lost node's keys stand until its lease ends, or the row tests nothing"
    assert found.rendezvous == old
    world.publish(world.plan("n1", "n2", reason=wire.Reason(kind="replace", fault="node_loss")))
    for uid in ("n1", "n2"):
        world.wait_status(lambda s: len(s.ranks) == 1 and all(r.exit for r in s.ranks), "finished", uid)
    new = world.status("n1")
    assert new is not None
    assert new.rendezvous is not None
    assert new.rendezvous.generation == 2
    assert new.rendezvous.port != old.port
    for rank, uid in enumerate(("n1", "n2")):
        assert f"rendezvous at {new.rendezvous.port}" in world.rank_log(rank, 2, uid)


def test_ctl_17_nor_where_the_same_node_hosts_the_next_one(make_world: MakeWorld) -> None:
    """The host's agent is slow to see the new plan, so its status still holds the old address: nobody may take that."""
    world = make_world(nodes=2, ranks=1, params={"hang_at": 4})
    for uid in ("n0", "n1"):
        world.start(uid)
    for uid in ("n0", "n1"):
        world.parked(uid)
    world.publish(world.plan("n0", "n1"))
    old = world.wait_status(lambda s: any(r.step == 4 for r in s.ranks), "runs").rendezvous
    os.kill(world.agents["n0"].pid, signal.SIGSTOP)
    try:
        world.publish(world.plan("n0", "n1", reason=wire.Reason(kind="restart", fault="rank_exit")))
        seen = world.wait_status(lambda s: s.generation == 2, "follows", "n1").seq
        # Three heartbeats are many times what a launch takes.
        waiting = world.wait_status(lambda s: s.seq >= seen + 3, "beats on", "n1")
        host = world.status("n0")
        assert host is not None
        assert host.rendezvous == old, "the old address stands, or the row tests nothing"
        assert waiting.ranks == ()
        assert not (world.state_dir("n1") / "logs" / "rank-1-g2.log").exists()
    finally:
        os.kill(world.agents["n0"].pid, signal.SIGCONT)
    for uid in ("n0", "n1"):
        world.wait_status(lambda s: len(s.ranks) == 1 and all(r.exit for r in s.ranks), "finished", uid)


@pytest.mark.parametrize("edge", ["launch.before_fork", "launch.after_fork"])
def test_an_agent_that_dies_at_the_edge_of_a_launch_never_launches_twice(
    make_world: MakeWorld, edge: str
) -> None:
    world = make_world()
    agent = world.start(env={"SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": f"{edge}=crash"})
    first = world.parked()
    world.publish(world.plan("n0"))
    assert agent.wait(20) == -signal.SIGKILL
    world.start()
    world.parked(incarnation_before=first.incarnation)
    world.publish(world.plan("n0"))
    world.wait_status(lambda s: len(s.ranks) == 2 and all(r.exit for r in s.ranks), "finished")
    noted = [
        json.loads(line) for line in (world.state_dir("n0") / "processes.jsonl").read_text().splitlines()
    ]
    launched = [(n["generation"], n["rank"]) for n in noted]
    assert sorted(launched) == sorted(set(launched))
    expected = {(2, 0), (2, 1)} if edge == "launch.before_fork" else {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert set(launched) == expected
    assert all(n["start_time"] > 0 for n in noted)


# ---------------------------------------------------------------- CTL-03: however an agent ends, it ends no job


@pytest.mark.parametrize("how", ["0", "1", "2", "SIGTERM", "SIGKILL"])
def test_ctl_03_the_end_of_an_agent_writes_no_key_that_ends_the_job(make_world: MakeWorld, how: str) -> None:
    world = make_world(ranks=1, params={"hang_at": 3}, grace_s=1)
    # The unexpected end: a part of the agent raises, at a failpoint in its heartbeat, once ranks run.
    env = {"SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": "heartbeat.before_put=error@8"} if how == "1" else {}
    agent = world.start(env=env)
    world.parked()
    assert world.all_keys() == {"nodes/n0", "status/n0"}
    world.publish(world.plan("n0"))
    if how == "1":
        assert agent.wait(20) == 1
    else:
        world.wait_status(lambda s: any(r.step == 3 for r in s.ranks), "runs")
    match how:
        case "0":
            outcome = wire.Outcome(state="done", exit_code=0, step=3, reason="test", generation=1)
            world.coord.put(world.keys.outcome, wire.encode(outcome))
            assert agent.wait(10) == 0
            world.coord.delete(world.keys.outcome)  # what is left is the agent's doing
        case "2":
            assert world.start().wait(20) == 2
            agent.kill()
        case "SIGTERM" | "SIGKILL":
            agent.send_signal(signal.Signals[how])
        case _:
            pass
    agent.wait(10)
    assert world.all_keys() <= {"nodes/n0", "status/n0", "plan"}


@pytest.mark.parametrize(("leaves_after_s", "grace_s"), [(0.5, 5), (30.0, 1)])
def test_ctl_35_sigterm_gives_ranks_the_grace_and_no_more(
    make_world: MakeWorld, leaves_after_s: float, grace_s: int
) -> None:
    world = make_world(ranks=1, grace_s=grace_s)
    agent = world.start(entry="wait_for_stop", env={"STAND_IN_LEAVES_AFTER": str(leaves_after_s)})
    world.parked()
    world.publish(world.plan("n0"))
    world.wait_status(lambda s: any(r.step == 1 for r in s.ranks), "runs")
    began = time.monotonic()
    agent.send_signal(signal.SIGTERM)
    world.wait_status(lambda s: s.state in ("leaving", "stopping"), "says so")
    assert agent.wait(20) == 130
    took = time.monotonic() - began
    said = world.rank_log(0, 1)
    assert f"told to stop: shutdown, {grace_s} s" in said
    assert f"ranks have {grace_s} s" in world.log()
    if leaves_after_s < grace_s:
        assert "left in good order" in said
        assert took < grace_s
    else:
        assert "left in good order" not in said
        assert grace_s <= took < grace_s + 3
    assert marks.find(run_id=world.owner.run_id, node="n0") == []
    assert world.all_keys() == {"plan"}, "the lease is given back"

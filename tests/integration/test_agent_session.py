"""Real ranks under real agents: torch, gloo, FSDP2, the loader; a killed rank, and a lost node whose state the peer holds."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_world import AgentWorld, steps_of
from fakeagent import write_text

from surefoot import marks
from surefoot.ckpt import record
from surefoot.controller import wire
from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.store import CoordStore

pytestmark = pytest.mark.slow

MakeWorld = Callable[..., AgentWorld]


@pytest.fixture
def make_world(etcd: EmbeddedEtcd, coord: CoordStore, tmp_path: Path, job: str) -> Iterator[MakeWorld]:
    write_text(tmp_path / "text")
    with ExitStack() as stack:

        def make(**settings: Any) -> AgentWorld:
            settings.setdefault("preload", ["session_trainers"])
            settings["params"] = {"data_root": str(tmp_path / "text")} | settings.get("params", {})
            settings.setdefault("program", "session_trainers")
            return stack.enter_context(AgentWorld(tmp_path, coord, etcd.endpoint, job, **settings))

        yield make


def finished(status: wire.NodeStatus) -> bool:
    return len(status.ranks) == 2 and all(r.exit is not None for r in status.ranks)


def parameters(world: AgentWorld, generation: int, uid: str = "n0", rank: int = 0) -> str:
    found = re.search(r"parameters (\S+)", world.rank_log(rank, generation, uid))
    assert found, world.rank_log(rank, generation, uid)
    return found[1]


def restartable(world: AgentWorld, *uids: str) -> int:
    """The newest step of which these nodes hold all four ranks' snapshots, or all two of one node."""
    held: set[tuple[int, int, int]] = set()
    for uid in uids:
        status = world.probe(uid)
        assert isinstance(status, wire.ProbeReplyMsg)
        held |= steps_of(status.status, replica=False) | steps_of(status.status, replica=True)
    world_size = {2: 2, 4: 4}[world.ranks * world.nodes]
    return max(s for s in range(1000) if {(r, world.generation, s) for r in range(world_size)} <= held)


def test_a_killed_rank_comes_back_from_memory_to_the_same_parameters(make_world: MakeWorld) -> None:
    world = make_world(steps=30, every=10)
    world.start(entry=None, modules=None)
    world.parked()
    world.publish(world.plan("n0"))
    status = world.wait_status(lambda s: any(r.step >= 8 for r in s.ranks), "trains", within_s=60)
    os.kill(status.ranks[1].pid, signal.SIGKILL)
    world.wait_status(lambda s: any(r.exit for r in s.ranks), "told")
    step = restartable(world, "n0")
    assert step >= 7
    world.publish(world.plan("n0", **world.from_memory(step, {0: "n0", 1: "n0"})))
    status = world.wait_status(lambda s: s.generation == 2 and finished(s), "finished", within_s=60)
    assert [(r.phase, r.exit and r.exit.code) for r in status.ranks] == [("done", 0)] * 2
    told = status.committed
    assert (told.generation, told.step, told.fenced_by, told.failure) == (2, 30, None, "")
    disturbed = parameters(world, 2)
    # The same job once more, undisturbed, under other generations: the same numbers.
    world.publish(world.plan("n0"))
    world.wait_status(lambda s: s.generation == 3 and finished(s), "finished", within_s=60)
    assert parameters(world, 3) == disturbed


def test_a_lost_nodes_ranks_start_on_another_from_the_peers_copies(make_world: MakeWorld) -> None:
    world = make_world(nodes=2, steps=40, every=50)
    for uid in ("n0", "n1", "n2"):
        world.start(uid, entry=None, modules=None)
    for uid in ("n0", "n1", "n2"):
        world.parked(uid)
    world.publish(world.plan("n0", "n1"))
    world.wait_status(lambda s: any(r.step >= 8 for r in s.ranks), "trains", within_s=60)
    for process in marks.find(run_id=world.owner.run_id, node="n1"):
        os.kill(process.pid, signal.SIGKILL)
    world.agents["n1"].wait()
    step = restartable(world, "n0")
    assert step >= 7
    sources = dict.fromkeys(range(4), "n0")
    world.publish(world.plan("n0", "n2", **world.from_memory(step, sources)))
    for uid in ("n0", "n2"):
        world.wait_status(lambda s: s.generation == 2 and finished(s), "finished", uid, within_s=60)
    assert [m.step for m in record.list_manifests(world.store)] == [40]
    status = world.status("n0")
    assert status is not None
    told = status.committed
    assert (told.generation, told.step, told.fenced_by, told.failure) == (2, 40, None, "")
    disturbed = parameters(world, 2)
    world.publish(world.plan("n0", "n2"))
    for uid in ("n0", "n2"):
        world.wait_status(lambda s: s.generation == 3 and finished(s), "finished", uid, within_s=60)
    assert parameters(world, 3) == disturbed

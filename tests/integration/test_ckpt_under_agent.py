"""Checkpoints under real agents: what is only in memory is not durable, and nobody says so. (CKP-29)"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from agent_world import AgentWorld, steps_of, until
from rank_stand_ins import ROW_NBYTES
from stand_in_images import row

from surefoot import marks
from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.tools.inspect import find
from surefoot.ckpt.tools.verifying import verify_step
from surefoot.controller import wire
from surefoot.controller.etcd import EmbeddedEtcd
from surefoot.controller.store import CoordStore

pytestmark = pytest.mark.slow

EVERY = 100
RANKS = 2
FREEZE = {"SUREFOOT_CHAOS": "1", "SUREFOOT_FAILPOINTS": "upload.before_finish=freeze"}
"""The node's uploader stands still with the bytes of rank 0's snapshot in its hands. Nobody else passes this point."""


def snapshot_server(world: AgentWorld) -> int:
    found = [p.pid for p in marks.find(run_id=world.owner.run_id) if b"agent.snapshots" in cmdline(p.pid)]
    assert len(found) == 1
    return found[0]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def of_all_ranks(status: wire.NodeStatus, generation: int) -> list[int]:
    """The steps of which the node holds every rank's own snapshot, in order."""
    held = steps_of(status, replica=False)
    steps = {step for _, g, step in held if g == generation}
    return sorted(s for s in steps if {(r, generation, s) for r in range(RANKS)} <= held)


def require_whole(world: AgentWorld, step: int) -> None:
    """Every byte is what the ranks had at that step."""
    assert verify_step(world.store, step).problems == ()
    manifest, counts = find(world.store, step)
    assert counts
    found = [world.store.read(o.key, o.data_start, o.data_nbytes) for o in manifest.objects]
    assert found == [row(rank, step, ROW_NBYTES)[:ROW_NBYTES] for rank in range(RANKS)]


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_rank_dies_and_its_successor_writes_while_the_node_uploads(
    where: str,
    request: pytest.FixtureRequest,
    etcd: EmbeddedEtcd,
    coord: CoordStore,
    job: str,
    tmp_path: Path,
) -> None:
    """CKP-29: no torn snapshot, no segfault, and what is only in memory is announced as durable by nobody."""
    root = request.getfixturevalue("s3_url") if where == "s3" else str(tmp_path / "objects")
    settings = {"ranks": RANKS, "steps": 100 * EVERY, "every": EVERY, "params": {"step_s": 0.02}}
    with AgentWorld(tmp_path, coord, etcd.endpoint, job, root=root, **settings) as world:
        world.start(env=FREEZE)
        world.parked()
        world.publish(world.plan("n0"))
        server = snapshot_server(world)
        until(lambda: is_frozen(server) or None, "the snapshot of the first due step is being uploaded", 60)

        status = world.status()
        assert status is not None
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        status = world.wait_status(lambda s: any(r.exit for r in s.ranks), "a rank is dead")
        (exited,) = [r.exit for r in status.ranks if r.exit is not None]
        assert exited.signal == signal.SIGKILL
        probed = world.probe()
        assert isinstance(probed, wire.ProbeReplyMsg)
        start = of_all_ranks(probed.status, 1)[-1]
        assert start >= EVERY
        world.publish(world.plan("n0", **world.from_memory(start, dict.fromkeys(range(RANKS), "n0"))))
        status = world.wait_status(
            lambda s: bool(of_all_ranks(s, 2)) and of_all_ranks(s, 2)[-1] >= start + 3,
            "the successors have written to all three slots",
        )

        assert is_frozen(server), "the upload is still under way"
        assert status.committed is None
        assert list_manifests(world.store) == []
        assert not any("committed" in world.rank_log(r, g) for r in range(RANKS) for g in (1, 2))

        os.kill(server, signal.SIGCONT)
        told = world.wait_status(lambda s: s.committed is not None, "the end of the commit is told").committed
        assert told is not None
        # It stands, and counts; but its generation is over, so it is the lineage that says so, and not the committer.
        assert (told.generation, told.step, told.fenced_by) == (1, EVERY, 2)
        require_whole(world, EVERY)
        due = (start // EVERY + 1) * EVERY
        status = world.wait_status(
            lambda s: s.committed is not None and s.committed.generation == 2, "and the next one", within_s=60
        )
        assert status.committed is not None
        assert (status.committed.step, status.committed.failure) == (due, "")
        require_whole(world, due)
        line = lineage(read_records(world.store), list_manifests(world.store))
        assert [(m.generation, m.step) for m in line][:2] == [(1, EVERY), (2, due)]
        assert snapshot_server(world) == server, "it was not replaced"
        assert [r.exit for r in status.ranks] == [None] * RANKS

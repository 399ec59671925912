"""Toy agents for tests of the controller: real keys, real leases, real probes over TCP; ranks are numbers that count steps.

A `ToyJob` moves all ranks of a plan in lockstep, as a collective would: nobody steps while one of them is dead, frozen or not
up yet. Every step leaves snapshots on the node and its peer, every few steps a manifest in the object store.
"""

from __future__ import annotations

import os
import random
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from surefoot.ckpt.record import highest_record, read_record
from surefoot.ckpt.store import ObjectStore
from surefoot.controller import wire
from surefoot.controller.core.budget import plan_of
from surefoot.controller.keys import Keys
from surefoot.controller.leases import LeaseKeeper
from surefoot.controller.store import CoordError, CoordStore

TOKEN = "secret"
STEP_S = 0.05
BEAT_S = 0.5


class ToyAgent:
    """One node. `state` of its ranks is changed by the job's thread and by the test, under the job's lock."""

    def __init__(self, job: ToyJob, uid: str, *, slots: int, ttl_s: int) -> None:
        self.job, self.uid, self.slots = job, uid, slots
        self.incarnation = f"{uid}-{random.Random().getrandbits(32):08x}"
        self.generation = 0
        self.state = "parked"
        self.ranks: dict[int, wire.RankStatus] = {}
        self.snapshots: list[wire.SnapshotRef] = []
        self.committed: wire.Committed | None = None
        self.seq = 0
        self.alive = True
        self.frozen: set[int] = set()
        self._server = _ProbeServer(self)
        self._ttl_s = ttl_s
        self._register()

    def _register(self) -> None:
        """Under a fresh lease, as the same life."""
        keeper = LeaseKeeper(self.job.store, self._ttl_s, on_lost=self._lease_lost, rng=random.Random(7))
        keeper.start()
        self._keeper = keeper
        info = wire.NodeInfo(
            uid=self.uid,
            incarnation=self.incarnation,
            host="127.0.0.1",
            control_port=self._server.port,
            flight_port=1,
            pid=os.getpid(),
            slots=self.slots,
            code_version="toy",
        )
        self.job.store.put(self.job.keys.node(self.uid), wire.encode(info), keeper.lease)
        self.write()

    def _lease_lost(self, reason: str) -> None:
        def again() -> None:
            while self.alive:
                try:
                    self._register()
                except CoordError:
                    time.sleep(0.1)  # the pace of retries
                else:
                    return

        threading.Thread(target=again, daemon=True).start()

    def status(self) -> wire.NodeStatus:
        with self.job.lock:
            self.seq += 1
            return wire.NodeStatus(
                uid=self.uid,
                incarnation=self.incarnation,
                seq=self.seq,
                generation=self.generation,
                state=self.state,
                ranks=tuple(self.ranks[r] for r in sorted(self.ranks)),
                snapshots=tuple(self.snapshots[-16:]),
                committed=self.committed,
            )

    def write(self) -> None:
        if self.alive:
            try:
                self.job.store.put(
                    self.job.keys.status(self.uid), wire.encode(self.status()), self._keeper.lease
                )
            except CoordError:
                pass  # the next beat says it again

    def follow(self, plan: wire.Plan) -> None:
        """Take a plan up: its ranks are in their first step at once."""
        with self.job.lock:
            if plan.generation <= self.generation:
                return
            member = plan.member(self.uid)
            self.generation = plan.generation
            self.frozen.clear()
            mine = member is not None and member.incarnation == self.incarnation
            self.state = "running" if mine else "parked"
            first, ranks = (member.first_rank, member.ranks) if mine and member else (0, 0)
            self.ranks = {
                r: wire.RankStatus(
                    rank=r, pid=100 + r, phase="step", step=plan.start.step + 1, phase_age_s=0.0
                )
                for r in range(first, first + ranks)
            }
        self.write()

    def end_rank(self, rank: int, **report: Any) -> float:
        """A rank's process ends; returns the moment at which that was."""
        with self.job.lock:
            self.ranks[rank] = msgspec.structs.replace(self.ranks[rank], exit=wire.ExitReport(**report))
            at_s = time.monotonic()
        self.write()
        return at_s

    def die(self) -> None:
        """All of the node is gone at once: nothing listens, nothing renews."""
        with self.job.lock:
            self.alive = False
        self._server.close()
        self._keeper.stop(revoke=False)

    def leave(self) -> None:
        if self.alive:
            self.alive = False
            self._server.close()
            self._keeper.stop()


class _ProbeServer:
    """Answers `ProbeMsg` lines."""

    def __init__(self, agent: ToyAgent) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    probe = wire.decode(wire.ProbeMsg, line)
                    good = (probe.token, probe.job) == (TOKEN, agent.job.keys.job)
                    answer: msgspec.Struct = (
                        wire.ProbeReplyMsg(status=agent.status())
                        if good
                        else wire.RefusedMsg(reason="the token is wrong")
                    )
                    self.wfile.write(wire.encode(answer) + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = False
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class ToyJob:
    """The agents of one job, and the thread that makes them follow plans, step and commit."""

    def __init__(
        self,
        store: CoordStore,
        objects: ObjectStore,
        job: str,
        *,
        steps: int,
        every_steps: int = 20,
        ttl_s: int = 10,
    ) -> None:
        self.store, self.objects, self.keys = store, objects, Keys(job)
        self.steps, self.every_steps, self.ttl_s = steps, every_steps, ttl_s
        self.lock = threading.RLock()
        self.agents: dict[str, ToyAgent] = {}
        self.plans: dict[int, tuple[wire.Plan, float]] = {}
        """Plans seen, and when (CLOCK_MONOTONIC)."""
        self.acked: list[tuple[int, int]] = []
        """(generation, step) of what was committed and acknowledged."""
        self.plan: wire.Plan | None = None
        self.paused = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=self._step, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, *uids: str, slots: int = 2) -> None:
        for uid in uids:
            self.agents[uid] = ToyAgent(self, uid, slots=slots, ttl_s=self.ttl_s)

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(5)
        for agent in self.agents.values():
            agent.leave()

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan is not None else 0

    @property
    def step(self) -> int:
        """The step that the ranks of the plan are in."""
        with self.lock:
            steps = [r.step for a in self._members() for r in a.ranks.values()]
        return min(steps, default=0)

    def agent_of(self, rank: int) -> ToyAgent:
        with self.lock:
            return next(a for a in self.agents.values() if a.alive and rank in a.ranks)

    # ---- threads

    def _follow(self) -> None:
        while not self._stopped.wait(0.003):
            try:
                kv = self.store.get(self.keys.plan)
            except CoordError:
                continue
            if kv is None:
                continue
            pointer = wire.decode(wire.PlanPointer, kv.value)
            if pointer.generation <= self.generation:
                continue
            seen_s = time.monotonic()
            record, data = read_record(self.objects, pointer.generation)
            assert wire.digest(data) == pointer.hash
            plan = plan_of(record)
            assert plan is not None
            self.plans[plan.generation] = (plan, seen_s)
            self.plan = plan
            for agent in list(self.agents.values()):
                if agent.alive:
                    agent.follow(plan)

    def _members(self) -> list[ToyAgent]:
        plan = self.plan
        if plan is None:
            return []
        return [a for a in self.agents.values() if plan.member(a.uid) and a.generation == plan.generation]

    def _step(self) -> None:
        beat_s = 0.0
        while not self._stopped.wait(STEP_S):
            moved = not self.paused and self._move()
            if moved or time.monotonic() - beat_s > BEAT_S:
                beat_s = time.monotonic()
                for agent in list(self.agents.values()):
                    agent.write()

    def _move(self) -> bool:
        """One step for everybody, if all are there."""
        with self.lock:
            plan, members = self.plan, self._members()
            ranks = {r: a for a in members if a.alive for r in a.ranks}
            if plan is None or len(ranks) < plan.world_size:
                return False
            if any(
                a.ranks[r].exit is not None or r in a.frozen or a.ranks[r].phase == "done"
                for r, a in ranks.items()
            ):
                return False
            step = min(a.ranks[r].step for r, a in ranks.items())
            for rank, agent in ranks.items():
                self._snapshot(plan, agent, rank, step)
            if step % self.every_steps == 0 or step == self.steps:
                self._commit(plan, members[0], step)
            last = step == self.steps
            for rank, agent in ranks.items():
                agent.ranks[rank] = msgspec.structs.replace(
                    agent.ranks[rank],
                    step=step if last else step + 1,
                    phase="done" if last else "step",
                    step_s=STEP_S,
                    exit=wire.ExitReport(code=0) if last else None,
                )
        return True

    def _snapshot(self, plan: wire.Plan, agent: ToyAgent, rank: int, step: int) -> None:
        own = wire.SnapshotRef(generation=plan.generation, step=step, rank=rank)
        agent.snapshots.append(own)
        peer = plan.peers.get(agent.uid)
        if peer is not None and self.agents[peer].alive:
            self.agents[peer].snapshots.append(msgspec.structs.replace(own, replica=True))

    def _commit(self, plan: wire.Plan, agent: ToyAgent, step: int) -> None:
        """As a committer does: the manifest, then a look for a higher record."""
        self.objects.create(f"gen-{plan.generation:04d}/step-{step:010d}/manifest.json", b"{}")
        by = highest_record(self.objects)
        if by <= plan.generation:
            self.acked.append((plan.generation, step))
        agent.committed = wire.Committed(
            generation=plan.generation, step=step, fenced_by=by if by > plan.generation else None
        )


# ---------------------------------------------------------------- controllers as processes

JOB = """
[job]
name = "{job}"
steps = {steps}
root = "{root}"
[program]
train = "m:train"
data = "m:data"
[layout]
nodes = 2
standbys = 1
ranks_per_node = 2
[checkpoint]
every_steps = 20
[detect]
hang_floor_s = {hang_floor_s}
warmup_steps = 1
[policy]
restarts = {{ workload = 3, infrastructure = 20, preemption = 100 }}
wait_for_node_s = 60
"""


class ControllerProcess:
    """``python -m surefoot.controller``, with its history at hand."""

    def __init__(self, folder: Path, name: str, job_file: Path, endpoint: str, **env: str) -> None:
        self.name = name
        self.state_dir = folder / f"controller-{name}"
        self.state_dir.mkdir(exist_ok=True)
        self.log = folder / f"controller-{name}.log"
        token = folder / "token"
        token.write_text(TOKEN)
        with self.log.open("ab") as log:
            self.process = self._start(job_file, endpoint, token, env, log)

    def _start(
        self, job_file: Path, endpoint: str, token: Path, env: dict[str, str], log: Any
    ) -> subprocess.Popen[bytes]:
        name = self.name
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "surefoot.controller", "--job", str(job_file), "--name", name),
                *("--etcd", endpoint, "--run-id", "run1", "--state-dir", str(self.state_dir)),
                *("--token-file", str(token)),
            ],
            env=os.environ | env,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )

    def history(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for path in (self.state_dir / "history").glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            lines += [msgspec.json.decode(line) for line in whole.splitlines()]
        return lines

    def events(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        return [
            e for e in self.history() if e["kind"] == kind and all(e.get(k) == v for k, v in facts.items())
        ]

    def words(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def write_job(folder: Path, job: str, *, steps: int = 400, hang_floor_s: float = 5.0) -> tuple[Path, str]:
    """A job file, and its root."""
    root = folder / "root"
    root.mkdir(exist_ok=True)
    path = folder / "job.toml"
    path.write_text(JOB.format(job=job, steps=steps, root=root.as_uri(), hang_floor_s=hang_floor_s))
    return path, root.as_uri()


@contextmanager
def closing_all(things: list[Any]) -> Iterator[list[Any]]:
    """Close them in reverse order, whatever happens."""
    try:
        yield things
    finally:
        for thing in reversed(things):
            thing.close()


def until(holds: Callable[[], Any], within_s: float, what: str) -> Any:
    """Poll until true; the result."""
    end = time.monotonic() + within_s
    while not (result := holds()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.01)  # the pace of polling
    return result


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

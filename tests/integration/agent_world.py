"""A run around real agents: etcd, object store, run folder, and a hand that publishes plans in place of a controller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from surefoot import marks
from surefoot.ckpt import record
from surefoot.ckpt.store import open_store
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.store import CoordStore

HERE = Path(__file__).parent
T = TypeVar("T")

JOB = """
[job]
name = "{job}"
steps = {steps}
root = "{root}"

[program]
train = "{program}:{train}"
data = "{program}:{data}"
preload = {preload}
params = {params}

[layout]
nodes = {nodes}
nodes_min = 1
ranks_per_node = {ranks}

[checkpoint]
every_steps = {every}
memory_budget = "{budget}"

[policy]
grace_s = {grace_s}
"""


def until(condition: Callable[[], T | None], what: str, within_s: float = 20.0) -> T:
    """Poll until `condition()` is true; returns what it returned."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.005)  # the pace of polling
    return found


class AgentWorld:
    """Make it in a ``with``: its end ends whatever bears the run's mark, and fails if an agent left something behind."""

    def __init__(self, folder: Path, coord: CoordStore, endpoint: str, job: str, **settings: Any) -> None:
        self.folder, self.coord, self.endpoint, self.job = folder, coord, endpoint, job
        self._base = Path(tempfile.mkdtemp(prefix="sf-"))  # pytest's folders make socket paths too long
        self.owner = marks.RunOwner.create(job, self._base)
        self.root = str(settings.pop("root", folder / "objects"))
        self.store = open_store(self.root)
        self.keys = Keys(job)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.generation = 0
        self.job_file = folder / "job.toml"
        defaults = {
            "steps": 12,
            "nodes": 1,
            "ranks": 2,
            "every": 100,
            "grace_s": 5,
            "budget": "100MB",
            "params": {},
            "preload": ["rank_stand_ins"],
            "program": "rank_stand_ins",
            "train": "train",
            "data": "data",
        }
        values = defaults | settings
        values["params"] = (
            "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in values["params"].items()) + "}"
        )
        values["preload"] = json.dumps(values["preload"])
        self.job_file.write_text(JOB.format(job=job, root=self.root, **values))
        self.ranks, self.nodes = values["ranks"], values["nodes"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        survivors = self.owner.close()
        shutil.rmtree(self._base)
        assert survivors == []

    # ------------------------------------------------------------ agents

    def state_dir(self, uid: str) -> Path:
        return self.owner.folder / "nodes" / uid

    def shm_dir(self, uid: str) -> Path:
        return self.owner.shm_dir / uid

    def start(
        self,
        uid: str = "n0",
        *,
        entry: str | None = "train_in_images",
        modules: str | None = "",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start an agent; `entry` None: real ranks."""
        argv = [sys.executable, "-m", "surefoot.agent", "--job", str(self.job_file), "--uid", uid]
        argv += [
            "--etcd",
            self.endpoint,
            "--run-id",
            self.owner.run_id,
            "--state-dir",
            str(self.state_dir(uid)),
        ]
        argv += ["--shm-dir", str(self.shm_dir(uid)), "--token-file", str(self.owner.token_file)]
        if entry is not None:
            argv += ["--rank-entry", f"rank_stand_ins:{entry}"]
        if modules is not None:
            argv += ["--rank-modules", modules]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, **self.owner.mark(uid).env(), **(env or {})}
        with open(self.folder / f"agent-{uid}.log", "ab") as log:
            agent = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, start_new_session=True)
        self.agents[uid] = agent
        return agent

    def parked(self, uid: str = "n0", incarnation_before: str = "") -> wire.NodeInfo:
        """Wait until the node is registered and ready; its info."""

        def ready() -> wire.NodeInfo | None:
            info, status = self.info(uid), self.status(uid)
            if info is None or status is None or info.incarnation == incarnation_before:
                return None
            return info if status.state == "parked" and status.incarnation == info.incarnation else None

        return until(ready, f"{uid} is parked; {self.log(uid)}", 60)

    def log(self, uid: str = "n0") -> str:
        path = self.folder / f"agent-{uid}.log"
        return path.read_text() if path.exists() else ""

    def rank_log(self, rank: int, generation: int, uid: str = "n0") -> str:
        path = self.state_dir(uid) / "logs" / f"rank-{rank}-g{generation}.log"
        return path.read_text() if path.exists() else ""

    def history(self, uid: str = "n0", who: str = "agent") -> list[dict[str, Any]]:
        path = self.state_dir(uid) / "history" / f"{who}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def crash(self, uid: str) -> None:
        """SIGKILL the agent and its living ranks at once, as a node's supervisor would be lost; helpers die by themselves."""
        status = self.status(uid)
        for pid in [self.agents[uid].pid, *(r.pid for r in status.ranks if r.exit is None)] if status else []:
            os.kill(pid, signal.SIGKILL)
        self.agents[uid].wait()

    # ------------------------------------------------------------ etcd

    def value(self, kind: type[T], key: str) -> T | None:
        found = self.coord.get(key)
        return wire.decode(kind, found.value) if found is not None else None

    def info(self, uid: str) -> wire.NodeInfo | None:
        return self.value(wire.NodeInfo, self.keys.node(uid))

    def status(self, uid: str = "n0") -> wire.NodeStatus | None:
        return self.value(wire.NodeStatus, self.keys.status(uid))

    def wait_status(
        self, condition: Callable[[wire.NodeStatus], bool], what: str, uid: str = "n0", within_s: float = 20.0
    ) -> wire.NodeStatus:
        def holds() -> wire.NodeStatus | None:
            status = self.status(uid)
            return status if status is not None and condition(status) else None

        return until(holds, f"{uid}: {what}", within_s)

    def all_keys(self) -> set[str]:
        return {item.key.removeprefix(self.keys.root) for item in self.coord.list(self.keys.root).items}

    def plan(self, *uids: str, **changes: Any) -> wire.Plan:
        """The next generation's plan over these nodes as they are registered now."""
        members: list[wire.Member] = []
        for index, uid in enumerate(uids):
            info = self.info(uid)
            assert info is not None, uid
            members.append(
                wire.Member(
                    uid=uid,
                    incarnation=info.incarnation,
                    index=index,
                    first_rank=index * self.ranks,
                    ranks=self.ranks,
                )
            )
        ring = {u: uids[(i + 1) % len(uids)] for i, u in enumerate(uids)} if len(uids) > 1 else {}
        plan = wire.Plan(
            job=self.job,
            run_id=self.owner.run_id,
            generation=self.generation + 1,
            members=tuple(members),
            world_size=len(uids) * self.ranks,
            mesh={"pp": 1, "dp": len(uids) * self.ranks, "tp": 1},
            start=wire.StartingPoint(),
            peers=ring,
            reason=wire.Reason(kind="first_start"),
            spec_hash="",
            code_version="",
            controller="test",
        )
        return msgspec.structs.replace(plan, **changes)

    def publish(self, plan: wire.Plan, *, hash_of: bytes | None = None) -> wire.Plan:
        """Create the record and point to it."""
        start = record.StartRef(generation=plan.start.generation, step=plan.start.step)
        built = msgspec.to_builtins(plan)
        found = record.Record(
            generation=plan.generation, start=start, reason=plan.reason.kind, created_by="test", plan=built
        )
        data = record.create_record(self.store, found)
        self.point(plan.generation, wire.digest(hash_of if hash_of is not None else data))
        self.generation = plan.generation
        return plan

    def point(self, generation: int, digest: str) -> None:
        pointer = wire.PlanPointer(generation=generation, hash=digest, location=record.record_key(generation))
        self.coord.put(self.keys.plan, wire.encode(pointer))

    def from_memory(self, step: int, sources: Mapping[int, str], **changes: Any) -> dict[str, Any]:
        """Changes to a plan that starts from the newest generation's snapshots at `step`."""
        start = wire.StartingPoint(generation=self.generation, step=step, tier="memory")
        found = tuple(wire.SnapshotSource(rank=r, uid=u) for r, u in sources.items())
        return {"start": start, "sources": found, **changes}

    def probe(
        self, uid: str = "n0", *, token: str | None = None, job: str | None = None
    ) -> wire.ControlMessage:
        info = self.info(uid)
        assert info is not None
        with socket.create_connection((info.host, info.control_port), timeout=5) as sock:
            message = wire.ProbeMsg(token=token or self.owner.token, job=job or self.job)
            sock.sendall(wire.encode(message) + b"\n")
            return wire.decode(wire.ControlMessage, sock.makefile("rb").readline())


def alive(pid: int) -> bool:
    return marks.start_time(pid) is not None


def steps_of(status: wire.NodeStatus, *, replica: bool) -> set[tuple[int, int, int]]:
    """(rank, generation, step) of what a node holds."""
    return {(s.rank, s.generation, s.step) for s in status.snapshots if s.replica == replica}

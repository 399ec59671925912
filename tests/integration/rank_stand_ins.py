"""Functions that tests have forked as ranks, in place of the session. Imported by zygotes, so light."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from stand_in_images import slot_nbytes, write_image


def nothing() -> int:
    return 0


def tell() -> int:
    """Write down what a forked rank finds around it."""
    facts = {
        "pid": os.getpid(),
        "sid": os.getsid(0),
        "rank": os.environ["RANK"],
        "cwd": os.getcwd(),
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": os.readlink("/proc/self/fd/0"),
        "random": random.random(),
    }
    print(facts)
    print("to stderr", file=sys.stderr)
    return 7


def say_and_sleep() -> int:
    print("asleep")
    time.sleep(600)
    return 0


def raise_error() -> int:
    raise RuntimeError("the stand-in raises")


def exit_with_words() -> int:
    sys.exit("no such luck")


def gloo_job() -> int:
    """Two ranks join through the agent's TCPStore and add up."""
    import torch
    import torch.distributed as dist

    # A client of etcd or gRPC in a process that forks loader workers crashes the child (CTL-28).
    assert not {"grpc", "etcd3", "surefoot.controller.etcdstore"} & set(sys.modules)
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    Path(os.environ["RESULT"] + os.environ["RANK"]).write_text(str(total.item()))
    dist.destroy_process_group()
    return 0


# ---------------------------------------------------------------- a rank that speaks the agent's protocol, without torch


class Link:
    """A blocking connection to the agent."""

    def __init__(self) -> None:
        from surefoot.controller import wire

        self.wire = wire
        self.committed: list[Any] = []
        self.generation = int(os.environ["SUREFOOT_GENERATION"])
        self.rank = int(os.environ["RANK"])
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["SUREFOOT_AGENT_SOCKET"])
        self.file = self.sock.makefile("rb")
        token = (
            os.environ.get("STAND_IN_TOKEN") or Path(os.environ["SUREFOOT_TOKEN_FILE"]).read_text().strip()
        )
        generation = int(os.environ.get("STAND_IN_GENERATION") or self.generation)
        self.send(wire.HelloMsg(token=token, generation=generation, rank=self.rank, pid=os.getpid()))
        self.start = self.expect(wire.StartMsg)

    def send(self, message: Any) -> None:
        self.sock.sendall(self.wire.encode(message) + b"\n")

    def take_committed(self) -> bool:
        """Whether a commit was answered since the last call."""
        answered, self.committed = bool(self.committed), []
        return answered

    def expect(self, *kinds: Any) -> Any:
        """The next message of one of these kinds; others are dropped, but for commits. The agent's end ends us."""
        while True:
            if self.wire.CommittedMsg in kinds and self.committed:
                return self.committed.pop(0)
            line = self.file.readline()
            if not line:
                os._exit(77)
            message = self.wire.decode(self.wire.AgentToRank, line)
            if isinstance(message, self.wire.CommittedMsg):
                self.committed.append(message)
            elif isinstance(message, kinds):
                return message


ROW_NBYTES = 10_000


def train_in_images() -> int:
    """Step through snapshots as a session does: pool, stage, wait for the copy; commit every `every_steps`.

    The step time, the last step and faults come from ``params`` of the job file: {step_s, hang_at, raise_at, kill_at, workers}.
    """
    from surefoot.agent.slots import mapped
    from surefoot.ckpt.tiers import verify_image
    from surefoot.controller.spec.reading import load_spec

    link = Link()
    wire, plan, rank = link.wire, link.start.plan, link.rank
    spec = load_spec(os.environ["SUREFOOT_JOB"])
    params = spec.program.params
    faults = params if plan.generation == 1 else {}
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    socket.create_connection(address, timeout=10).close()  # what a real rank does first
    print(f"rendezvous at {address[1]}")
    begun = plan.start.step
    if link.start.restore_path is not None:
        with mapped(Path(link.start.restore_path)) as view:
            info = verify_image(view)
        assert (info.rank, info.generation, info.step) == (rank, plan.start.generation, plan.start.step)
        print(f"restored generation {info.generation} step {info.step} from {link.start.restore_path}")
    link.send(wire.PoolMsg(slot_bytes=slot_nbytes(ROW_NBYTES), slots=3))
    pool = link.expect(wire.PoolReadyMsg)
    print(f"pool holds {pool.held}")
    held = {slot: step for slot, step in pool.held.items() if step == begun}
    pending = False
    for step in range(begun + 1, spec.job.steps + 1):
        link.send(wire.PhaseMsg(phase="step", step=step))
        time.sleep(params.get("step_s", 0.01))
        _strike(faults, step, rank)
        if step > begun + 1:
            link.expect(wire.ReplicatedMsg)
        pending = pending and not link.take_committed()
        _all_together(plan, step, rank)  # from here on all snapshots of step - 1 are safe
        slot = min((k for k in range(3) if held.get(k, -1) < step - 1), key=lambda k: held.get(k, -1))
        with mapped(Path(pool.paths[slot]), write=True) as view:
            write_image(
                view,
                rank=rank,
                world_size=plan.world_size,
                generation=plan.generation,
                step=step,
                row_nbytes=ROW_NBYTES,
            )
        held[slot] = step
        last = step == spec.job.steps
        due = last or (step % spec.checkpoint.every_steps == 0 and not pending)
        pending = pending or due
        link.send(
            wire.SnapshotMsg(step=step, slot=slot, attempt=f"g{plan.generation}s{step}" if due else None)
        )
        link.send(wire.StepMsg(step=step, loss=float(step).hex(), step_s=0.01))
    while (committed := link.expect(wire.CommittedMsg)).step != spec.job.steps:
        pass
    print(f"committed: {committed}")
    assert committed.failure == ""
    link.send(wire.DoneMsg(step=spec.job.steps, ended="steps"))
    return 0


def _all_together(plan: Any, step: int, rank: int) -> None:
    """What a collective does: nobody goes on before all ranks of the generation have come to this step."""
    folder = Path(os.environ["SUREFOOT_JOB"]).parent / f"together-g{plan.generation}"
    folder.mkdir(exist_ok=True)
    (folder / f"{step}-{rank}").touch()
    while not all((folder / f"{step}-{r}").exists() for r in range(plan.world_size)):
        time.sleep(0.001)  # the pace of polling


def _strike(faults: Any, step: int, rank: int) -> None:
    """Rank 0 fails as ordered; the others wait for it, as in a collective."""
    if step not in (faults.get("raise_at"), faults.get("kill_at"), faults.get("hang_at")):
        return
    if rank == 0 and step == faults.get("raise_at"):
        raise RuntimeError("as ordered")
    if rank == 0 and step == faults.get("kill_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def wait_with_workers() -> int:
    """A rank with four workers: a plain one, one re-parented to init, one in a group of its own, one stuck in a pipe."""
    link = Link()
    pids = [_plain(), _orphan(), _own_group(), _stuck_in_a_pipe()]
    Path(os.environ["SUREFOOT_JOB"]).with_name(f"workers-{os.environ['SUREFOOT_GENERATION']}").write_text(
        " ".join(map(str, [os.getpid(), *pids]))
    )
    link.send(link.wire.PhaseMsg(phase="step", step=1))
    signal.pause()
    return 0


def wait_for_stop() -> int:
    """A rank that takes its time to leave when it is told to."""
    link = Link()
    link.send(link.wire.PhaseMsg(phase="step", step=1))
    stop = link.expect(link.wire.StopMsg)
    print(f"told to stop: {stop.reason}, {stop.grace_s:g} s")
    time.sleep(float(os.environ.get("STAND_IN_LEAVES_AFTER", "0.3")))
    print("left in good order")
    return 0


def _plain() -> int:
    pid = os.fork()
    if pid == 0:
        _pause_for_ever()
    return pid


def _orphan() -> int:
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _pause_for_ever()
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    return int(os.read(reader, 20))


def _own_group() -> int:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        _pause_for_ever()
    return pid


def _stuck_in_a_pipe() -> int:
    _, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        while True:
            os.write(writer, b"x" * 65536)
    return pid


def _pause_for_ever() -> None:
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(sig, signal.SIG_IGN)
    while True:
        signal.pause()

"""A small agent for tests of a rank's session: a real Unix socket, real slot files, real uploads; no etcd, no zygote.

It hosts the TCPStore of a generation, has a launcher process with torch imported fork the ranks, answers the protocol of
`controller.wire` and records all that ranks say. One "node" holds all ranks, so nothing has a peer and a sealed
snapshot is called replicated at once, unless a test holds that back.

As a script this file is the launcher.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

DEADLINE_S = 60.0
"""Four ranks on two busy cores."""
T = TypeVar("T")


# ---------------------------------------------------------------- the launcher: forks ranks, reports their ends


def launcher() -> None:
    """Read orders ``{"env", "log", "by_exec"}`` from stdin; answer ``{"pid"}`` to each, and ``{"ended", "status"}`` at its end."""
    import surefoot.agent.session
    from surefoot import failpoint

    assert surefoot.agent.session
    _say({"ready": True})
    rest = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become_rank(order, failpoint)
                _say({"pid": pid})
        _report_ends()


def _become_rank(order: dict[str, Any], failpoint: Any) -> None:
    from surefoot.agent import session

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])
    if order["by_exec"]:
        os.execv(sys.executable, [sys.executable, "-m", "surefoot.agent.session"])
    failpoint.arm(failpoint.from_environment(os.environ))
    session.main()


def _report_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(fact: dict[str, Any]) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")


class Launcher:
    """The launcher process, from the outside. One serves many tests."""

    def __init__(self) -> None:
        here = str(Path(__file__).parent)
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self.ends: dict[int, int] = {}
        """pid to exit code, negative for a signal."""
        self._pids: list[int] = []
        self._ready = threading.Event()
        self.changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(DEADLINE_S):
            raise TimeoutError("the launcher did not come up")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            with self.changed:
                if "pid" in fact:
                    self._pids.append(fact["pid"])
                elif "ended" in fact:
                    self.ends[fact["ended"]] = fact["status"]
                self.changed.notify_all()
            self._ready.set()

    def launch(self, env: Mapping[str, str], log: Path, *, by_exec: bool = False) -> int:
        """Start one rank; returns its pid."""
        assert self._process.stdin is not None
        with self.changed:
            known = len(self._pids)
            self._process.stdin.write(
                json.dumps({"env": dict(env), "log": str(log), "by_exec": by_exec}).encode() + b"\n"
            )
            self._process.stdin.flush()
            if not self.changed.wait_for(lambda: len(self._pids) > known, DEADLINE_S):
                raise TimeoutError("the launcher did not fork")
            return self._pids[known]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self._process.stdout.close()


# ---------------------------------------------------------------- the agent


@dataclass(frozen=True, kw_only=True)
class Heard:
    """One message of a rank."""

    generation: int
    rank: int
    message: Any


class FakeAgent:
    """Runs generations of one job, one after the other.

    Args:
        job: path of the job file.
        commits: upload and commit what ranks ask for; otherwise attempts stay unanswered.
        replicates: called with (rank, step); False holds the ReplicatedMsg back.
    """

    def __init__(
        self,
        folder: Path,
        job: Path,
        launcher: Launcher,
        *,
        world: int = 2,
        commits: bool = True,
        replicates: Callable[[int, int], bool] = lambda rank, step: True,
    ) -> None:
        from surefoot.controller.spec.reading import load_spec

        self.folder = folder
        self.job = job
        self.spec = load_spec(job)
        self.world = world
        self.commits = commits
        self.replicates = replicates
        self.heard: list[Heard] = []
        self.changed = threading.Condition()
        self.pids: dict[int, int] = {}
        self.slots: dict[int, list[Path]] = {}
        self.commit_failures: list[str] = []
        """Answers to give to the next attempts instead of committing."""
        self.generation = 0
        self.mesh = {"pp": 1, "dp": world, "tp": 1}
        self._launcher = launcher
        self._plan: Any = None
        self._restore: dict[int, str] = {}
        self._images: dict[tuple[int, str], dict[int, bytes]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._store: Any = None
        self._token = "a-token"
        self._threads: list[threading.Thread] = []
        (folder / "token").write_text(self._token)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket_path))
        self._listener.listen()
        self._spawn(self._accept)

    @property
    def socket_path(self) -> Path:
        return self.folder / "agent.sock"

    def start(
        self,
        generation: int,
        *,
        step: int = 0,
        of: int = 0,
        tier: str = "nothing",
        env: Mapping[int, Mapping[str, str]] | None = None,
        restore: Mapping[int, str] | None = None,
        by_exec: bool = False,
    ) -> None:
        """Launch all ranks of `generation` from (`of`, `step`). `env` is extra environment by rank; `restore` overrides
        the slot file that a rank is told to restore from."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        from surefoot.controller.wire import Member, Plan, Reason, StartingPoint

        self.generation = generation
        start = StartingPoint(generation=of, step=step, tier=tier)  # pyright: ignore[reportArgumentType]  (tests pass a str)
        self._plan = Plan(
            job=self.spec.job.name,
            run_id="test",
            generation=generation,
            members=(Member(uid="n0", incarnation="i", index=0, first_rank=0, ranks=self.world),),
            world_size=self.world,
            mesh=self.mesh,
            start=start,
            reason=Reason(kind="first_start" if generation == 1 else "restart"),
            spec_hash=self.spec.hash,
            code_version="test",
            controller="test",
        )
        self._create_record(generation, of, step)
        self._restore = dict(restore or {})
        if tier == "memory":
            for rank in range(self.world):
                self._restore.setdefault(rank, str(self.slot_of(rank, of, step)))
        self._store = TCPStore(
            "127.0.0.1",
            0,
            self.world + 1,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        for rank in range(self.world):
            extra = dict(env.get(rank, {})) if env else {}
            self.pids[rank] = self._launcher.launch(
                self._environment(rank) | extra, self.log(rank), by_exec=by_exec
            )

    def _create_record(self, generation: int, of: int, step: int) -> None:
        from surefoot.ckpt.record import Record, StartRef, create_record
        from surefoot.ckpt.store import open_store

        start = StartRef(generation=of, step=step)
        record = Record(generation=generation, start=start, reason="test", created_by="test")
        create_record(open_store(self.spec.job.root), record)

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": str(self.generation - 1),
            "TORCHELASTIC_MAX_RESTARTS": "100",
            "SUREFOOT_AGENT_SOCKET": str(self.socket_path),
            "SUREFOOT_TOKEN_FILE": str(self.folder / "token"),
            "SUREFOOT_GENERATION": str(self.generation),
            "SUREFOOT_HISTORY": str(self.folder / f"rank-{rank}-g{self.generation}.jsonl"),
            "SUREFOOT_JOB": str(self.job),
        }

    # ---- what tests ask

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}-g{self.generation}.log"

    def events(self, rank: int, generation: int, kind: str) -> list[dict[str, Any]]:
        """The rank's history, one kind of event."""
        path = self.folder / f"rank-{rank}-g{generation}.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]

    def messages(self, kind: type[T], *, rank: int | None = None, generation: int | None = None) -> list[T]:
        with self.changed:
            return [
                h.message
                for h in self.heard
                if isinstance(h.message, kind)
                and rank in (None, h.rank)
                and generation in (None, h.generation)
            ]

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Until `condition()` is true; checked after each message, at least every 50 ms."""
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            if time.monotonic() > end:
                logs = "\n".join(self.log(r).read_text() for r in self.pids if self.log(r).exists())
                raise TimeoutError(f"{what} did not happen within {DEADLINE_S} s; logs:\n{logs}")
            with self.changed:
                self.changed.wait(0.05)
        return found

    def exit_code(self, rank: int) -> int:
        """Wait for the rank's end; negative: the signal that ended it."""
        pid = self.pids[rank]
        self.wait(lambda: pid in self._launcher.ends, f"the end of rank {rank}")
        return self._launcher.ends[pid]

    def exit_codes(self) -> list[int]:
        return [self.exit_code(rank) for rank in sorted(self.pids)]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        if self.pids[rank] not in self._launcher.ends:
            os.kill(self.pids[rank], sig)

    def kill_all(self) -> None:
        for rank in self.pids:
            self.kill(rank)
        self.exit_codes()

    def hang_up(self) -> None:
        """End all connections, as the death of an agent does."""
        for connection in list(self._connections.values()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the rank hung up first

    def say(self, rank: int, message: Any) -> None:
        from surefoot.controller.wire import encode

        try:
            self._connections[rank].sendall(encode(message) + b"\n")
        except OSError:
            pass  # the rank died: its end is reported elsewhere

    def images(self, rank: int) -> dict[int, tuple[int, int]]:
        """Slot index to (generation, step) of the sealed snapshots of a rank."""
        from surefoot.ckpt.tiers import ImageError, read_image

        found = {}
        for slot, path in enumerate(self.slots.get(rank, [])):
            try:
                info = read_image(memoryview(path.read_bytes()))
            except ImageError:
                continue
            found[slot] = (info.generation, info.step)
        return found

    def newest_complete(self) -> tuple[int, int]:
        """The newest (generation, step) that all ranks hold sealed."""
        each = [set(self.images(rank).values()) for rank in range(self.world)]
        return max(set.intersection(*each))

    def slot_of(self, rank: int, generation: int, step: int) -> Path:
        slot = next(s for s, held in self.images(rank).items() if held == (generation, step))
        return self.slots[rank][slot]

    def close(self) -> None:
        for rank in self.pids:
            self.kill(rank)
        self.hang_up()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for connection in self._connections.values():
            connection.close()

    # ---- serving ranks

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        from surefoot.controller.wire import HelloMsg, RankToAgent, StartMsg, decode

        with connection, connection.makefile("rb") as lines:
            rank, generation = -1, 0
            try:
                for line in lines:
                    message: Any = decode(RankToAgent, line)  # pyright: ignore[reportArgumentType]  (a union is no type[T])
                    if isinstance(message, HelloMsg):
                        if message.token != self._token:
                            return
                        rank, generation = message.rank, message.generation
                        self._connections[rank] = connection
                        self.say(rank, StartMsg(plan=self._plan, restore_path=self._restore.get(rank)))
                    self._answer(rank, generation, message)
                    with self.changed:
                        self.heard.append(Heard(generation=generation, rank=rank, message=message))
                        self.changed.notify_all()
            except OSError:
                return

    def _answer(self, rank: int, generation: int, message: Any) -> None:
        from surefoot.controller.wire import PoolMsg, ReplicatedMsg, SnapshotMsg

        match message:
            case PoolMsg():
                self._make_slots(rank, message)
            case SnapshotMsg():
                if message.attempt is not None:
                    data = self.slots[rank][message.slot].read_bytes()  # put aside before the slot may change
                    self._collect(rank, generation, message.step, message.attempt, data)
                if self.replicates(rank, message.step):
                    self.say(rank, ReplicatedMsg(step=message.step))

    def _make_slots(self, rank: int, message: Any) -> None:
        from surefoot.controller.wire import PoolReadyMsg

        paths = [self.folder / f"slot-{rank}-{i}" for i in range(message.slots)]
        for path in paths:
            path.touch()
            os.truncate(path, max(path.stat().st_size, message.slot_bytes))
        self.slots[rank] = paths
        held = {slot: step for slot, (_, step) in self.images(rank).items()}
        self.say(rank, PoolReadyMsg(paths=tuple(map(str, paths)), held=held))

    def _collect(self, rank: int, generation: int, step: int, attempt: str, data: bytes) -> None:
        with self.changed:
            images = self._images.setdefault((step, attempt), {})
            images[rank] = data
            whole = len(images) == self.world
        if whole and (self.commits or self.commit_failures):
            self._spawn(self._commit, generation, step, attempt, [images[r] for r in range(self.world)])

    def _commit(self, generation: int, step: int, attempt: str, images: Sequence[bytes]) -> None:
        from surefoot.ckpt.store import open_store
        from surefoot.ckpt.tiers import Committed, commit, upload_images
        from surefoot.controller.wire import CommittedMsg

        failure = self.commit_failures.pop(0) if self.commit_failures else ""
        if not failure:
            store = open_store(self.spec.job.root)
            place = {"generation": generation, "step": step, "attempt": attempt}
            upload_images(store, [memoryview(i) for i in images], writer=0, deadline_s=DEADLINE_S, **place)
            outcome = commit(store, writers=1, deadline_s=DEADLINE_S, facts={}, **place)
            failure = "" if isinstance(outcome, Committed) else repr(outcome)
        for rank in range(self.world):
            self.say(rank, CommittedMsg(generation=generation, step=step, failure=failure))


# ---------------------------------------------------------------- jobs for tests


def write_text(folder: Path, rows: int = 400) -> None:
    """Two sources of short rows of plain ASCII."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for source, step in (("code", 7), ("prose", 11)):
        (folder / source).mkdir(parents=True)
        texts = [f"{source} row {i}: " + "abcdefghij"[i % 9 :] * (i * step % 4 + 1) for i in range(rows)]
        pq.write_table(
            pa.table({"text": [t[:60] for t in texts]}), folder / source / "a.parquet", row_group_size=100
        )


def write_job(
    folder: Path,
    *,
    train: str = "session_trainers:train",
    data: str = "session_trainers:data",
    steps: int = 6,
    every_steps: int = 3,
    world: int = 2,
    params: Mapping[str, Any] | None = None,
) -> Path:
    """A job file in `folder`, which also gets the root."""
    settings = {"data_root": str(folder / "text"), **(params or {})}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    path = folder / "job.toml"
    path.write_text(
        f'[job]\nname = "tiny"\nseed = 5\nsteps = {steps}\nroot = "file://{folder}/root"\n'
        f'[program]\ntrain = "{train}"\ndata = "{data}"\n[program.params]\n{lines}\n'
        f"[layout]\nnodes = 1\nranks_per_node = {world}\n[checkpoint]\nevery_steps = {every_steps}\n"
    )
    return path


if __name__ == "__main__":
    launcher()

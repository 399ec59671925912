"""Real ranks for tests: ``ranks(4, "module:function", *args)`` runs a function on 4 ranks of a gloo group.

They are forked by one process of rank_host.py, which starts with the first act and lives as long as the test run. This
side imports no torch.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

HOST = Path(__file__).parent / "rank_host.py"
SHOW_STACKS = signal.SIGUSR2
START_S = 300.0
"""Importing torch takes 5 s here, and on a machine that is busy with other things 100 s were seen."""
AFTER_FAILURE_S = 15.0
"""How long the others may go on once a rank has failed: they may wait for it in a collective."""
STACKS_S = 2.0
ORPHANS_S = 10.0
"""How long what ranks started may take to end after the last rank."""
LAST_S = 60.0
"""For the host to notice the end of ranks that were killed, and of what they had started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended. `code`: 0; 1 after an exception, whose traceback is `error`; or minus the number of a signal."""

    rank: int
    code: int
    value: Any
    error: str
    log: str

    def __str__(self) -> str:
        return f"--- rank {self.rank} ended with {self.code}\n{self.error}{self.log}"


class RankHost:
    """Plays acts, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._running: Running | None = None

    def start(self, world: int, function: str, *args: Any) -> Running:
        """Start an act: ``module:name``, of a module beside the tests, called with `args` (plain data) on `world` ranks.

        Each rank has a process group ("gloo"), and torchrun's variables RANK, LOCAL_RANK and WORLD_SIZE.
        """
        self._open()
        folder = Path(tempfile.mkdtemp(prefix="sf-ranks-"))
        environ = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        act = {"world": world, "function": function, "args": args, "folder": str(folder)}
        self._connection.send(act | {"environ": environ, "orphans_s": ORPHANS_S})
        pids, trouble = self._connection.recv()
        if trouble:
            self._connection.recv()
            shutil.rmtree(folder)
            raise AssertionError(f"{function} cannot be imported:\n{trouble}")
        self._running = Running(self._connection, function, folder, pids)
        return self._running

    def play(self, world: int, function: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """What the function returned (it must be plain data), by rank. Raises AssertionError with every rank's traceback."""
        ended = self.start(world, function, *args).wait(timeout_s)
        if any(e.code for e in ended):
            raise AssertionError(
                f"{function} failed:\n" + "\n".join(str(e) for e in sorted(ended, key=lambda e: e.code == 0))
            )
        return [e.value for e in ended]

    def settle(self) -> None:
        """End the act that a test left running."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.wait(LAST_S)

    def _open(self) -> None:
        self.settle()
        if self._process is not None:
            return
        self._connection, theirs = Pipe()
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HOST), str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            ready = self._connection.poll(START_S) and self._connection.recv()
        except EOFError:
            self._process = None
            raise AssertionError(f"{HOST.name} has ended; what it had to say stands on stderr") from None
        if not ready:
            raise AssertionError(f"{HOST.name} is not ready after {START_S:g} s")


class Running:
    """An act under way. `pids` by rank."""

    def __init__(self, connection: Any, function: str, folder: Path, pids: list[int]) -> None:
        self.pids = pids
        self._connection = connection
        self._function = function
        self._folder = folder
        self._codes: dict[int, int] = {}
        self._killed: set[int] = set()
        self._leftovers: list[str] | None = None

    def kill(self, rank: int) -> None:
        """SIGKILL it; `wait` then reports code -9, and gives the others their full time."""
        self._killed.add(rank)
        os.kill(self.pids[rank], signal.SIGKILL)

    def log(self, rank: int) -> str:
        """What the rank has printed so far: a way to tell the test how far it is (``print(..., flush=True)``)."""
        path = self._folder / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout_s: float = 60.0) -> list[Ended]:
        """How every rank ended, by rank.

        Raises AssertionError where they hang (with the stacks of all threads), or where ranks left processes behind.
        """
        until = time.monotonic() + timeout_s
        failed_since: float | None = None
        try:
            while self._leftovers is None:
                self._hear(min(0.2, max(0.0, until - time.monotonic())))
                if failed_since is None and any(c for r, c in self._codes.items() if r not in self._killed):
                    failed_since = time.monotonic()
                now = time.monotonic()
                grace_over = failed_since is not None and now > failed_since + AFTER_FAILURE_S
                if len(self._codes) < len(self.pids) and (now > until or grace_over):
                    raise AssertionError(self._hang())
                if now > until + LAST_S:
                    raise AssertionError(f"{self._function}: the process that forks ranks does not answer")
            ended = [self._ended(r) for r in range(len(self.pids))]
            if self._leftovers:
                raise AssertionError(f"{self._function} left processes behind: {self._leftovers}")
            return ended
        finally:
            self.end()

    def end(self) -> None:
        """Whatever still runs is killed, and reaped by the host."""
        for rank in self._living():
            self._signal(rank, signal.SIGKILL)
        while self._leftovers is None:
            if not self._hear(LAST_S):
                raise AssertionError(f"{self._function}: the process that forks ranks does not answer")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self, timeout_s: float) -> bool:
        if not self._connection.poll(timeout_s):
            return False
        word = self._connection.recv()
        if isinstance(word, list):
            self._leftovers = word
        else:
            rank, code = word
            self._codes[rank] = code
        return True

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, and the word of that is under way
            os.kill(self.pids[rank], number)

    def _living(self) -> list[int]:
        return [r for r in range(len(self.pids)) if r not in self._codes]

    def _ended(self, rank: int) -> Ended:
        path = self._folder / f"{rank}.result"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
        return Ended(rank=rank, code=self._codes[rank], value=value, error=error, log=self.log(rank))

    def _hang(self) -> str:
        """The stacks of all that still run, and how the others ended."""
        living = self._living()
        for rank in living:
            self._signal(rank, SHOW_STACKS)
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until and any("Current thread" not in self.log(r) for r in living):
            time.sleep(0.02)  # the pace of polling
        shown = [f"--- rank {r} still runs:\n{self.log(r)}" for r in living]
        others = [str(self._ended(r)) for r in sorted(self._codes)]
        return f"{self._function} hangs:\n" + "\n".join([*others, *shown])

"""The processes an agent has: started by exec, or forked for it by the zygote; reaped here and nowhere else.

All methods belong to the event loop's thread, which must be the main thread (the kernel's parent-death signal goes by
thread). The agent is a subreaper, so orphans of its ranks become its children too: they are reaped and forgotten.

A process is watched through a pidfd; SIGCHLD is the second bell, and the only one for orphans. Whichever rings, `collect`
reaps everything that has ended and tells those who watch. As long as nobody else waits for our children, a pid that has
not been reaped cannot come back as another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from surefoot import marks

log = logging.getLogger(__name__)

EARLY_EXITS_MAX = 1024
"""Exits remembered while a fork request is under way; a request is a node's ranks, at most some dozens."""


class WatchedProcess:
    """One child of the agent. `status` is waitpid's once it has ended and was reaped."""

    __slots__ = ("_exited", "_on_exit", "_pidfd", "name", "pid", "start_time", "status")

    def __init__(
        self, pid: int, name: str, pidfd: int | None, on_exit: Callable[[WatchedProcess], None] | None
    ) -> None:
        self.pid = pid
        self.name = name
        self.start_time = marks.start_time(pid) or 0
        self.status: int | None = None
        self._pidfd = pidfd
        self._on_exit = on_exit
        self._exited = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.status is None

    def send(self, sig: signal.Signals) -> None:
        """Signal this very process; nothing happens if it has ended."""
        if self.status is None and self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, sig)
            except ProcessLookupError:
                pass  # it ended and is about to be reaped

    def kill_group(self) -> None:
        """SIGKILL it and the process group it leads (ranks lead their own)."""
        self.send(signal.SIGKILL)
        if self.status is None:
            try:
                # Not reaped, so the pid is still its, and so is the group that bears its number.
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has not become a group leader yet: then it has started nothing either

    async def wait(self) -> int:
        """waitpid's status, once it has ended."""
        await self._exited.wait()
        assert self.status is not None
        return self.status

    def _ended(self, status: int) -> None:
        self.status = status
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit(self)


class Processes:
    """See the module. `start` before the first process, `close` after the last."""

    def __init__(self) -> None:
        self._watched: dict[int, WatchedProcess] = {}
        self._early: dict[int, int] = {}
        self._forks_under_way = 0

    def start(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.collect)

    def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for process in list(self._watched.values()):
            self._unwatch(process)

    def pids(self, name: str | None = None) -> set[int]:
        """The living processes that are known, or those of that name."""
        return {pid for pid, process in self._watched.items() if name is None or process.name == name}

    def spawn(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str],
        log_path: Path,
        program: str = sys.executable,
        stdin: int | None = None,
        inherit: int | None = None,
        on_exit: Callable[[WatchedProcess], None] | None = None,
    ) -> WatchedProcess:
        """Start a program in a session of its own; its output is appended to `log_path`.

        Never a bare fork: this process holds a gRPC client (posix_spawn executes at once).

        Args:
            argv: the arguments after the program's name.
            program: by default our Python interpreter.
            stdin: a descriptor to read from; None: nothing to read.
            inherit: one descriptor that the program is to have, under the same number.

        Raises:
            OSError: no memory or no process left.
        """
        out = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        actions: list[tuple[int, int, int]] = [
            (os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, out, 2),
        ]
        if inherit is not None:
            actions.append((os.POSIX_SPAWN_DUP2, inherit, inherit))  # onto itself: only drops close-on-exec
        try:
            pid = os.posix_spawn(
                program,
                [program, *argv],
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE),
            )
        finally:
            os.close(out)
            os.close(null)
        return self.watch(pid, name=name, on_exit=on_exit)

    def watch(
        self, pid: int, *, name: str, on_exit: Callable[[WatchedProcess], None] | None = None
    ) -> WatchedProcess:
        """Take a child in: started here, or forked for us. `on_exit` is called once, in the loop, when it is reaped."""
        early = self._early.pop(pid, None)
        pidfd = os.pidfd_open(pid) if early is None else None
        process = WatchedProcess(pid, name, pidfd, on_exit)
        if pidfd is None:
            assert early is not None
            asyncio.get_running_loop().call_soon(process._ended, early)
            return process
        self._watched[pid] = process
        asyncio.get_running_loop().add_reader(pidfd, self.collect)
        return process

    @contextlib.contextmanager
    def expecting(self) -> Generator[None]:
        """While another process forks for us: remember exits of children we have not been told of yet."""
        self._forks_under_way += 1
        try:
            yield
        finally:
            self._forks_under_way -= 1
            if self._forks_under_way == 0:
                self._early.clear()

    def collect(self) -> None:
        """Reap whatever has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._watched.get(pid)
            if process is not None:
                self._unwatch(process)
                process._ended(status)
            elif self._forks_under_way and len(self._early) < EARLY_EXITS_MAX:
                self._early[pid] = status

    def _unwatch(self, process: WatchedProcess) -> None:
        del self._watched[process.pid]
        if process._pidfd is not None:
            asyncio.get_running_loop().remove_reader(process._pidfd)
            os.close(process._pidfd)
            process._pidfd = None

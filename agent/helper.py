"""One helper process of the agent, and the socket pair to it: started, heard until it ends, reaped. Who uses it (forker.py,
server.py) decides what to say and when to start another."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from surefoot.agent.errors import ChannelClosedError
from surefoot.agent.exits import ending_in_words
from surefoot.agent.lines import LINE_BYTES_MAX
from surefoot.agent.processes import Processes, WatchedProcess
from surefoot.controller import wire

log = logging.getLogger(__name__)

M = TypeVar("M")


class Helper(Generic[M]):
    """See the module. Belongs to the event loop's thread.

    Args:
        name: for logs.
        decode: one line to a message.
        hear: called with each message.
        gone: called when the process has hung up: nothing can be sent to it any more.
    """

    def __init__(
        self,
        name: str,
        processes: Processes,
        *,
        env: Mapping[str, str],
        log_path: Path,
        decode: Callable[[bytes], M],
        hear: Callable[[M], None],
        gone: Callable[[], None],
    ) -> None:
        self._name = name
        self._processes = processes
        self._env = env
        self._log_path = log_path
        self._decode = decode
        self._hear = hear
        self._gone = gone
        self._writer: asyncio.StreamWriter | None = None
        self.process: WatchedProcess | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Raises: ChannelClosedError, if the process is not there."""
        if self._writer is None:
            raise ChannelClosedError(f"the {self._name} is not running")
        self._writer.write(wire.encode(message) + b"\n")

    async def live(self, argv: Sequence[str], greeting: msgspec.Struct | None = None) -> None:
        """Start it (``python -m argv … --fd N --parent PID``) and hear it until it ends; if cancelled, it is ended.

        Raises:
            OSError: it could not be started.
        """
        ours, theirs = socket.socketpair()
        try:
            self.process = self._processes.spawn(
                ["-m", *argv, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                name=self._name,
                env=self._env,
                log_path=self._log_path,
                inherit=theirs.fileno(),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        try:
            if greeting is not None:
                self.send(greeting)
            while line := await reader.readline():
                self._hear(self._decode(line))
        except (ConnectionError, ValueError, msgspec.MsgspecError) as e:
            log.error("the %s said something unintelligible: %s", self._name, e)
        finally:
            self._writer.close()
            self._writer = None
            self.process.send(signal.SIGKILL)
            self._gone()
        status = await self.process.wait()
        log.warning("the %s (%d) has gone: %s", self._name, self.process.pid, ending_in_words(status))

    async def end(self) -> None:
        """After the task in `live` was cancelled: wait until the process has gone."""
        if self.process is not None:
            self.process.send(signal.SIGKILL)
            await self.process.wait()

"""The agent's sockets: a Unix socket for its ranks and the TCPStore's host, a TCP socket for the controller's probes.

Both ask for the job's token in the first line. A rank is let in only as the process that was launched for that
(generation, rank): the kernel's word on who is at the other end (SO_PEERCRED) must be the pid that the zygote reported.
Whatever is wrong ends the connection, with a line in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from surefoot.agent.board import Board, RankLife
from surefoot.agent.errors import AgentUsageError
from surefoot.agent.lines import LINE_BYTES_MAX
from surefoot.agent.messages import StoreUpMsg
from surefoot.controller import wire
from surefoot.marks import SOCKET_PATH_MAX

log = logging.getLogger(__name__)

FIRST_LINE_S = 10.0
"""A connection that says nothing for so long is closed."""

LAUNCH_NEWS_S = 10.0
"""A rank may connect before the zygote's answer has told its pid; it waits at most so long."""

_decode_first: Callable[[bytes], wire.HelloMsg | StoreUpMsg] = msgspec.json.Decoder(
    wire.HelloMsg | StoreUpMsg
).decode
_decode_rank: Callable[[bytes], wire.RankToAgent] = msgspec.json.Decoder(wire.RankToAgent).decode


class RankListener(Protocol):
    """What the rank server tells. All calls come in the event loop."""

    def rank_joined(self, life: RankLife) -> wire.StartMsg: ...

    def rank_said(self, life: RankLife, message: wire.RankToAgent) -> None: ...

    def rank_hung_up(self, life: RankLife) -> None: ...

    def store_up(self, message: StoreUpMsg) -> None: ...


class _RefusedError(Exception):
    """A connection that is not let in, and why."""


class RankServer:
    """The Unix socket."""

    def __init__(self, path: Path, token: str, board: Board, listener: RankListener) -> None:
        self._path = path
        self._token = token
        self._board = board
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._launch_news = asyncio.Condition()

    async def start(self) -> None:
        """Raises: AgentUsageError: the path is too long for a socket; OSError."""
        if len(os.fsencode(self._path)) > SOCKET_PATH_MAX:
            raise AgentUsageError(
                f"the socket {self._path} has a path of {len(os.fsencode(self._path))} bytes and Linux takes "
                f"{SOCKET_PATH_MAX}: give a shorter --state-dir"
            )
        self._path.unlink(missing_ok=True)  # a former incarnation's; the state folder's lock is ours
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_BYTES_MAX)
        self._path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for life in self._board.ranks.values():
            if life.writer is not None:
                life.writer.close()
        self._path.unlink(missing_ok=True)

    async def launched(self) -> None:
        """Pids have become known: let those in who wait for that."""
        async with self._launch_news:
            self._launch_news.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(FIRST_LINE_S):
                first = _decode_first(await reader.readline())
            if not hmac.compare_digest(first.token.encode(), self._token.encode()):
                raise _RefusedError("its token is wrong")
            if isinstance(first, StoreUpMsg):
                self._listener.store_up(first)
                await reader.read()  # the host says nothing more; its end shows as its exit
            else:
                life = await self._admit(first, _peer_pid(writer))
                await self._converse(life, reader, writer)
        except _RefusedError as e:
            log.warning("a connection on %s is refused: %s", self._path.name, e)
        except (TimeoutError, ConnectionError, ValueError, msgspec.MsgspecError) as e:
            log.warning("a connection on %s broke: %s", self._path.name, e or type(e).__name__)
        finally:
            writer.close()

    async def _admit(self, hello: wire.HelloMsg, peer_pid: int) -> RankLife:
        """The life that a hello belongs to. Raises: _RefusedError."""

        def known() -> bool:
            life = self._board.ranks.get(hello.rank)
            return life is None or life.process is not None or life.generation != hello.generation

        try:
            async with asyncio.timeout(LAUNCH_NEWS_S), self._launch_news:
                await self._launch_news.wait_for(known)
        except TimeoutError:
            pass
        life = self._board.ranks.get(hello.rank)
        who = f"rank {hello.rank} of generation {hello.generation} (pid {peer_pid})"
        if life is None or life.generation != hello.generation:
            raise _RefusedError(f"{who} is not of generation {self._board.generation} on this node")
        if life.pid != peer_pid or hello.pid != peer_pid:
            raise _RefusedError(f"{who} is not the process launched for it ({life.pid})")
        if life.connected:
            raise _RefusedError(f"{who} is connected already")
        return life

    async def _converse(
        self, life: RankLife, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        life.writer = writer
        life.connected = True
        life.tell(self._listener.rank_joined(life))
        try:
            while line := await reader.readline():
                self._listener.rank_said(life, _decode_rank(line))
        finally:
            life.writer = None
            life.hung_up.set()
            self._listener.rank_hung_up(life)


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    pid, _, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid


class ProbeServer:
    """The control socket: answers any number of probes on a connection with a fresh status each."""

    def __init__(self, host: str, token: str, job: str, status: Callable[[], wire.NodeStatus]) -> None:
        self._host = host
        self._token = token
        self._job = job
        self._status = status
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises: OSError: `host` is no address of this machine."""
        self._server = await asyncio.start_server(self._serve, self._host, 0, limit=LINE_BYTES_MAX)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                answer = self._answer(wire.decode(wire.ProbeMsg, line))
                writer.write(wire.encode(answer) + b"\n")
                await writer.drain()
                if isinstance(answer, wire.RefusedMsg):
                    break
        except (ConnectionError, ValueError, msgspec.MsgspecError) as e:
            log.warning("a probe broke: %s", e or type(e).__name__)
        finally:
            writer.close()

    def _answer(self, probe: wire.ProbeMsg) -> wire.ProbeReplyMsg | wire.RefusedMsg:
        if not hmac.compare_digest(probe.token.encode(), self._token.encode()):
            log.warning("a probe is refused: its token is wrong")
            return wire.RefusedMsg(reason="the token is wrong")
        if probe.job != self._job:
            return wire.RefusedMsg(reason=f"this agent is of job {self._job!r}, not {probe.job!r}")
        return wire.ProbeReplyMsg(status=self._status())

"""The processes that host a TCPStore: a fresh one for each generation whose rank 0 runs here, and a spare for the next.

Ranks meet at the TCPStore, so everything in a restart waits for it. The spare listens already when a plan comes; nobody
has ever connected to it, so nothing of an older generation can be read from it. A host that has served is ended with its
generation. All of them end with the agent: they watch their connection to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.agent.errors import LaunchError
from surefoot.agent.forker import Forker
from surefoot.agent.messages import StoreOrder, StoreUpMsg
from surefoot.agent.processes import WatchedProcess

log = logging.getLogger(__name__)

STORE_UP_S = 30.0
"""Fork to a listening TCPStore; it takes some 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlaces:
    """What a host is started with."""

    host: str
    """The address that ranks are told, and the host's own client connects to."""
    logs: Path
    env: Mapping[str, str]
    cwd: str


@dataclass(slots=True)
class _Host:
    process: WatchedProcess
    port: int


class StoreHosts:
    """See the module. Belongs to the event loop's thread."""

    def __init__(self, places: StorePlaces, forker: Forker) -> None:
        self._places = places
        self._forker = forker
        self._started = 0
        self._spare: _Host | None = None
        self._serving: dict[int, _Host] = {}
        self._ports: dict[int, asyncio.Future[int]] = {}
        """Pid to the port that it reports, or to its failure; either side may be first."""

    async def host(self, generation: int) -> int:
        """Have a TCPStore serve `generation`; returns its port. Raises: LaunchError."""
        if self._spare is not None and self._spare.process.alive:
            host, self._spare = self._spare, None
        else:
            host = await self._start()
        self._serving[generation] = host
        return host.port

    async def keep_spare(self) -> None:
        """Have a spare, if one can be had."""
        if self._spare is None or not self._spare.process.alive:
            try:
                self._spare = await self._start()
            except LaunchError as e:
                log.warning("no spare TCPStore: %s", e)

    def end_others(self, generation: int) -> list[WatchedProcess]:
        """End those that served another generation; returns what was told to end."""
        ended = [h.process for g, h in self._serving.items() if g != generation]
        for process in ended:
            process.kill_group()
        self._serving = {g: h for g, h in self._serving.items() if g == generation}
        return ended

    def end_all(self) -> list[WatchedProcess]:
        """End all, the spare too."""
        ended = self.end_others(0)
        if self._spare is not None:
            self._spare.process.kill_group()
            ended.append(self._spare.process)
            self._spare = None
        return ended

    def store_up(self, message: StoreUpMsg) -> None:
        """A host said where it listens."""
        port = self._port_of(message.pid)
        if not port.done():
            port.set_result(message.port)

    async def _start(self) -> _Host:
        self._started += 1
        order = StoreOrder(
            host=self._places.host,
            env=dict(self._places.env),
            log_path=str(self._log_path()),
            cwd=self._places.cwd,
            agent_pid=os.getpid(),
        )
        (process,) = await self._forker.fork([order], self._exited)
        try:
            async with asyncio.timeout(STORE_UP_S):
                return _Host(process, await self._port_of(process.pid))
        except BaseException as e:
            process.kill_group()
            if isinstance(e, TimeoutError):
                words = f"the TCPStore was not up within {STORE_UP_S:g} s; see {order.log_path}"
                raise LaunchError(words) from None
            raise

    def _log_path(self) -> Path:
        """A log that nobody has written."""
        n = self._started
        while (path := self._places.logs / f"store-{n}.log").exists():
            n += 1
        return path

    def _port_of(self, pid: int) -> asyncio.Future[int]:
        if pid not in self._ports:
            self._ports[pid] = asyncio.get_running_loop().create_future()
        return self._ports[pid]

    def _exited(self, process: WatchedProcess) -> None:
        """Ranks notice by themselves when their store is gone; whoever waits for its port is told here."""
        port = self._ports.pop(process.pid, None)
        if port is not None and not port.done():
            port.set_exception(LaunchError(f"the TCPStore's host ended at once; see {self._places.logs}"))
            port.exception()  # heard, even if nobody waits any more

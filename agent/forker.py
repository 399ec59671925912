"""The agent's side of the zygote: keep one warm, and have it fork.

A zygote that dies is replaced; its children live on, for they are the agent's. What it was forking when it died is unknown,
so that request fails and is not repeated. One that cannot even warm up three times in a row is given up, and ranks are
started by exec, as they also are when the zygote has threads and must not fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot import history
from surefoot.agent import decide
from surefoot.agent.errors import ChannelClosedError, LaunchError
from surefoot.agent.helper import Helper
from surefoot.agent.messages import (
    ForkedMsg,
    ForkMsg,
    ForkRefusedMsg,
    Order,
    StoreOrder,
    WarmMsg,
    WarmUpMsg,
    ZygoteToAgent,
    decode_from_zygote,
)
from surefoot.agent.processes import Processes, WatchedProcess
from surefoot.controller import wire

log = logging.getLogger(__name__)

QUIET_LIBRARIES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Importing numpy and pyarrow would otherwise start threads, and a process with threads must not fork."""

RANK_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "surefoot.agent.session",
    # What a rank loads when it restores and snapshots: 45 ms of each rank that is forked, before it can.
    "surefoot.ckpt.state",
    "surefoot.ckpt.live.copying",
    "surefoot.ckpt.loading.fetching",
)
"""What every rank needs. The job's own modules are `program.preload`."""

WARM_S = 180.0
"""torch takes 1 to 15 s to import, the job's modules what they take."""

FORK_S = 30.0
"""A fork takes milliseconds."""

COLD_DEATHS_MAX = 3
"""Zygotes in a row that die before they are warm; then ranks are started by exec."""

OnExit = Callable[[WatchedProcess], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkerConfig:
    """What a zygote is started with."""

    env: Mapping[str, str]
    """The agent's environment, with its mark; `QUIET_LIBRARIES` are added."""
    log_path: Path
    modules: tuple[str, ...]
    """Of ours, `RANK_MODULES` but in tests."""
    preload: tuple[str, ...]
    path: tuple[str, ...]
    """Folders added to the module search path: where the job file lies."""


@dataclass(slots=True)
class _Request:
    orders: Sequence[Order]
    on_exit: OnExit
    answer: asyncio.Future[list[WatchedProcess]]
    expecting: contextlib.AbstractContextManager[None]
    over: asyncio.Event
    """The zygote has answered or died; `answer` may have been cancelled long before."""


class Forker:
    """See the module. `run` is its task; `fork` may be awaited from others."""

    def __init__(self, config: ForkerConfig, processes: Processes, on_change: Callable[[], None]) -> None:
        self._config = config
        self._processes = processes
        self._on_change = on_change
        self._env = {**config.env, **QUIET_LIBRARIES}
        self._settled = asyncio.Event()
        self._requests: dict[int, _Request] = {}
        self._serial = 0
        self._gave_up = False
        self._helper = Helper(
            "zygote",
            processes,
            env=self._env,
            log_path=config.log_path,
            decode=decode_from_zygote,
            hear=self._hear,
            gone=self._lost,
        )
        self._was_warm = False
        self.warm: WarmMsg | None = None

    @property
    def process(self) -> WatchedProcess | None:
        """The zygote that is, or was last, alive."""
        return self._helper.process

    async def end(self) -> None:
        """After `run` was cancelled: wait until the zygote has gone."""
        await self._helper.end()

    @property
    def settled(self) -> bool:
        """A zygote is warm, or it was decided to do without."""
        return self._settled.is_set()

    @property
    def note(self) -> str:
        """For the status: why ranks cannot be started, or not the fast way."""
        if self.warm is not None and self.warm.failure is not None:
            return self.warm.failure.message
        return "the zygote does not start; ranks are started by exec" if self._gave_up else ""

    async def run(self) -> None:
        """Keep a zygote until cancelled."""
        cold_deaths = 0
        while cold_deaths < COLD_DEATHS_MAX:
            was_warm = await self._one_zygote()
            cold_deaths = 0 if was_warm else cold_deaths + 1
            await asyncio.sleep(decide.retry_delay_s(cold_deaths) if cold_deaths else 0)
        log.error(
            "the zygote died %d times before it was warm; see %s. Ranks are started by exec",
            cold_deaths,
            self._config.log_path,
        )
        self._gave_up = True
        self._settled.set()
        self._on_change()

    async def fork(self, orders: Sequence[Order], on_exit: OnExit) -> list[WatchedProcess]:
        """Start the ordered processes; waits for a warm zygote. If the caller is cancelled meanwhile, they are ended.

        Raises:
            LaunchError: none of them runs (any longer).
        """
        await self._wait_for_warmth()
        if self.warm is not None and self.warm.failure is not None:
            raise LaunchError(self.warm.failure.message, self.warm.failure)
        with history.operation("launch", **_of(orders)) as result:
            if self._gave_up or (self.warm is not None and self.warm.threads != 1):
                processes = self._spawn(orders, on_exit)
            else:
                processes = await self._ask(orders, on_exit)
            result["pids"] = [p.pid for p in processes]
        return processes

    async def _wait_for_warmth(self) -> None:
        try:
            async with asyncio.timeout(WARM_S):
                await self._settled.wait()
        except TimeoutError:
            raise LaunchError(
                f"the zygote was not warm within {WARM_S:g} s: a module of program.preload blocks, or this machine is "
                f"overloaded; see {self._config.log_path}"
            ) from None

    async def quiet(self) -> None:
        """Wait until no fork is under way: whatever was ordered is then known to `Processes`, or was ended."""
        for request in list(self._requests.values()):
            await request.over.wait()

    # ------------------------------------------------------------ one zygote's life

    async def _one_zygote(self) -> bool:
        """Start one and talk to it until it dies. Returns whether it was ever warm."""
        self._was_warm = False
        order = WarmUpMsg(modules=self._config.modules, preload=self._config.preload, path=self._config.path)
        try:
            await self._helper.live(["surefoot.agent.zygote"], order)
        except OSError as e:
            log.error("cannot start a zygote: %s", e)
        return self._was_warm

    def _lost(self) -> None:
        self._settled.clear()
        self.warm = None
        for serial in list(self._requests):
            self._answer(
                serial, LaunchError("the zygote died while it forked: what it had started by then is ended")
            )
        self._on_change()

    def _hear(self, message: ZygoteToAgent) -> None:
        match message:
            case WarmMsg():
                self._warmed(message)
            case ForkedMsg():
                self._forked(message)
            case ForkRefusedMsg():
                log.warning(
                    "the zygote has %d threads and must not fork: starting ranks by exec", message.threads
                )
                request = self._requests[message.serial]
                try:
                    self._answer(message.serial, self._spawn(request.orders, request.on_exit))
                except LaunchError as e:
                    self._answer(message.serial, e)

    def _warmed(self, warm: WarmMsg) -> None:
        self.warm = warm
        self._was_warm = True
        log.info("the zygote is warm after %.1f s", warm.import_s)
        if warm.failure is not None:
            log.error("%s\n%s", warm.failure.message, warm.failure.traceback)
        self._settled.set()
        self._on_change()

    # ------------------------------------------------------------ requests

    async def _ask(self, orders: Sequence[Order], on_exit: OnExit) -> list[WatchedProcess]:
        self._serial += 1
        answer: asyncio.Future[list[WatchedProcess]] = asyncio.get_running_loop().create_future()
        expecting = self._processes.expecting()
        expecting.__enter__()  # closed by _answer, when the zygote has answered or died
        self._requests[self._serial] = _Request(orders, on_exit, answer, expecting, asyncio.Event())
        try:
            self._helper.send(ForkMsg(serial=self._serial, orders=tuple(orders)))
        except ChannelClosedError as e:
            self._answer(self._serial, LaunchError(str(e)))
        watchdog = asyncio.get_running_loop().call_later(FORK_S, self._end_stuck)
        try:
            return await answer
        finally:
            watchdog.cancel()

    def _end_stuck(self) -> None:
        """A zygote that does not answer is ended: the request then fails like that of any dead zygote."""
        log.error("the zygote has not forked within %g s: it is replaced", FORK_S)
        if self.process is not None:
            self.process.send(signal.SIGKILL)

    def _forked(self, message: ForkedMsg) -> None:
        request = self._requests[message.serial]
        processes = [
            self._processes.watch(p.pid, name=_name(order), on_exit=request.on_exit)
            for p, order in zip(message.processes, request.orders, strict=False)
        ]
        if message.failure or request.answer.cancelled():
            for process in processes:
                process.kill_group()
        if message.failure:
            self._answer(message.serial, LaunchError(f"ranks could not be forked: {message.failure}"))
        else:
            self._answer(message.serial, processes)

    def _answer(self, serial: int, answer: list[WatchedProcess] | LaunchError) -> None:
        request = self._requests.pop(serial)
        request.expecting.__exit__(None, None, None)
        request.over.set()
        if request.answer.done():
            return
        if isinstance(answer, LaunchError):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)

    def _spawn(self, orders: Sequence[Order], on_exit: OnExit) -> list[WatchedProcess]:
        processes: list[WatchedProcess] = []
        try:
            for order in orders:
                processes.append(self._spawn_one(order, on_exit))  # noqa: PERF401 (those before a failure must be known)
        except OSError as e:
            for process in processes:
                process.kill_group()
            raise LaunchError(f"ranks could not be started: {e}") from e
        return processes

    def _spawn_one(self, order: Order, on_exit: OnExit) -> WatchedProcess:
        fd = os.memfd_create("surefoot-order")
        try:
            os.write(fd, wire.encode(order))
            os.lseek(fd, 0, os.SEEK_SET)
            return self._processes.spawn(
                ["-m", "surefoot.agent.zygote", "--order"],
                name=_name(order),
                env=self._env,
                log_path=self._config.log_path,
                stdin=fd,
                on_exit=on_exit,
            )
        finally:
            os.close(fd)


def _name(order: Order) -> str:
    if isinstance(order, StoreOrder):
        return "store"
    return f"rank-{order.rank}-g{order.generation}"


def _of(orders: Sequence[Order]) -> dict[str, object]:
    """For the history: what is started."""
    ranks = [o for o in orders if not isinstance(o, StoreOrder)]
    if not ranks:
        return {"what": "store"}
    return {"what": "ranks", "generation": ranks[0].generation, "ranks": [o.rank for o in ranks]}

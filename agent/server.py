"""The agent's side of the snapshot server: keep one running, hand it jobs, get their answers.

If the server dies, its jobs are unknown: whoever waits for one gets `ChannelClosedError` and decides. Another server is
started, on another port, with what the slots hold.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from surefoot.agent import decide
from surefoot.agent.decide import HeldImage
from surefoot.agent.errors import ChannelClosedError, TransferError
from surefoot.agent.helper import Helper
from surefoot.agent.messages import (
    CommitAnswer,
    CommitMsg,
    FailedAnswer,
    FetchMsg,
    FinishedAnswer,
    GenerationMsg,
    GiveUpMsg,
    Image,
    ReplicasMsg,
    ReplicateMsg,
    ServerToAgent,
    ServingMsg,
    UploadMsg,
    decode_from_server,
)
from surefoot.agent.processes import Processes, WatchedProcess

log = logging.getLogger(__name__)

PATIENCE_FACTOR, PATIENCE_S = 3, 10.0
"""Jobs have deadlines of their own in the server, and may wait for one or two before them; beyond that it hangs."""

Job = ReplicateMsg | FetchMsg | UploadMsg | GiveUpMsg | CommitMsg
Answer = FinishedAnswer | FailedAnswer | CommitAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStart:
    """What a snapshot server is started with."""

    env: Mapping[str, str]
    log_path: Path
    root: str
    shm_dir: Path
    budget_bytes: int | None
    host: str
    token_file: Path
    history_path: Path
    keep: int | None = None
    """How many checkpoints retention leaves; None: all."""
    keep_every_steps: int | None = None

    def argv(self) -> list[str]:
        argv = ["surefoot.agent.snapshots", "--root", self.root, "--shm-dir", str(self.shm_dir)]
        argv += [
            "--host",
            self.host,
            "--token-file",
            str(self.token_file),
            "--history",
            str(self.history_path),
        ]
        if self.budget_bytes is not None:
            argv += ["--budget-bytes", str(self.budget_bytes)]
        if self.keep is not None:
            argv += ["--keep", str(self.keep)]
        if self.keep_every_steps is not None:
            argv += ["--keep-every-steps", str(self.keep_every_steps)]
        return argv


class SnapshotServer:
    """See the module. `run` is its task; `ask` may be awaited from many.

    Args:
        on_change: called when the port or the replicas have changed.
    """

    def __init__(self, start: ServerStart, processes: Processes, on_change: Callable[[], None]) -> None:
        self._argv = start.argv()
        self._on_change = on_change
        self._helper = Helper(
            "snapshot server",
            processes,
            env=start.env,
            log_path=start.log_path,
            decode=decode_from_server,
            hear=self._hear,
            gone=self._lost,
        )
        self._serving = asyncio.Event()
        self._has_served = False
        self._serial = 0
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._generation: GenerationMsg | None = None
        self.port = 0
        self.replicas: tuple[HeldImage, ...] = ()

    @property
    def process(self) -> WatchedProcess | None:
        return self._helper.process

    async def run(self) -> None:
        """Keep a server until cancelled."""
        cold_deaths = 0
        while True:
            self._has_served = False
            try:
                await self._helper.live(self._argv)
            except OSError as e:
                log.error("cannot start a snapshot server: %s", e)
            cold_deaths = 0 if self._has_served else cold_deaths + 1
            await asyncio.sleep(decide.retry_delay_s(cold_deaths) if cold_deaths else 0)

    async def end(self) -> None:
        """After `run` was cancelled: wait until the server has gone."""
        await self._helper.end()

    async def serving(self) -> None:
        """Wait until one listens."""
        await self._serving.wait()

    def set_generation(self, message: GenerationMsg) -> None:
        """What is in force; also told to servers yet to come."""
        self._generation = msgspec.structs.replace(message, drop_replicas=())
        if self._serving.is_set():
            self._helper.send(message)

    async def ask(self, make: Callable[[int], Job]) -> Answer:
        """Have a job done. `make` builds it with the serial it is given.

        Raises:
            ChannelClosedError: the server died; what became of the job is unknown.
        """
        await self._serving.wait()
        self._serial += 1
        serial = self._serial
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[serial] = answer
        job = make(serial)
        patience_s = PATIENCE_FACTOR * job.deadline_s + PATIENCE_S
        watchdog = asyncio.get_running_loop().call_later(patience_s, self._end_stuck, job)
        try:
            self._helper.send(job)
            return await answer
        finally:
            watchdog.cancel()
            self._answers.pop(serial, None)

    def _end_stuck(self, job: Job) -> None:
        """A server that is long past a job's deadline does not work any more: it is replaced."""
        log.error("the snapshot server does not finish a %s: it is replaced", type(job).__name__)
        if self.process is not None:
            self.process.send(signal.SIGKILL)

    async def move(self, make: Callable[[int], Job]) -> None:
        """`ask` for a job that either succeeds or raises.

        Raises:
            TransferError, ChannelClosedError
        """
        answer = await self.ask(make)
        if isinstance(answer, FailedAnswer):
            kind = "peer_unreachable" if answer.kind == "object_store" else answer.kind
            raise TransferError(kind, answer.detail)

    def _hear(self, message: ServerToAgent) -> None:
        match message:
            case ServingMsg():
                self.port = message.port
                self.replicas = _held(message.replicas)
                self._serving.set()
                self._has_served = True
                if self._generation is not None:
                    self._helper.send(self._generation)
                self._on_change()
            case ReplicasMsg():
                self.replicas = _held(message.replicas)
                self._on_change()
            case FinishedAnswer() | FailedAnswer() | CommitAnswer():
                waiting = self._answers.get(message.serial)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    def _lost(self) -> None:
        self._serving.clear()
        self.port = 0
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(ChannelClosedError("the snapshot server died during the job"))


def _held(images: tuple[Image, ...]) -> tuple[HeldImage, ...]:
    return tuple(
        HeldImage(rank=i.rank, generation=i.generation, step=i.step, replica=True, path=i.path)
        for i in images
    )

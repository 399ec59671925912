"""The desk: what ranks say over their connections, and what is done about it. It is `links.RankListener`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Any

from surefoot.agent import decide
from surefoot.agent.board import Board, RankLife
from surefoot.agent.errors import MemoryBudgetError, NodeError
from surefoot.agent.flow import SnapshotFlow
from surefoot.agent.messages import Image, StoreUpMsg
from surefoot.agent.slots import SlotFolder
from surefoot.agent.storehost import StoreHosts
from surefoot.controller import wire

log = logging.getLogger(__name__)

LINGER_S = 10.0
"""A rank that has hung up must end within so long; its interpreter's own end takes a fraction of that."""


class RankDesk:
    """See the module. Belongs to the event loop's thread.

    Args:
        slot_io: makes slot files, one at a time.
    """

    def __init__(
        self, board: Board, folder: SlotFolder, flow: SnapshotFlow, stores: StoreHosts, slot_io: Executor
    ) -> None:
        self._board = board
        self._folder = folder
        self._flow = flow
        self._stores = stores
        self._slot_io = slot_io
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Drop what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def rank_joined(self, life: RankLife) -> wire.StartMsg:
        assert self._board.plan is not None
        self._progressed(life)
        return wire.StartMsg(plan=self._board.plan, restore_path=life.restore_path)

    def rank_said(self, life: RankLife, message: wire.RankToAgent) -> None:
        self._progressed(life)
        match message:
            case wire.PhaseMsg():
                life.phase, life.step = message.phase, message.step
            case wire.StepMsg():
                life.loss = message.loss
                life.step_s = message.step_s
            case wire.PoolMsg():
                self._spawn(self._make_pool(life, message))
            case wire.SnapshotMsg():
                self._sealed(life, message)
            case wire.CadenceMsg():
                log.info("checkpoints: %s", message.why)
                self._board.set_note("cadence", f"checkpoints {message.why}")
                self._flow.cadence = message.why
            case wire.FailedMsg():
                life.error, life.step = message.error, message.step
            case wire.DoneMsg():
                life.ended, life.phase, life.step = message.ended, "done", message.step
            case wire.HelloMsg():
                log.warning("rank %d says hello twice", life.rank)

    def rank_hung_up(self, life: RankLife) -> None:
        """Its process must end next; what does not is of no use any more."""
        if life.alive and not life.ending:
            self._spawn(self._end_lingering(life))

    def store_up(self, message: StoreUpMsg) -> None:
        self._stores.store_up(message)

    def _progressed(self, life: RankLife) -> None:
        life.progress_at = asyncio.get_running_loop().time()
        self._board.changed()

    async def _end_lingering(self, life: RankLife) -> None:
        assert life.process is not None
        try:
            async with asyncio.timeout(LINGER_S):
                await life.process.wait()
        except TimeoutError:
            log.warning("rank %d hung up %g s ago and lives: it is ended", life.rank, LINGER_S)
            if life.error is None:
                life.error = wire.ErrorReport(
                    kind="agent_lost",
                    type="Lingered",
                    message="it closed its connection to the agent and went on",
                )
            life.process.kill_group()

    async def _make_pool(self, life: RankLife, wanted: wire.PoolMsg) -> None:
        """Answer a `wire.PoolMsg`. Where there is no memory, that ends this start, in words."""
        plan = self._board.plan
        paths = [self._folder.path("own", life.rank, k) for k in range(wanted.slots)]
        loop = asyncio.get_running_loop()
        try:
            self._check_memory(wanted)
            for path in paths:
                await loop.run_in_executor(self._slot_io, self._folder.reserve, path, wanted.slot_bytes)
        except (NodeError, OSError) as e:
            error = wire.ErrorReport(kind="startup", type=type(e).__name__, message=str(e))
            self._board.fail_start(
                wire.StartFailure(
                    generation=life.generation, kind="launch_failed", detail=str(e), error=error
                )
            )
            return
        start = plan.start if plan is not None and plan.start.tier == "memory" else None
        point = (start.generation, start.step) if start is not None else None
        views = self._folder.views("own", life.rank, wanted.slots)
        held = decide.pool_holdings(views, point)
        life.tell(wire.PoolReadyMsg(paths=tuple(map(str, paths)), held=held))

    def _check_memory(self, wanted: wire.PoolMsg) -> None:
        """Better now than at the first copy or the first checkpoint. Raises: MemoryBudgetError."""
        plan, budget = self._board.plan, self._folder.budget_bytes
        if plan is None or budget is None:
            return
        uid = self._board.me.uid
        own = sum(m.ranks for m in plan.members if m.uid == uid)
        copied = sum(m.ranks for m in plan.members if plan.peers.get(m.uid) == uid)
        needed = decide.memory_needed(
            wanted.slot_bytes, slots=wanted.slots, own_ranks=own, copied_ranks=copied
        )
        if needed > budget:
            raise MemoryBudgetError(
                f"snapshots need {needed:,} bytes on a node (slots of {wanted.slot_bytes:,} bytes for {own} ranks of its "
                f"own, for copies of {copied} others, and for uploads); checkpoint.memory_budget allows {budget:,}: raise "
                "it, or run fewer ranks per node"
            )

    def _sealed(self, life: RankLife, message: wire.SnapshotMsg) -> None:
        path = str(self._folder.path("own", life.rank, message.slot))
        held = decide.HeldImage(
            rank=life.rank, generation=life.generation, step=message.step, replica=False, path=path
        )
        self._board.own[path] = held
        image = Image(rank=life.rank, generation=life.generation, step=message.step, path=path)
        self._flow.sealed(image, message.attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("serving a rank broke off: %r", error, exc_info=error)

"""The end of ranks: how one that ended by itself is told, and how a generation is ended with all that it has started."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from surefoot import history
from surefoot.agent import cleanup, stacks
from surefoot.agent.board import Board, RankLife
from surefoot.agent.errors import StillAliveError
from surefoot.agent.forker import Forker
from surefoot.agent.processes import Processes, WatchedProcess
from surefoot.agent.server import SnapshotServer
from surefoot.agent.slots import SlotFolder
from surefoot.agent.storehost import StoreHosts
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

END_RANKS_S = 10.0
"""SIGKILL to gone. What takes longer hangs in the kernel."""

HEAR_OUT_S = 0.1
"""From a rank's exit to the end of its connection; both are the same act of the kernel."""


class RankEnder:
    """See the module. Belongs to the event loop's thread.

    Args:
        logs: where stacks go.
    """

    def __init__(
        self,
        board: Board,
        processes: Processes,
        *,
        forker: Forker,
        server: SnapshotServer,
        stores: StoreHosts,
        folder: SlotFolder,
        logs: Path,
    ) -> None:
        self._board = board
        self._processes = processes
        self._forker = forker
        self._server = server
        self._stores = stores
        self._folder = folder
        self._logs = logs
        self._noting: set[asyncio.Task[None]] = set()

    async def dump_stacks(self) -> None:
        """Put the stacks of the living ranks on disk, in bounded time."""
        alive = {life.rank: life for life in self._board.ranks.values() if life.alive}
        if not alive:
            return
        generation = next(iter(alive.values())).generation
        places = await stacks.dump_stacks(
            self._processes,
            {rank: life.pid for rank, life in alive.items()},
            self._logs,
            generation,
        )
        for rank, place in places.items():
            log.warning("rank %d of generation %d hung in: %s", rank, generation, place)
        history.note("stacks", generation=generation, places=places)

    async def end_former(self) -> None:
        """End all ranks, the TCPStore's host, and whatever ranks have started. Afterwards the board has no ranks.

        Raises: StillAliveError
        """
        board = self._board
        await self._forker.quiet()
        with history.operation("stop", ranks=sorted(board.ranks)) as result:
            await self._kill_known()
            failpoint("cleanup.before_rescan")
            result["leftovers"] = await cleanup.end_leftovers(
                board.me.run_id,
                board.me.uid,
                quiet=self._forker.quiet,
                spared=self._helper_pids,
                timeout_s=END_RANKS_S,
            )
        for rank in list(board.ranks):
            board.set_own_images(rank, list(self._folder.images("own", rank)))
        board.ranks = {}

    def _helper_pids(self) -> set[int]:
        """What bears the node's mark too and lives on: zygote, snapshot server, the TCPStores to come."""
        helpers = (self._forker.process, self._server.process)
        return {p.pid for p in helpers if p is not None} | self._processes.pids(name="store")

    async def _kill_known(self) -> None:
        known = [life.process for life in self._board.ranks.values() if life.process is not None]
        for life in self._board.ranks.values():
            life.ending = life.ending or life.alive
        for process in known:
            process.kill_group()
        known += self._stores.end_others(self._board.generation)
        try:
            async with asyncio.timeout(END_RANKS_S):
                await asyncio.gather(*(p.wait() for p in known))
        except TimeoutError:
            alive = ", ".join(f"{p.name} ({p.pid})" for p in known if p.alive)
            raise StillAliveError(
                f"{alive} did not end within {END_RANKS_S:g} s of SIGKILL: reboot the node"
            ) from None

    def rank_exited(self, process: WatchedProcess) -> None:
        """A rank's process was reaped; may be told twice."""
        life = next((x for x in self._board.ranks.values() if x.process is process), None)
        if life is not None and process.status is not None and not life.exit_seen:
            life.exit_seen = True
            task = asyncio.create_task(self._note_exit(life, process.status))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _note_exit(self, life: RankLife, wait_status: int) -> None:
        await _hear_out(life)
        verdict = life.note_exit(wait_status)
        history.note(
            "rank_exit",
            generation=life.generation,
            rank=life.rank,
            pid=life.pid,
            role=verdict.role,
            how=verdict.words,
        )
        level = logging.INFO if verdict.role in ("none", "teardown") else logging.WARNING
        log.log(
            level,
            "rank %d of generation %d (%s): %s",
            life.rank,
            life.generation,
            verdict.role,
            verdict.words,
        )
        if not life.ending:  # else end_former looks, once all have gone
            self._board.set_own_images(life.rank, list(self._folder.images("own", life.rank)))
        self._board.changed(urgent=not life.ending)


async def _hear_out(life: RankLife) -> None:
    """A rank's last words lie in its socket when its exit is seen: hear them first, they say why it ended.

    The socket closes with the process, unless a child of the rank holds it open too; then what lies there is read after
    a few turns of the loop all the same.
    """
    if not life.connected or life.ending:
        return
    try:
        async with asyncio.timeout(HEAR_OUT_S):
            await life.hung_up.wait()
    except TimeoutError:
        for _ in range(3):
            await asyncio.sleep(0)

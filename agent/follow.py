"""Following plans: from the pointer in etcd to running ranks, one generation at a time.

    read the record, check its hash -> (a hang: stacks) -> end the old ranks and what they left
    -> bring the snapshots that are missing -> rank 0's node: a TCPStore; the others: its address -> fork

A newer pointer cancels whatever is under way for the older one; the older one's processes are then ended like any other
generation's. What makes a start impossible becomes a `wire.StartFailure`: the controller decides what next.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from surefoot import history
from surefoot.agent import decide
from surefoot.agent.board import Board, RankLife
from surefoot.agent.decide import Foreign, Launch, Park, Unserveable
from surefoot.agent.ending import RankEnder
from surefoot.agent.errors import (
    ChannelClosedError,
    LaunchError,
    StillAliveError,
    TransferError,
)
from surefoot.agent.flow import SnapshotFlow
from surefoot.agent.forker import Forker
from surefoot.agent.links import RankServer
from surefoot.agent.messages import (
    FetchMsg,
    GenerationMsg,
    Image,
    Order,
    PeerAddress,
    RankOrder,
)
from surefoot.agent.plans import PlanReader, start_failure_of
from surefoot.agent.processes import WatchedProcess
from surefoot.agent.server import SnapshotServer
from surefoot.agent.slots import SlotFolder
from surefoot.agent.storehost import StoreHosts
from surefoot.controller import wire
from surefoot.failpoint import failpoint

log = logging.getLogger(__name__)

END_RANKS_S = 10.0
"""SIGKILL to gone. What takes longer hangs in the kernel."""

FETCH_S = 60.0
"""One snapshot of one rank, all tries together."""

RENDEZVOUS_S = 120.0
"""Waiting for another node's TCPStore: that node may fetch first, and the leader's own deadline is shorter."""

FETCH_TRIES = 3
"""A peer whose snapshot server is just being replaced deserves another try; one that is gone is the controller's matter."""

SPARE_AFTER_S = 3.0
"""After a launch, so that the spare does not compete with ranks that come up."""

HEAR_OUT_S = 0.1
"""From a rank's exit to the end of its connection; both are the same act of the kernel."""

OWN_SLOTS = 3
"""Slots looked at for a fetched snapshot: a rank's pool has as many (pool.py), so it will find it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig:
    """Places and names that launching needs."""

    host: str
    logs: Path
    processes_file: Path
    """Where (pid, start time, generation, rank) of every launched rank is noted."""
    cwd: str
    places: dict[str, str]
    """The SUREFOOT_… part of a rank's environment that is the same for all."""
    history_folder: Path
    entry: str
    """``module:function`` that a forked rank calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerParts:
    """The parts of the agent that following a plan moves."""

    board: Board
    plans: PlanReader
    ender: RankEnder
    forker: Forker
    server: SnapshotServer
    flow: SnapshotFlow
    folder: SlotFolder
    rank_server: RankServer
    stores: StoreHosts
    address_of: Callable[[str, bool], Awaitable[PeerAddress | None]]
    watch_store_node: Callable[[str | None], None]
    """Follow that node's status (None: nobody's) and hand it to `store_node_status`."""


class Follower:
    """See the module. Belongs to the event loop's thread."""

    def __init__(self, config: FollowerConfig, parts: FollowerParts) -> None:
        self._config = config
        self._parts = parts
        self._board = parts.board
        self._task: asyncio.Task[None] | None = None
        self._pointer: wire.PlanPointer | None = None
        self._launched = 0
        """The newest generation whose ranks were ordered; none is ordered twice, and no older one any more."""
        self._background: set[asyncio.Task[None]] = set()
        self._store_node_status: wire.NodeStatus | None = None
        self._status_news = asyncio.Event()

    # ------------------------------------------------------------ what is heard

    def pointer_seen(self, pointer: wire.PlanPointer) -> None:
        """The plan key holds this."""
        newest = max(self._pointer.generation if self._pointer else 0, self._board.generation)
        if pointer == self._pointer or not decide.is_news(pointer, newest):
            return
        history.note("plan_seen", generation=pointer.generation)
        self._pointer = pointer
        before = self._task
        self._task = asyncio.create_task(self._take_up(pointer, before))

    def store_node_status(self, status: wire.NodeStatus) -> None:
        """The node that hosts the TCPStore said this."""
        self._store_node_status = status
        self._status_news.set()

    async def stop(self) -> None:
        """Follow nothing any more; what runs is left running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ one generation

    async def _take_up(self, pointer: wire.PlanPointer, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
        began = time.monotonic()
        try:
            await self._follow(pointer)
        except Exception as e:  # also a bug must become a failure that the controller sees
            await self._give_up(pointer.generation, e)
        log.info("generation %d took %.3f s here", pointer.generation, time.monotonic() - began)

    async def _give_up(self, generation: int, error: Exception) -> None:
        """Nothing of that generation runs here, and why."""
        if generation != self._board.generation:
            self._begin(generation)
        failure = start_failure_of(generation, error)
        try:
            await self._end_former()
        except StillAliveError as e:
            failure = start_failure_of(generation, e)
        self._board.fail_start(failure)

    async def _follow(self, pointer: wire.PlanPointer) -> None:
        plan = await self._parts.plans.read(pointer)
        first_look = decide.judge_plan(self._board.me, plan, self._board.held())
        if isinstance(first_look, Foreign):
            log.warning("the plan of generation %d is left alone: %s", plan.generation, first_look.why)
            return
        self._begin(plan.generation)
        hosting = self._begin_hosting(first_look)
        try:
            if first_look.dump_stacks:
                await self._parts.ender.dump_stacks()
            await self._end_former()
            # Only now is it certain what the slots hold: a rank may have been killed in the middle of sealing.
            match decide.judge_plan(self._board.me, plan, self._board.held()):
                case Launch() as launch:
                    await self._launch(plan, launch, hosting)
                case Unserveable() as no:
                    self._board.fail_start(
                        wire.StartFailure(generation=plan.generation, kind=no.kind, detail=no.why)
                    )
                case Park() | Foreign() as park:
                    log.info("parked under generation %d: %s", plan.generation, park.why)
                    self._board.set_state("parked")
        finally:
            if hosting is not None:
                hosting.cancel()
                await asyncio.gather(hosting, return_exceptions=True)

    def _begin_hosting(self, verdict: decide.PlanVerdict) -> asyncio.Task[wire.Rendezvous] | None:
        """All nodes wait for the TCPStore, and it is none of the ranks: it may come up while the old ones end."""
        if isinstance(verdict, Launch) and verdict.hosts_store:
            return asyncio.create_task(self._host_store(self._board.generation))
        return None

    def _begin(self, generation: int) -> None:
        board = self._board
        board.generation = generation
        board.rendezvous = board.start_failure = board.plan = None
        board.set_note("start", "")
        board.set_state("starting")

    # ------------------------------------------------------------ the end of the former generation

    async def _end_former(self) -> None:
        """What ran here under the generation before. Raises: StillAliveError"""
        self._parts.flow.stop()
        self._parts.watch_store_node(None)
        self._store_node_status = None
        await self._parts.ender.end_former()

    async def end_ranks(self) -> None:
        """The job is over, or the agent leaves: end what runs, at once."""
        await self.stop()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*(p.wait() for p in self._parts.stores.end_all()))
        await self._end_former()

    # ------------------------------------------------------------ the start of the new one

    async def _launch(
        self, plan: wire.Plan, launch: Launch, hosting: asyncio.Task[wire.Rendezvous] | None
    ) -> None:
        if plan.generation <= self._launched:
            raise LaunchError(f"generation {plan.generation} was launched before")
        self._board.plan = plan
        self._tell_server(plan, launch)
        self._parts.flow.begin(plan, launch)
        self._parts.watch_store_node(None if launch.hosts_store else launch.store_node.uid)
        fetched = await self._fetch_all(plan, launch)
        if launch.hosts_store:
            rendezvous = await (hosting if hosting is not None else self._host_store(plan.generation))
        else:
            rendezvous = await self._find_rendezvous(plan, launch)
        restore = {**launch.restore, **fetched}
        await self._fork_ranks(plan, launch, restore, rendezvous)
        for rank, path in restore.items():
            image = Image(rank=rank, generation=plan.start.generation, step=plan.start.step, path=path)
            self._parts.flow.restored(image)
        self._board.set_state("running")
        asyncio.get_running_loop().call_later(SPARE_AFTER_S, self.prepare)

    def prepare(self) -> None:
        """Have a spare TCPStore host, for the next generation."""
        task = asyncio.create_task(self._parts.stores.keep_spare())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _tell_server(self, plan: wire.Plan, launch: Launch) -> None:
        """What is in force; slots of ranks that are of no more use are given back."""
        folder = self._parts.folder
        start = (plan.start.generation, plan.start.step)
        starting = {h.rank for h in self._board.held() if h.point == start}
        own = decide.obsolete_ranks(folder.ranks("own"), decide.own_ranks(launch.member), starting)
        folder.drop_ranks("own", own)
        for rank in own:
            self._board.set_own_images(rank, [])
        copied = [m for m in plan.members if plan.peers.get(m.uid) == self._board.me.uid]
        needed = [rank for m in copied for rank in decide.own_ranks(m)]
        drop = decide.obsolete_ranks(folder.ranks("replica"), needed, starting)
        self._parts.server.set_generation(
            GenerationMsg(
                generation=plan.generation,
                start_generation=start[0],
                start_step=start[1],
                drop_replicas=tuple(drop),
                conditional=plan.conditional,
            )
        )

    async def _fetch_all(self, plan: wire.Plan, launch: Launch) -> dict[int, str]:
        """Bring the missing snapshots of the starting point; rank to path. Raises: TransferError."""
        fetched = await asyncio.gather(*(self._fetch(plan, f) for f in launch.fetches))
        for image in fetched:
            held = decide.HeldImage(
                rank=image.rank, generation=image.generation, step=image.step, replica=False, path=image.path
            )
            self._board.own[image.path] = held
        if fetched:
            self._board.changed()
        return {image.rank: image.path for image in fetched}

    async def _fetch(self, plan: wire.Plan, fetch: decide.Fetch) -> Image:
        start = plan.start
        slot = decide.slot_to_overwrite(
            self._parts.folder.views("own", fetch.rank, OWN_SLOTS),
            generation=plan.generation,
            start=(start.generation, start.step),
            incoming=(start.generation, start.step),
        )
        assert slot is not None, "a generation that has not begun needs no slot but its starting point's"
        path = self._parts.folder.path("own", fetch.rank, slot)
        image = Image(rank=fetch.rank, generation=start.generation, step=start.step, path=str(path))
        deadline = time.monotonic() + FETCH_S
        tries = 0
        while True:
            peer = await self._parts.address_of(fetch.uid, tries > 0)
            tries += 1
            try:
                if peer is None:
                    raise TransferError("peer_unreachable", f"node {fetch.uid} is not registered")
                await self._try_fetch(image, peer, deadline - time.monotonic())
                return image
            except (TransferError, ChannelClosedError) as e:
                hopeless = isinstance(e, TransferError) and e.kind != "peer_unreachable"
                if hopeless or tries >= FETCH_TRIES or time.monotonic() >= deadline:
                    raise
                log.warning("fetching rank %d's snapshot from %s: %s; once more", fetch.rank, fetch.uid, e)
                await asyncio.sleep(decide.retry_delay_s(tries))

    async def _try_fetch(self, image: Image, peer: PeerAddress, deadline_s: float) -> None:
        await self._parts.server.move(
            lambda serial: FetchMsg(
                serial=serial,
                image=image,
                peer=peer,
                in_force=self._board.generation,
                deadline_s=max(1.0, deadline_s),
            )
        )

    async def _host_store(self, generation: int) -> wire.Rendezvous:
        """Have a TCPStore for this generation, and let everybody know. Raises: LaunchError."""
        rendezvous = wire.Rendezvous(
            generation=generation,
            incarnation=self._board.me.incarnation,
            host=self._config.host,
            port=await self._parts.stores.host(generation),
        )
        self._board.rendezvous = rendezvous
        self._board.changed(urgent=True)
        return rendezvous

    async def _find_rendezvous(self, plan: wire.Plan, launch: Launch) -> wire.Rendezvous:
        """Wait for the store node's word. Raises: LaunchError."""
        node = launch.store_node
        try:
            async with asyncio.timeout(RENDEZVOUS_S):
                while True:
                    self._status_news.clear()
                    status = self._store_node_status
                    found = decide.rendezvous_in(status, node, plan.generation) if status else None
                    if found is not None:
                        return found
                    await self._status_news.wait()
        except TimeoutError:
            raise LaunchError(f"node {node.uid} told no rendezvous within {RENDEZVOUS_S:g} s") from None

    async def _fork_ranks(
        self, plan: wire.Plan, launch: Launch, restore: dict[int, str], rendezvous: wire.Rendezvous
    ) -> None:
        board, now = self._board, asyncio.get_running_loop().time()
        orders: list[Order] = []
        for rank in decide.own_ranks(launch.member):
            order = self._order(plan, launch, rank, rendezvous)
            orders.append(order)
            board.ranks[rank] = RankLife(
                generation=plan.generation,
                rank=rank,
                log_path=Path(order.log_path),
                progress_at=now,
                restore_path=restore.get(rank),
            )
        self._launched = plan.generation
        failpoint("launch.before_fork")
        processes = await self._parts.forker.fork(orders, self._parts.ender.rank_exited)
        for rank, process in zip(decide.own_ranks(launch.member), processes, strict=True):
            board.ranks[rank].process = process
        self._note_on_disk(plan.generation, launch, processes)
        failpoint("launch.after_fork")
        for rank, process in zip(decide.own_ranks(launch.member), processes, strict=True):
            if process.status is not None:
                self._parts.ender.rank_exited(process)  # it ended before its life was known here
            log.info("rank %d of generation %d is process %d", rank, plan.generation, process.pid)
        await self._parts.rank_server.launched()

    def _order(self, plan: wire.Plan, launch: Launch, rank: int, rendezvous: wire.Rendezvous) -> RankOrder:
        places = {
            **self._config.places,
            "SUREFOOT_HISTORY": str(self._config.history_folder / f"rank-{rank}-g{plan.generation}.jsonl"),
        }
        return RankOrder(
            generation=plan.generation,
            rank=rank,
            entry=self._config.entry,
            env=decide.rank_environment(plan, launch.member, rank, rendezvous, places),
            log_path=str(self._log_path(f"rank-{rank}-g{plan.generation}")),
            cwd=self._config.cwd,
            agent_pid=os.getpid(),
        )

    def _log_path(self, name: str) -> Path:
        """A log that no former incarnation has written."""
        path = self._config.logs / f"{name}.log"
        return path if not path.exists() else self._config.logs / f"{name}-{self._board.me.incarnation}.log"

    def _note_on_disk(self, generation: int, launch: Launch, processes: list[WatchedProcess]) -> None:
        """(pid, start time) names a process for good; a later incarnation can tell what it found."""
        with open(self._config.processes_file, "a") as f:
            for rank, process in zip(decide.own_ranks(launch.member), processes, strict=True):
                noted = {
                    "pid": process.pid,
                    "start_time": process.start_time,
                    "generation": generation,
                    "rank": rank,
                    "incarnation": self._board.me.incarnation,
                }
                f.write(json.dumps(noted) + "\n")

"""The agent: one supervisor per node. Registers, follows the plan, runs ranks, moves snapshots, reports.

One process, one asyncio loop, no torch. The loop's thread is the main thread and owns all state; what blocks (etcd, the
object store, slot files) runs in threads and comes back as callbacks. Parts, and who does what::

    board.py         the facts a status is made of          links.py         ranks' socket, probes
    desk.py          what ranks say                         forker.py        the zygote
    follow.py        from a plan to running ranks           ending.py        the end of ranks
    flow.py          from a snapshot to copy and commit     server.py        the snapshot server
    coordination.py  lease, heartbeat, watches              processes.py     children, their ends

This module builds them, connects them, and ends them in order. The agent never writes a key that ends or changes the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from surefoot import __version__, history
from surefoot.agent import cleanup, decide, flow, linux
from surefoot.agent.board import Board, RankLife
from surefoot.agent.config import AgentConfig, lock_node
from surefoot.agent.coordination import KeyWatch, Registration
from surefoot.agent.desk import RankDesk
from surefoot.agent.ending import RankEnder
from surefoot.agent.errors import NodeError
from surefoot.agent.flow import FlowHooks, SnapshotFlow
from surefoot.agent.follow import Follower, FollowerConfig, FollowerParts
from surefoot.agent.forker import RANK_MODULES, Forker, ForkerConfig
from surefoot.agent.links import ProbeServer, RankServer
from surefoot.agent.messages import PeerAddress
from surefoot.agent.plans import PlanReader
from surefoot.agent.processes import Processes
from surefoot.agent.server import ServerStart, SnapshotServer
from surefoot.agent.slots import SlotFolder
from surefoot.agent.storehost import StoreHosts, StorePlaces
from surefoot.ckpt.store import ObjectStore, open_store
from surefoot.controller import wire
from surefoot.controller.keys import Keys
from surefoot.controller.spec.tables import JobSpec
from surefoot.controller.store import CoordError, CoordStore, KeyValue
from surefoot.exitcodes import ExitCode

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVER_UP_S = 60.0
"""It imports pyarrow and listens, some 0.3 s on an idle machine."""

PART_S = 2.0
"""What the ranks did is committed: those that were all told to stop end by themselves in a fraction of that."""

REVOKE_S = 3.0
"""Leaving does not wait longer for etcd: the lease ends by itself."""


class Agent:
    """One life of one node's agent. `run` is all of it.

    Args:
        store: etcd; closed by the caller.
    """

    def __init__(self, config: AgentConfig, spec: JobSpec, token: str, store: CoordStore) -> None:
        self._config = config
        self._spec = spec
        self._store = store
        self._keys = Keys(spec.job.name)
        self._rng = random.Random(config.incarnation)
        me = decide.Identity(
            job=spec.job.name, run_id=config.run_id, uid=config.uid, incarnation=config.incarnation
        )
        self._board = Board(me=me, bell=self._bell)
        self._folder = SlotFolder(root=config.shm_dir, budget_bytes=spec.checkpoint.memory_budget)
        self._processes = Processes()
        self._forker = Forker(self._forker_config(), self._processes, self._helpers_changed)
        self._server = SnapshotServer(self._server_start(), self._processes, self._helpers_changed)
        self._flow = SnapshotFlow(self._server, self._folder, self._flow_hooks())
        self._stores = StoreHosts(self._store_places(), self._forker)
        self._slot_io = ThreadPoolExecutor(1, "slots")
        self._other_io = ThreadPoolExecutor(4, "io")
        self._desk = RankDesk(self._board, self._folder, self._flow, self._stores, self._slot_io)
        self._rank_server = RankServer(config.socket, token, self._board, self._desk)
        self._probes = ProbeServer(config.host, token, spec.job.name, self._fresh_status)
        self._registration = Registration(
            store,
            self._keys,
            uid=config.uid,
            ttl_s=spec.detect.lease_ttl_s,
            period_s=decide.heartbeat_period_s(config.heartbeat_s, spec.layout.nodes + spec.layout.standbys),
            info=self._info,
            status=self._fresh_status,
            rng=self._rng,
        )
        self._follower = Follower(self._follower_config(), self._follower_parts())
        self._addresses: dict[str, PeerAddress] = {}
        self._objects: asyncio.Task[ObjectStore] | None = None
        self._watches: dict[str, KeyWatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_commit: wire.Committed | None = None
        self._over: asyncio.Future[ExitCode] | None = None
        self._leaving = False
        self._leave_at: int | None = None
        """Leaving: the step in which the ranks were told so; nothing of theirs is lost once that, or a later one, is committed."""
        self._may_go = asyncio.Event()

    # ------------------------------------------------------------ life

    async def run(self) -> ExitCode:
        """Serve until the job ends or a signal comes; returns the exit code.

        Raises:
            AgentUsageError, NodeError, OSError: the agent cannot work here.
        """
        lock = lock_node(self._config)
        try:
            await self._start()
            assert self._over is not None
            return await self._over
        finally:
            await self._close()
            os.close(lock)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        history.open_history(self._config.histories / "agent.jsonl", f"agent-{self._config.uid}")
        linux.become_subreaper()
        self._processes.start()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._told_to_leave, sig)
        # Before anything is started: what a former life left may hold ports, memory and devices.
        me = self._board.me
        ended = await self._in_thread(partial(cleanup.end_predecessors, me.run_id, me.uid, me.incarnation))
        if ended:
            log.warning("ended %d processes of a former life of this node", ended)
        await self._adopt()
        await self._rank_server.start()
        await self._probes.start()
        self._spawn("zygote", self._forker.run())
        self._spawn("snapshot server", self._server.run())
        self._open_objects()
        await self._wait_for_server()
        self._spawn("heartbeat", self._registration.run())
        self._watch(self._keys.plan, self._plan_seen)
        self._watch(self._keys.outcome, self._outcome_seen)

    async def _wait_for_server(self) -> None:
        try:
            async with asyncio.timeout(SERVER_UP_S):
                await self._server.serving()
        except TimeoutError:
            raise NodeError(
                f"the snapshot server was not up within {SERVER_UP_S:g} s: see {self._config.logs}/snapshots.log"
            ) from None

    async def _adopt(self) -> None:
        """Take over what is whole of a former life's snapshots."""
        me = self._board.me
        whose = f"{me.job}/{me.run_id}/{me.uid}"
        adopted = await asyncio.get_running_loop().run_in_executor(self._slot_io, self._folder.adopt, whose)
        for image in adopted:
            if not image.replica:
                self._board.own[image.path] = image
        if adopted:
            log.info("adopted %d snapshots of a former life", len(adopted))

    async def _close(self) -> None:
        """End everything that was started, whatever came before. Snapshots stay, unless the job is over."""
        self._leaving = True
        for watch in self._watches.values():
            watch.stop()
        try:
            await self._follower.end_ranks()
        except NodeError as e:
            log.error("%s", e)
        await self._flow.finish(0)
        await self._probes.close()
        await self._rank_server.close()
        await self._desk.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._forker.end()
        await self._server.end()
        if self._board.state == "done":
            self._folder.clear()
        try:
            async with asyncio.timeout(REVOKE_S):
                await self._registration.close()
        except TimeoutError:
            log.info("the lease was not given back; it ends by itself")
        self._slot_io.shutdown(wait=False)
        self._other_io.shutdown(wait=False)
        self._processes.close()
        history.close_history()

    def _spawn(self, what: str, work: object) -> None:
        task = asyncio.ensure_future(work)  # pyright: ignore[reportArgumentType, reportCallIssue]  (coroutines of None)
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_done, what))

    def _task_done(self, what: str, task: asyncio.Task[None]) -> None:
        """A part that ends by itself with an error ends the agent: silence would be worse."""
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        log.error("the agent's part %r died", what, exc_info=task.exception())
        self._end(ExitCode.UNEXPECTED)

    def _end(self, code: ExitCode) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(code)

    # ------------------------------------------------------------ what is heard

    def _told_to_leave(self, sig: signal.Signals) -> None:
        """SIGTERM, Ctrl-C: in the grace what the ranks did is committed. A second signal ends them at once."""
        if self._leaving:
            self._end(ExitCode.INTERRUPTED)
            return
        self._leaving = True
        log.warning("%s: leaving; ranks have %g s", sig.name, self._spec.policy.grace_s)
        self._spawn("leaving", self._leave())

    async def _leave(self) -> None:
        """This node ends; what becomes of the job is the controller's to say, who reads it in the status."""
        grace_s = self._spec.policy.grace_s
        deadline = asyncio.get_running_loop().time() + grace_s
        await self._follower.stop()
        alive = [life for life in self._board.ranks.values() if life.alive]
        self._leave_at = max((life.step for life in alive), default=0)
        self._board.set_state("leaving")
        for life in alive:
            life.tell(wire.StopMsg(reason="shutdown", grace_s=grace_s))
        try:
            async with asyncio.timeout_at(deadline):
                await self._parted(alive)
        except TimeoutError:
            log.warning("the grace is over")
        if not any(life.alive for life in alive):
            await self._flow.finish(max(0.0, deadline - asyncio.get_running_loop().time()))
        for life in alive:
            life.ending = life.ending or life.alive
        self._board.set_state("stopping")
        self._end(ExitCode.INTERRUPTED)

    async def _parted(self, alive: list[RankLife]) -> None:
        """Until the ranks have ended by themselves, or can be ended without loss: they train on where others were not told to
        stop."""
        ends = asyncio.gather(*(life.process.wait() for life in alive if life.process is not None))
        safe = asyncio.create_task(self._may_go.wait())
        try:
            await asyncio.wait({ends, safe}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ends}, timeout=PART_S)
        finally:
            ends.cancel()
            safe.cancel()

    def _heard_of_commit(self, committed: wire.Committed) -> None:
        """Leaving, the agent waits for a commit of what its ranks did."""
        good = not committed.failure and committed.fenced_by is None
        of_ours = committed.generation == self._board.generation
        if self._leave_at is not None and good and of_ours and committed.step >= self._leave_at:
            self._may_go.set()

    def _plan_seen(self, value: KeyValue | None) -> None:
        pointer = _decoded(wire.PlanPointer, value)
        if pointer is None:
            return
        if not self._leaving:
            self._follower.pointer_seen(pointer)
        elif pointer.generation > self._board.generation:
            self._may_go.set()  # the job goes on without these ranks

    def _outcome_seen(self, value: KeyValue | None) -> None:
        outcome = _decoded(wire.Outcome, value)
        if outcome is None or outcome.run_id not in ("", self._config.run_id):
            return
        log.info("the job is over: %s at step %d: %s", outcome.state, outcome.step, outcome.reason)
        self._leaving = True
        self._board.set_state("done")
        self._end(_exit_code(outcome))

    def _store_node_seen(self, value: KeyValue | None) -> None:
        """The status of the node of rank 0: it tells the rendezvous, and later what was committed."""
        status, plan = _decoded(wire.NodeStatus, value), self._board.plan
        if status is None or plan is None:
            return
        self._follower.store_node_status(status)
        news = flow.commit_news(self._heard_commit, status, plan)
        if news is not None:
            self._heard_commit = news
            self._heard_of_commit(news)
            self._tell_ranks(flow.told_to_ranks(news))

    def _committed(self, committed: wire.Committed) -> None:
        """Our own committer's word."""
        if flow.newer(self._board.committed, committed):
            self._board.committed = committed
            self._board.changed(urgent=True)
        self._heard_of_commit(committed)
        if self._board.plan is not None and committed.generation == self._board.plan.generation:
            self._tell_ranks(flow.told_to_ranks(committed))

    def _helpers_changed(self) -> None:
        """The zygote or the snapshot server came or went."""
        self._board.replicas = self._server.replicas
        self._board.set_note("zygote", self._forker.note)
        if self._board.state == "warming" and self._forker.settled:
            self._board.set_state("parked")
            self._follower.prepare()
        self._board.changed()

    def _tell_rank(self, rank: int, message: msgspec.Struct) -> None:
        life = self._board.ranks.get(rank)
        if life is not None:
            life.tell(message)

    def _tell_ranks(self, message: msgspec.Struct) -> None:
        for life in self._board.ranks.values():
            life.tell(message)

    # ------------------------------------------------------------ what is told

    def _bell(self, urgent: bool) -> None:
        self._registration.changed(urgent=urgent)

    def _fresh_status(self) -> wire.NodeStatus:
        self._processes.collect()  # an exit that the kernel knows of must not be told a moment too late
        return self._board.status(asyncio.get_running_loop().time())

    def _info(self) -> wire.NodeInfo:
        return wire.NodeInfo(
            uid=self._config.uid,
            incarnation=self._config.incarnation,
            host=self._config.host,
            control_port=self._probes.port,
            flight_port=self._server.port,
            pid=os.getpid(),
            slots=self._spec.layout.ranks_per_node,
            code_version=__version__,
        )

    # ------------------------------------------------------------ the world around

    def _watch(self, key: str, deliver: Callable[[KeyValue | None], None]) -> None:
        self._watches[key] = KeyWatch(self._store, key, deliver, self._rng)
        self._watches[key].start()

    def _watch_store_node(self, uid: str | None) -> None:
        """Follow the status of rank 0's node, and no other's."""
        wanted = self._keys.status(uid) if uid is not None else None
        for key in [k for k in self._watches if k.startswith(self._keys.statuses) and k != wanted]:
            self._watches.pop(key).stop()
        self._heard_commit = None
        if wanted is not None and wanted not in self._watches:
            self._watch(wanted, self._store_node_seen)

    def _open_objects(self) -> asyncio.Task[ObjectStore]:
        if self._objects is None or (self._objects.done() and self._objects.exception() is not None):
            self._objects = asyncio.create_task(self._in_thread(partial(open_store, self._spec.job.root)))
            self._objects.add_done_callback(_heard)
        return self._objects

    async def _object_store(self) -> ObjectStore:
        return await asyncio.shield(self._open_objects())

    async def _in_thread(self, blocking: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._other_io, blocking)

    async def _address_of(self, uid: str, look_again: bool) -> PeerAddress | None:
        """Where a node's snapshot server listens; with etcd away, what was known last."""
        if look_again or uid not in self._addresses:
            try:
                value = await self._in_thread(partial(self._store.get, self._keys.node(uid)))
            except CoordError as e:
                log.warning("cannot look up node %s: %s", uid, e)
                return self._addresses.get(uid)
            info = _decoded(wire.NodeInfo, value)
            if info is not None and info.flight_port:
                self._addresses[uid] = PeerAddress(uid=uid, host=info.host, port=info.flight_port)
        return self._addresses.get(uid)

    # ------------------------------------------------------------ configurations of the parts

    def _places(self) -> dict[str, str]:
        """What every process of a generation is told of this node."""
        return {
            "SUREFOOT_AGENT_SOCKET": str(self._config.socket),
            "SUREFOOT_TOKEN_FILE": str(self._config.token_file),
            "SUREFOOT_JOB": str(self._config.job_file),
        }

    def _forker_config(self) -> ForkerConfig:
        modules = self._config.rank_modules
        return ForkerConfig(
            env=os.environ,
            log_path=self._config.logs / "zygote.log",
            modules=RANK_MODULES if modules is None else modules,
            preload=self._spec.program.preload,
            path=(str(self._config.job_file.parent),),
        )

    def _server_start(self) -> ServerStart:
        return ServerStart(
            env=os.environ,
            log_path=self._config.logs / "snapshots.log",
            root=self._spec.job.root,
            shm_dir=self._config.shm_dir,
            budget_bytes=self._spec.checkpoint.memory_budget,
            host=self._config.host,
            token_file=self._config.token_file,
            history_path=self._config.histories / "snapshots.jsonl",
            keep=self._spec.checkpoint.keep,
            keep_every_steps=self._spec.checkpoint.keep_every_steps,
        )

    def _flow_hooks(self) -> FlowHooks:
        return FlowHooks(
            tell_rank=self._tell_rank,
            address_of=self._address_of,
            committed=self._committed,
            note=self._board.set_note,
        )

    def _follower_config(self) -> FollowerConfig:
        return FollowerConfig(
            host=self._config.host,
            logs=self._config.logs,
            processes_file=self._config.state_dir / "processes.jsonl",
            cwd=os.getcwd(),
            places=self._places(),
            history_folder=self._config.histories,
            entry=self._config.rank_entry,
        )

    def _store_places(self) -> StorePlaces:
        return StorePlaces(
            host=self._config.host, logs=self._config.logs, env=self._places(), cwd=os.getcwd()
        )

    def _follower_parts(self) -> FollowerParts:
        return FollowerParts(
            board=self._board,
            plans=PlanReader(
                open_store=self._object_store, in_thread=self._in_thread, note=self._board.set_note
            ),
            ender=RankEnder(
                self._board,
                self._processes,
                forker=self._forker,
                server=self._server,
                stores=self._stores,
                folder=self._folder,
                logs=self._config.logs,
            ),
            forker=self._forker,
            server=self._server,
            flow=self._flow,
            folder=self._folder,
            rank_server=self._rank_server,
            stores=self._stores,
            address_of=self._address_of,
            watch_store_node=self._watch_store_node,
        )


def _decoded(kind: type[T], value: KeyValue | None) -> T | None:
    """The value of a key; None where there is none, or none that we understand."""
    if value is None:
        return None
    try:
        return wire.decode(kind, value.value)
    except msgspec.MsgspecError as e:
        log.error("%s holds no %s: %s", value.key, kind.__name__, e)
        return None


def _exit_code(outcome: wire.Outcome) -> ExitCode:
    """An agent ends as its job does: who starts it again asks the same of both."""
    try:
        return ExitCode(outcome.exit_code)
    except ValueError:
        return ExitCode.FAILED  # a later version's


def _heard(task: asyncio.Task[ObjectStore]) -> None:
    """Keep asyncio from complaining of an error that `_read_plan` will meet itself."""
    if not task.cancelled():
        task.exception()

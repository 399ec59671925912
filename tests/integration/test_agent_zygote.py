"""The zygote with real processes: what it forks, what it leaves behind, and what becomes of them when it dies."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from surefoot.agent import linux
from surefoot.agent.errors import LaunchError
from surefoot.agent.forker import RANK_MODULES, Forker, ForkerConfig
from surefoot.agent.messages import RankOrder, StoreUpMsg
from surefoot.agent.processes import Processes, WatchedProcess
from surefoot.agent.storehost import StoreHosts, StorePlaces
from surefoot.controller import wire

HERE = str(Path(__file__).parent)
pytestmark = pytest.mark.slow


@asynccontextmanager
async def forker_in(
    tmp_path: Path,
    *,
    modules: tuple[str, ...] = (),
    preload: tuple[str, ...] = ("rank_stand_ins",),
    path: str = HERE,
) -> AsyncIterator[tuple[Forker, Processes]]:
    """A forker whose children are ours, as in an agent."""
    linux.become_subreaper()
    processes = Processes()
    processes.start()
    config = ForkerConfig(
        env={**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path])},
        log_path=tmp_path / "zygote.log",
        modules=modules,
        preload=preload,
        path=(path,),
    )
    forker = Forker(config, processes, lambda: None)
    task = asyncio.create_task(forker.run())
    try:
        yield forker, processes
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await forker.end()
        processes.close()
        linux.become_subreaper(False)


def order(tmp_path: Path, entry: str, rank: int = 0, **env: str) -> RankOrder:
    return RankOrder(
        generation=1,
        rank=rank,
        entry=f"rank_stand_ins:{entry}",
        env={"RANK": str(rank), **env},
        log_path=str(tmp_path / f"{entry}-{rank}.log"),
        cwd=str(tmp_path),
        agent_pid=os.getpid(),
    )


def ignore(_: WatchedProcess) -> None:
    pass


def children(of: int | None = None) -> set[int]:
    pid = of or os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return {int(pid) for pid in f.read().split()}


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # pyright: ignore[reportArgumentType]  (the scenarios are coroutine functions)


def test_a_forked_rank_starts_clean_and_its_exit_reaches_the_agent(tmp_path: Path) -> None:
    async def scenario() -> None:
        exits: list[tuple[str, int | None]] = []
        async with forker_in(tmp_path) as (forker, _):
            orders = [order(tmp_path, "tell", rank) for rank in (0, 1)]
            processes = await forker.fork(orders, lambda p: exits.append((p.name, p.status)))
            for process in processes:
                assert os.waitstatus_to_exitcode(await process.wait()) == 7
        assert sorted(exits) == [("rank-0-g1", 7 << 8), ("rank-1-g1", 7 << 8)]
        told: list[dict[str, object]] = []
        for rank, process in enumerate(processes):
            facts, err = (tmp_path / f"tell-{rank}.log").read_text().splitlines()
            assert err == "to stderr"
            told.append(ast.literal_eval(facts))
            assert told[-1]["pid"] == told[-1]["sid"] == process.pid
            assert told[-1]["cwd"] == str(tmp_path)
            assert told[-1]["threads"] == 1
            assert told[-1]["blocked"] == []
            assert told[-1]["stdin"] == "/dev/null"
            # 3 is the listing's own descriptor: nothing of the zygote's is left open.
            assert told[-1]["fds"] == [0, 1, 2, 3]
        assert told[0]["random"] != told[1]["random"]

    run(scenario)


def test_200_forks_leave_no_zombie_and_no_descriptor(tmp_path: Path) -> None:
    async def scenario() -> None:
        others = children()  # servers of other tests
        async with forker_in(tmp_path) as (forker, processes):
            await forker.fork([order(tmp_path, "nothing")], ignore)
            assert forker.process is not None
            zygote = forker.process.pid

            def descriptors() -> tuple[int, int]:
                return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{zygote}/fd"))

            before = None
            for batch in range(50):
                orders = [order(tmp_path / str(batch), "nothing", rank) for rank in range(4)]
                (tmp_path / str(batch)).mkdir()
                for process in await forker.fork(orders, ignore):
                    assert await process.wait() == 0
                before = before or descriptors()
            assert descriptors() == before
            assert children() - others == {zygote} == processes.pids()
            assert children(of=zygote) == set()

    run(scenario)


def test_ranks_outlive_the_zygote_and_another_takes_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with forker_in(tmp_path) as (forker, _):
            (rank,) = await forker.fork([order(tmp_path, "say_and_sleep")], ignore)
            log = tmp_path / "say_and_sleep-0.log"
            await until(lambda: log.exists() and "asleep" in log.read_text(), "the rank runs")
            first = forker.process
            assert first is not None
            first.send(signal.SIGKILL)
            await first.wait()
            (after,) = await forker.fork([order(tmp_path, "nothing", 1)], ignore)
            assert await after.wait() == 0
            assert forker.process is not first
            assert rank.alive
            rank.kill_group()
            assert await rank.wait() == signal.SIGKILL

    run(scenario)


def test_a_request_that_the_zygote_takes_to_its_grave_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with forker_in(tmp_path) as (forker, _):
            await until(lambda: forker.settled, "the zygote is warm")
            assert forker.process is not None
            forker.process.send(signal.SIGSTOP)
            asking = asyncio.create_task(forker.fork([order(tmp_path, "nothing")], ignore))
            await asyncio.sleep(0)
            forker.process.send(signal.SIGKILL)
            with pytest.raises(LaunchError, match="died while it forked"):
                await asking

    run(scenario)


def test_how_ranks_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with forker_in(tmp_path) as (forker, _):
            raised, left = await forker.fork(
                [order(tmp_path, "raise_error"), order(tmp_path, "exit_with_words")], ignore
            )
            assert os.waitstatus_to_exitcode(await raised.wait()) == 1
            assert os.waitstatus_to_exitcode(await left.wait()) == 1
        assert "RuntimeError: the stand-in raises" in (tmp_path / "raise_error-0.log").read_text()
        assert (tmp_path / "exit_with_words-0.log").read_text() == "no such luck\n"

    run(scenario)


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "nothing-0.log").write_text("of a former rank")
        async with forker_in(tmp_path) as (forker, _):
            (process,) = await forker.fork([order(tmp_path, "nothing")], ignore)
            assert os.waitstatus_to_exitcode(await process.wait()) == 1
        assert (tmp_path / "nothing-0.log").read_text() == "of a former rank"

    run(scenario)


@pytest.mark.parametrize(
    ("source", "kind"),
    [(None, "ModuleNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("raise SystemExit(3)", "SystemExit")],
)
def test_a_module_that_cannot_be_preloaded_is_one_clear_error(
    tmp_path: Path, source: str | None, kind: str
) -> None:
    async def scenario() -> None:
        if source is not None:
            (tmp_path / "broken_module.py").write_text(source)
        async with forker_in(tmp_path, preload=("broken_module",), path=str(tmp_path)) as (forker, _):
            with pytest.raises(LaunchError, match="'broken_module', which cannot be imported") as caught:
                await forker.fork([order(tmp_path, "nothing")], ignore)
            assert caught.value.error is not None
            assert (caught.value.error.kind, caught.value.error.type) == ("startup", kind)
            assert "broken_module" in forker.note

    run(scenario)


def test_a_zygote_with_threads_does_not_fork_and_ranks_start_by_exec(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "threaded_module.py").write_text(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        )
        async with forker_in(tmp_path, preload=("threaded_module",), path=str(tmp_path)) as (forker, _):
            (process,) = await forker.fork([order(tmp_path, "tell")], ignore)
            assert os.waitstatus_to_exitcode(await process.wait()) == 7
            assert forker.warm is not None
            assert forker.warm.threads == 2
        facts = ast.literal_eval((tmp_path / "tell-0.log").read_text().splitlines()[0])
        assert facts["threads"] == 1

    run(scenario)


def test_a_forked_store_serves_a_gloo_job_of_two_forked_ranks(tmp_path: Path) -> None:
    async def scenario() -> None:
        socket_path = tmp_path / "agent.sock"
        (tmp_path / "token").write_text("secret")
        stores: list[StoreHosts] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            message = wire.decode(StoreUpMsg, await reader.readline())
            assert message.token == "secret"
            stores[0].store_up(message)
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(serve, socket_path)
        env_of_store = {
            "SUREFOOT_AGENT_SOCKET": str(socket_path),
            "SUREFOOT_TOKEN_FILE": str(tmp_path / "token"),
        }
        async with forker_in(tmp_path, modules=RANK_MODULES) as (forker, processes):
            places = StorePlaces(host="127.0.0.1", logs=tmp_path, env=env_of_store, cwd=str(tmp_path))
            stores.append(StoreHosts(places, forker))
            await stores[0].keep_spare()
            (spare,) = processes.pids(name="store")
            port = await stores[0].host(1)
            assert processes.pids(name="store") == {spare}, "the spare was taken"
            await stores[0].keep_spare()
            assert len(processes.pids(name="store")) == 2
            env = {
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "1",
                "RESULT": str(tmp_path / "sum-"),
            }
            ranks = await forker.fork([order(tmp_path, "gloo_job", r, **env) for r in (0, 1)], ignore)
            assert [await r.wait() for r in ranks] == [0, 0], (tmp_path / "gloo_job-0.log").read_text()
            assert [(tmp_path / f"sum-{r}").read_text() for r in (0, 1)] == ["3.0", "3.0"]
            assert len(processes.pids(name="store")) == 2
            ended = stores[0].end_others(2)
            assert [p.pid for p in ended] == [spare]
            server.close()
            for process in [*ended, *stores[0].end_all()]:
                await process.wait()
            assert processes.pids(name="store") == set()

    run(scenario)

"""Two snapshot servers, real processes: copies, fetches, uploads and commits of real images, and what must be refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from stand_in_images import slot_nbytes, write_image

from surefoot.agent import slots
from surefoot.agent.errors import ChannelClosedError, TransferError
from surefoot.agent.messages import (
    CommitAnswer,
    CommitMsg,
    FailedAnswer,
    FetchMsg,
    FinishedAnswer,
    GenerationMsg,
    GiveUpMsg,
    Image,
    PeerAddress,
    ReplicateMsg,
    UploadMsg,
)
from surefoot.agent.processes import Processes
from surefoot.agent.server import ServerStart, SnapshotServer
from surefoot.agent.slots import SlotFolder
from surefoot.ckpt import record
from surefoot.ckpt.store import open_store
from surefoot.controller import wire

pytestmark = pytest.mark.slow

ROW = 6 << 20
"""More than one Flight chunk."""


class Side:
    """One node's slots and snapshot server."""

    def __init__(self, uid: str, folder: SlotFolder, server: SnapshotServer) -> None:
        self.uid, self.folder, self.server = uid, folder, server

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(uid=self.uid, host="127.0.0.1", port=self.server.port)

    def seal(self, rank: int, step: int, slot: int = 0, generation: int = 1, row_nbytes: int = ROW) -> Image:
        path = self.folder.path("own", rank, slot)
        self.folder.reserve(path, slot_nbytes(row_nbytes))
        with slots.mapped(path, write=True) as view:
            write_image(
                view, rank=rank, world_size=2, generation=generation, step=step, row_nbytes=row_nbytes
            )
        return Image(rank=rank, generation=generation, step=step, path=str(path))

    async def replicate(self, image: Image, peer: Side, pin: Path | None = None) -> None:
        pin_path = str(pin) if pin is not None else None
        await self.server.move(
            lambda n: ReplicateMsg(serial=n, image=image, peer=peer.address, pin_path=pin_path, deadline_s=10)
        )

    async def fetch(self, image: Image, peer: PeerAddress, in_force: int = 0) -> None:
        await self.server.move(
            lambda n: FetchMsg(serial=n, image=image, peer=peer, in_force=in_force, deadline_s=10)
        )

    async def begin(
        self, generation: int, start: tuple[int, int] = (0, 0), drop: tuple[int, ...] = ()
    ) -> None:
        self.server.set_generation(
            GenerationMsg(
                generation=generation, start_generation=start[0], start_step=start[1], drop_replicas=drop
            )
        )
        nothing = Image(rank=0, generation=0, step=0, path="")
        # An empty job behind it: when that is answered, the generation is in force.
        await self.server.move(lambda n: ReplicateMsg(serial=n, image=nothing, deadline_s=10))

    def replicas(self) -> list[tuple[int, int, int]]:
        return sorted((h.rank, *h.point) for h in self.server.replicas)


@asynccontextmanager
async def nodes(
    tmp_path: Path,
    *,
    tokens: tuple[str, ...] = ("secret", "secret"),
    budget_bytes: int | None = None,
    keep: int | None = None,
) -> AsyncIterator[list[Side]]:
    processes = Processes()
    processes.start()
    sides: list[Side] = []
    async with AsyncExitStack() as stack:
        stack.callback(processes.close)
        for n, token in enumerate(tokens):
            base = tmp_path / f"n{n}"
            base.mkdir()
            (base / "token").write_text(token)
            start = ServerStart(
                env=os.environ,
                log_path=base / "log",
                root=str(tmp_path / "objects"),
                shm_dir=base / "shm",
                budget_bytes=budget_bytes,
                host="127.0.0.1",
                token_file=base / "token",
                history_path=base / "history.jsonl",
                keep=keep,
            )
            server = SnapshotServer(start, processes, lambda: None)
            task = asyncio.create_task(server.run())
            stack.push_async_callback(_end, server, task)
            await asyncio.wait_for(server.serving(), 30)
            sides.append(Side(f"n{n}", SlotFolder(root=base / "shm", budget_bytes=budget_bytes), server))
        yield sides


async def _end(server: SnapshotServer, task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.end()


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # pyright: ignore[reportArgumentType]


def test_a_copy_goes_to_the_peer_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            image = a.seal(rank=0, step=5)
            await a.replicate(image, b, pin=a.folder.upload_path(0, 0))
            await until(lambda: b.replicas() == [(0, 1, 5)], "the peer tells its agent")
            # What a crash would lose on one node comes back from the other, into a slot that does not exist yet.
            back = Image(rank=0, generation=1, step=5, path=str(a.folder.path("own", 0, 7)))
            await a.fetch(back, b.address)
            with slots.mapped(Path(image.path)) as x, slots.mapped(Path(back.path)) as y:
                assert x[: len(y)] == y
            with slots.mapped(a.folder.upload_path(0, 0)) as pinned, slots.mapped(Path(back.path)) as y:
                assert pinned == y
            # A node also serves what is its own.
            own = Image(rank=0, generation=1, step=5, path=str(b.folder.path("own", 0, 0)))
            await b.fetch(own, a.address)

    run(scenario)


def test_a_fetch_for_a_generation_that_is_over_writes_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            await a.replicate(a.seal(rank=0, step=5), b)
            await a.begin(3)
            slot = a.seal(rank=0, step=9, slot=2, generation=3)
            wanted = Image(rank=0, generation=1, step=5, path=str(a.folder.path("own", 0, 1)))
            with pytest.raises(TransferError, match="not wanted any more"):
                await a.fetch(wanted, b.address, in_force=2)
            await a.fetch(wanted, b.address, in_force=3)
            assert slots.read_info(Path(slot.path)) is not None

    run(scenario)


def test_replicas_rotate_and_the_starting_point_stays_until_it_is_superseded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for step in (9, 10, 11):
                await a.replicate(a.seal(0, step, slot=step % 3, row_nbytes=1000), b)
            for side in (a, b):
                await side.begin(2, start=(1, 10))
            seen: list[list[tuple[int, int, int]]] = []
            for step in (11, 12, 13, 14):
                await a.replicate(a.seal(0, step, slot=step % 3, generation=2, row_nbytes=1000), b)
                await until(lambda step=step: (0, 2, step) in b.replicas(), "the copy is there")
                seen.append(b.replicas())
            assert seen == [
                [(0, 1, 10), (0, 1, 11), (0, 2, 11)],
                [(0, 1, 10), (0, 2, 11), (0, 2, 12)],
                [(0, 2, 11), (0, 2, 12), (0, 2, 13)],
                [(0, 2, 12), (0, 2, 13), (0, 2, 14)],
            ]
            await b.begin(3, start=(2, 14))
            late = a.seal(0, 15, generation=2, row_nbytes=1000)
            with pytest.raises(TransferError, match="and 3 is in force") as caught:
                await a.replicate(late, b)  # the sender still follows generation 2
            assert caught.value.kind == "refused"
            await b.begin(3, start=(2, 14), drop=(0,))
            await until(lambda: b.replicas() == [], "dropped")
            assert b.folder.ranks("replica") == []

    run(scenario)


def test_a_new_peer_gets_the_starting_point_unless_it_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for side in (a, b):
                await side.begin(2, start=(1, 10))
            start = a.seal(0, 10)
            await a.replicate(start, b)
            assert b.replicas() == [(0, 1, 10)]
            await a.replicate(start, b)
        history = [json.loads(line) for line in (tmp_path / "n0" / "history.jsonl").read_text().splitlines()]
        sent = [e["nbytes"] for e in history if e["kind"] == "ok" and e["op"] == "replicate"]
        assert sent[0] > ROW
        assert sent[1] == 0

    run(scenario)


def test_sending_the_same_snapshot_again_leaves_it_in_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            image = a.seal(0, 5)
            await a.replicate(image, b)
            await until(lambda: b.replicas() == [(0, 1, 5)], "there")
            before = os.stat(b.server.replicas[0].path).st_mtime_ns
            await a.replicate(image, b)
            assert b.replicas() == [(0, 1, 5)]
            assert os.stat(b.server.replicas[0].path).st_mtime_ns == before

    run(scenario)


def test_a_damaged_snapshot_is_refused_on_arrival_and_the_others_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            for step in (4, 5):
                await a.replicate(a.seal(0, step, slot=step % 3), b)
            damaged = a.seal(0, 6)
            with slots.mapped(Path(damaged.path), write=True) as view:
                view[ROW // 2] ^= 1
            with pytest.raises(TransferError, match="did not arrive whole") as caught:
                await a.replicate(damaged, b)
            assert caught.value.kind == "snapshot_corrupt"
            assert b.replicas() == [(0, 1, 4), (0, 1, 5)]
            with pytest.raises(TransferError) as caught:
                await b.fetch(
                    Image(rank=0, generation=1, step=6, path=str(b.folder.path("own", 0, 0))), a.address
                )
            assert caught.value.kind == "snapshot_corrupt"
            assert list(b.folder.images("own", 0)) == []

    run(scenario)


def test_another_jobs_token_is_refused_on_every_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, tokens=("secret", "other")) as (a, b):
            image = a.seal(0, 5)
            with pytest.raises(TransferError, match="refuses our token") as caught:
                await a.replicate(image, b)
            assert caught.value.kind == "refused"
            with pytest.raises(TransferError, match="refuses our token"):
                await b.fetch(image, a.address)
            assert b.replicas() == []

    run(scenario)


def test_missing_and_unreachable_are_told_apart_and_told_soon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            wanted = Image(rank=3, generation=1, step=5, path=str(a.folder.path("own", 3, 0)))
            with pytest.raises(TransferError, match="is not here") as caught:
                await a.fetch(wanted, b.address)
            assert caught.value.kind == "snapshot_missing"
            address = b.address
            assert b.server.process is not None
            b.server.process.send(signal.SIGSTOP)
            b.server.process.send(signal.SIGKILL)
            await b.server.process.wait()
            began = time.monotonic()
            with pytest.raises(TransferError) as caught:
                await a.fetch(wanted, address)
            assert caught.value.kind == "peer_unreachable"
            assert time.monotonic() - began < 5

    run(scenario)


def test_a_server_that_dies_is_replaced_and_knows_its_replicas(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path) as (a, b):
            await a.replicate(a.seal(0, 5), b)
            first = b.server.process
            assert first is not None
            first.send(signal.SIGSTOP)
            asking = asyncio.create_task(
                b.fetch(Image(rank=0, generation=1, step=5, path=str(b.folder.path("own", 0, 0))), a.address)
            )
            await asyncio.sleep(0)
            first.send(signal.SIGKILL)
            with pytest.raises(ChannelClosedError):
                await asking
            await first.wait()
            await until(lambda: b.server.process is not first and b.server.port != 0, "another serves")
            assert b.replicas() == [(0, 1, 5)]
            await a.fetch(
                Image(rank=0, generation=1, step=5, path=str(a.folder.path("own", 0, 1))), b.address
            )

    run(scenario)


def test_no_more_memory_than_the_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, budget_bytes=3 * slot_nbytes(ROW)) as (a, b):
            for rank in range(3):
                image = a.seal(rank, 5)
                await a.replicate(image, b)
            with pytest.raises(TransferError, match="memory_budget allows") as caught:
                await a.replicate(image, b, pin=a.folder.upload_path(2, 0))
            assert caught.value.kind == "memory"

    run(scenario)


# ---------------------------------------------------------------- upload and commit


def open_generation(root: Path, generation: int) -> None:
    found = record.Record(
        generation=generation, start=record.StartRef(), reason="test", created_by="test", plan=None
    )
    record.create_record(open_store(str(root)), found)


async def upload(side: Side, images: list[Image], writer: int, attempt: str = "a1") -> object:
    pins: list[str] = []
    for image in images:
        pin = side.folder.upload_path(image.rank, 0)
        await side.server.move(
            lambda n, image=image, pin=pin: ReplicateMsg(
                serial=n, image=image, pin_path=str(pin), deadline_s=10
            )
        )
        pins.append(str(pin))
        # From here on the slot is the rank's again.
        slots.unseal(Path(image.path))
    return await side.server.ask(
        lambda n: UploadMsg(
            serial=n,
            generation=1,
            step=images[0].step,
            attempt=attempt,
            writer=writer,
            paths=tuple(pins),
            deadline_s=20,
        )
    )


async def commit(side: Side, step: int, attempt: str = "a1") -> CommitAnswer:
    answer = await side.server.ask(
        lambda n: CommitMsg(serial=n, generation=1, step=step, attempt=attempt, writers=2, deadline_s=20)
    )
    assert isinstance(answer, CommitAnswer)
    return answer


def test_two_nodes_upload_and_the_committer_commits_and_is_fenced_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        open_generation(tmp_path / "objects", 1)
        async with nodes(tmp_path) as (a, b):
            uploads = asyncio.gather(upload(a, [a.seal(0, 20)], 0), upload(b, [b.seal(1, 20)], 1))
            answer = await commit(a, 20)
            assert (answer.fenced_by, answer.failure) == (None, "")
            assert all(isinstance(u, FinishedAnswer) for u in await uploads)
            open_generation(tmp_path / "objects", 2)
            await asyncio.gather(upload(a, [a.seal(0, 40)], 0), upload(b, [b.seal(1, 40)], 1))
            assert (await commit(a, 40)).fenced_by == 2
        store = open_store(str(tmp_path / "objects"))
        assert [m.step for m in record.list_manifests(store)] == [20, 40]

    run(scenario)


def test_after_a_commit_old_checkpoints_go_unless_a_higher_record_exists(tmp_path: Path) -> None:
    """A generation that was replaced must not delete what its successor may start from."""
    store = open_store(str(tmp_path / "objects"))

    def steps() -> list[int]:
        return [m.step for m in record.list_manifests(store)]

    async def scenario() -> None:
        open_generation(tmp_path / "objects", 1)
        async with nodes(tmp_path, keep=2) as (a, b):
            for step in (20, 40, 60):
                await asyncio.gather(upload(a, [a.seal(0, step)], 0), upload(b, [b.seal(1, step)], 1))
                assert (await commit(a, step)).failure == ""
            await until(lambda: steps() == [40, 60], "step 20 is deleted")
            open_generation(tmp_path / "objects", 2)
            for step in (80, 100):
                await asyncio.gather(upload(a, [a.seal(0, step)], 0), upload(b, [b.seal(1, step)], 1))
                assert (await commit(a, step)).fenced_by == 2
            # The committer works one thing after the other, so whatever the first of the two could delete is gone by now.
            assert steps() == [40, 60, 80, 100]

    run(scenario)


def test_an_upload_that_fails_is_known_to_the_committer_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        open_generation(tmp_path / "objects", 1)
        async with nodes(tmp_path) as (a, b):
            assert isinstance(await upload(a, [a.seal(0, 20)], 0), FinishedAnswer)
            damaged = b.seal(1, 20)
            with slots.mapped(Path(damaged.path), write=True) as view:
                view[ROW // 2] ^= 1
            failed = await upload(b, [damaged], 1)
            assert isinstance(failed, FailedAnswer)
            began = time.monotonic()
            answer = await commit(a, 20)
            assert "writer 1 failed" in answer.failure
            # Another attempt, given up by a node that is too busy.
            assert isinstance(await upload(a, [a.seal(0, 20)], 0, attempt="a2"), FinishedAnswer)
            await b.server.ask(
                lambda n: GiveUpMsg(
                    serial=n, generation=1, step=20, attempt="a2", writer=1, reason="busy", deadline_s=5
                )
            )
            assert "busy" in (await commit(a, 20, attempt="a2")).failure
            assert time.monotonic() - began < 10

    run(scenario)


def test_wire_kinds_fit() -> None:
    """Every way a transfer fails has a word in a start failure."""
    from surefoot.agent.plans import start_failure_of

    for kind in ("snapshot_missing", "snapshot_corrupt", "peer_unreachable", "memory", "refused"):
        assert isinstance(start_failure_of(1, TransferError(kind, "x")), wire.StartFailure)

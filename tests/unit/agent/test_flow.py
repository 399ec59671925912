"""A snapshot's way, against a snapshot server that does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from surefoot.agent.decide import Launch
from surefoot.agent.errors import ChannelClosedError
from surefoot.agent.flow import FlowHooks, SnapshotFlow, commit_news, newer, told_to_ranks
from surefoot.agent.messages import (
    CommitAnswer,
    CommitMsg,
    FailedAnswer,
    FinishedAnswer,
    GiveUpMsg,
    Image,
    PeerAddress,
    ReplicateMsg,
    UploadMsg,
)
from surefoot.agent.server import Answer, Job
from surefoot.agent.slots import SlotFolder
from surefoot.controller import wire

PEER = PeerAddress(uid="n1", host="h", port=1)


class ScriptedServer:
    """Answers jobs as told: a list of answers per kind of job (the last one goes on for ever); a future is waited for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.script: dict[type, list[object]] = {}

    def on(self, kind: type, *answers: object) -> None:
        self.script[kind] = list(answers)

    async def ask(self, make: Callable[[int], Job]) -> Answer:
        job = make(len(self.jobs) + 1)
        self.jobs.append(job)
        default = (
            CommitAnswer(serial=0) if isinstance(job, CommitMsg) else FinishedAnswer(serial=0, seconds=0)
        )
        answers = self.script.get(type(job), [default])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer  # pyright: ignore[reportReturnType]

    def of(self, kind: type) -> list[Job]:
        return [j for j in self.jobs if type(j) is kind]


class Node:
    """The flow of one node with two ranks, and everything it said."""

    def __init__(self, *, index: int = 0, peer: str | None = "n1") -> None:
        self.server = ScriptedServer()
        self.told: list[tuple[int, object]] = []
        self.committed: list[wire.Committed] = []
        self.notes: dict[str, str] = {}
        self.addresses: list[PeerAddress | None] = [PEER]
        hooks = FlowHooks(
            tell_rank=lambda rank, message: self.told.append((rank, message)),
            address_of=self._address_of,
            committed=self.committed.append,
            note=self._note,
        )
        folder = SlotFolder(root=Path("/nowhere"))
        self.flow = SnapshotFlow(self.server, folder, hooks)  # pyright: ignore[reportArgumentType]
        self.begin(1, index=index, peer=peer)

    def begin(self, generation: int, *, index: int = 0, peer: str | None = "n1") -> None:
        members = tuple(
            wire.Member(uid=f"n{i}", incarnation="x", index=i, first_rank=2 * i, ranks=2) for i in range(2)
        )
        plan = wire.Plan(
            job="j",
            run_id="r",
            generation=generation,
            members=members,
            world_size=4,
            mesh={"dp": 4},
            start=wire.StartingPoint(),
            reason=wire.Reason(kind="first_start"),
            spec_hash="",
            code_version="",
            controller="a",
        )
        launch = Launch(
            member=members[index],
            dump_stacks=False,
            restore={},
            fetches=(),
            hosts_store=True,
            store_node=members[0],
            peer_uid=peer,
        )
        self.flow.begin(plan, launch)

    async def _address_of(self, uid: str, again: bool) -> PeerAddress | None:
        return self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]

    def _note(self, topic: str, text: str) -> None:
        if text:
            self.notes[topic] = text
        else:
            self.notes.pop(topic, None)

    def sealed(self, rank: int, step: int, attempt: str | None = None, generation: int = 1) -> None:
        image = Image(rank=rank, generation=generation, step=step, path=f"slot-{rank}-{step}")
        self.flow.sealed(image, attempt)

    def replicated(self) -> list[tuple[int, int]]:
        return [(r, m.step) for r, m in self.told if isinstance(m, wire.ReplicatedMsg)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # pyright: ignore[reportArgumentType]


def failed(kind: str, *, pinned: bool = False) -> FailedAnswer:
    return FailedAnswer(serial=0, kind=kind, detail=f"it is {kind}", pinned=pinned)  # pyright: ignore[reportArgumentType]


def test_a_rank_hears_of_its_copy_and_without_a_peer_at_once() -> None:
    async def scenario() -> None:
        node, alone = Node(), Node(peer=None)
        for n in (node, alone):
            n.sealed(0, 1)
            await settle()
            assert n.replicated() == [(0, 1)]
        assert len(node.server.jobs) == 1
        assert alone.server.jobs == []

    run(scenario)


def test_a_copy_that_fails_is_tried_again_at_the_peers_new_address_and_told_meanwhile() -> None:
    async def scenario() -> None:
        node = Node()
        moved = PeerAddress(uid="n1", host="h", port=2)
        node.addresses = [PEER, None, moved]
        node.server.on(ReplicateMsg, failed("peer_unreachable"), FinishedAnswer(serial=0, seconds=0))
        node.sealed(0, 1)
        await settle()
        assert (
            "rank 0's snapshot of step 1 is not safe yet (1 tries): it is peer_unreachable"
            in node.notes["replication"]
        )
        assert node.replicated() == []
        end = asyncio.get_running_loop().time() + 10
        while node.replicated() != [(0, 1)]:
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)
        assert node.notes == {}
        assert [j.peer for j in node.server.of(ReplicateMsg)] == [PEER, moved]  # pyright: ignore[reportAttributeAccessIssue]

    run(scenario)


def test_a_server_that_dies_has_the_job_done_again() -> None:
    async def scenario() -> None:
        node = Node()
        node.server.on(ReplicateMsg, ChannelClosedError("died"), FinishedAnswer(serial=0, seconds=0))
        node.sealed(0, 1)
        await settle()
        assert node.replicated() == [(0, 1)]

    run(scenario)


def test_a_slot_that_was_overwritten_is_nobodys_copy_any_more() -> None:
    async def scenario() -> None:
        node = Node()
        node.server.on(ReplicateMsg, failed("snapshot_missing"))
        node.sealed(0, 1)
        await settle()
        assert node.replicated() == []
        assert len(node.server.jobs) == 1

    run(scenario)


def test_an_upload_begins_with_the_last_pin_and_the_committer_commits() -> None:
    async def scenario() -> None:
        node = Node()
        node.sealed(0, 20, "a")
        await settle()
        assert node.server.of(UploadMsg) == []
        node.sealed(1, 20, "a")
        await settle()
        pins = [j.pin_path for j in node.server.of(ReplicateMsg)]  # pyright: ignore[reportAttributeAccessIssue]
        (upload,) = node.server.of(UploadMsg)
        assert isinstance(upload, UploadMsg)
        assert (upload.writer, list(upload.paths)) == (0, pins)
        (commit,) = node.server.of(CommitMsg)
        assert isinstance(commit, CommitMsg)
        assert (commit.attempt, commit.writers) == ("a", 2)
        assert node.committed == [wire.Committed(generation=1, step=20, attempt="a")]

    run(scenario)


def test_other_nodes_upload_and_leave_the_commit_to_the_committer() -> None:
    async def scenario() -> None:
        node = Node(index=1)
        for rank in (2, 3):
            node.sealed(rank, 20, "a")
        await settle()
        (upload,) = node.server.of(UploadMsg)
        assert isinstance(upload, UploadMsg)
        assert upload.writer == 1
        assert node.server.of(CommitMsg) == []
        assert node.committed == []

    run(scenario)


def test_no_third_attempt_is_pinned_while_two_are_under_way_and_training_goes_on() -> None:
    async def scenario() -> None:
        node = Node()
        slow: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        node.server.on(UploadMsg, slow)
        for step, attempt in ((20, "a"), (40, "b"), (60, "c")):
            for rank in (0, 1):
                node.sealed(rank, step, attempt)
            await settle()
        assert node.replicated() == [(r, s) for s in (20, 40, 60) for r in (0, 1)]
        pins = {j.pin_path for j in node.server.of(ReplicateMsg)}  # pyright: ignore[reportAttributeAccessIssue]
        assert len(pins) == 5  # two ranks, two attempts, and the third without a pin
        (given_up,) = node.server.of(GiveUpMsg)
        assert isinstance(given_up, GiveUpMsg)
        assert given_up.attempt == "c"
        assert node.committed[0].failure == "uploads before it are still under way on this node"
        slow.set_result(FinishedAnswer(serial=0, seconds=0))
        await settle()
        for rank in (0, 1):
            node.sealed(rank, 80, "d")
        await settle()
        assert [c.step for c in node.committed] == [60, 20, 40, 80]

    run(scenario)


def test_a_pin_that_has_no_room_costs_the_attempt_and_not_the_copy() -> None:
    async def scenario() -> None:
        node = Node()
        node.server.on(ReplicateMsg, failed("memory"), FinishedAnswer(serial=0, seconds=0))
        node.sealed(0, 20, "a")
        await settle()
        assert node.replicated() == [(0, 20)]
        assert len(node.server.of(GiveUpMsg)) == 1
        assert "could not be put aside" in node.committed[0].failure
        node.sealed(1, 20, "a")
        await settle()
        assert node.replicated() == [(0, 20), (1, 20)]
        assert node.server.of(UploadMsg) == []

    run(scenario)


def test_a_failed_upload_is_the_committers_failure_and_a_dead_server_leaves_word() -> None:
    async def scenario() -> None:
        node = Node()
        node.server.on(UploadMsg, failed("object_store"), ChannelClosedError("died"))
        for step, attempt in ((20, "a"), (40, "b")):
            for rank in (0, 1):
                node.sealed(rank, step, attempt)
            await settle()
        assert [(c.step, c.failure) for c in node.committed] == [(20, "it is object_store"), (40, "died")]
        assert [j.attempt for j in node.server.of(GiveUpMsg)] == ["b"]  # pyright: ignore[reportAttributeAccessIssue]
        assert node.server.of(CommitMsg) == []

    run(scenario)


def test_a_commit_is_asked_again_after_the_server_died_and_a_fenced_one_says_so() -> None:
    async def scenario() -> None:
        node = Node()
        fenced = CommitAnswer(serial=0, fenced_by=2, failure="fenced by generation 2")
        node.server.on(CommitMsg, ChannelClosedError("died"), fenced)
        for rank in (0, 1):
            node.sealed(rank, 20, "a")
        await settle()
        assert len(node.server.of(CommitMsg)) == 2
        (committed,) = node.committed
        assert committed.fenced_by == 2
        assert told_to_ranks(committed).failure == "fenced by generation 2"

    run(scenario)


def test_a_new_generation_drops_what_is_half_pinned_and_lets_uploads_finish() -> None:
    async def scenario() -> None:
        node = Node()
        slow: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        node.server.on(UploadMsg, slow)
        for rank in (0, 1):
            node.sealed(rank, 20, "a")
        await settle()
        node.sealed(0, 40, "b")
        await settle()
        node.begin(2)
        await settle()
        assert [j.attempt for j in node.server.of(GiveUpMsg)] == ["b"]  # pyright: ignore[reportAttributeAccessIssue]
        node.sealed(0, 41, generation=1)  # a late word of the old generation moves nothing
        slow.set_result(FinishedAnswer(serial=0, seconds=0))
        await settle()
        assert (1, 20) in [(c.generation, c.step) for c in node.committed if not c.failure]
        assert (0, 41) not in node.replicated()
        await node.flow.finish(0)

    run(scenario)


def test_news_of_commits() -> None:
    older = wire.Committed(generation=1, step=20)
    later = wire.Committed(generation=1, step=40)
    assert newer(None, older)
    assert newer(older, later)
    assert not newer(later, older)
    plan = wire.Plan(
        job="j",
        run_id="r",
        generation=1,
        members=(),
        world_size=1,
        mesh={},
        start=wire.StartingPoint(),
        reason=wire.Reason(kind="first_start"),
        spec_hash="",
        code_version="",
        controller="a",
    )

    def status(committed: wire.Committed | None) -> wire.NodeStatus:
        return wire.NodeStatus(uid="n0", incarnation="x", seq=1, state="running", committed=committed)

    assert commit_news(None, status(later), plan) == later
    assert commit_news(later, status(later), plan) is None
    assert commit_news(None, status(None), plan) is None
    assert commit_news(None, status(wire.Committed(generation=2, step=50)), plan) is None
    failed = wire.Committed(generation=1, step=60, attempt="a", failure="the store is away")
    again = wire.Committed(generation=1, step=60, attempt="b", failure="the store is away")
    assert commit_news(failed, status(again), plan) == again, "every attempt's end is news, in whatever words"

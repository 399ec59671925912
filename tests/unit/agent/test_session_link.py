"""The rank's end of the socket, against a socket pair and a listening socket of the test's own."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.agent.failures import AgentTimeoutError, StartupError
from surefoot.agent.link import AgentLink, AgentNews
from surefoot.controller.wire import (
    CommittedMsg,
    HelloMsg,
    PhaseMsg,
    Plan,
    PoolReadyMsg,
    RankToAgent,
    Reason,
    ReplicatedMsg,
    StartingPoint,
    StartMsg,
    StopMsg,
    decode,
    encode,
)

PLAN = Plan(
    job="j",
    run_id="r",
    generation=3,
    members=(),
    world_size=1,
    mesh={"dp": 1},
    start=StartingPoint(),
    reason=Reason(kind="first_start"),
    spec_hash="",
    code_version="",
    controller="a",
)
HELLO = HelloMsg(token="t", generation=3, rank=0, pid=1)


class Agent:
    """The other end: accepts one rank and answers its hello with `answer`."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path = path
        self.answer = answer
        self.lost: list[str] = []
        self.lost_event = threading.Event()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.connection: socket.socket | None = None
        self.hello = b""
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def _accept(self) -> None:
        self.connection, _ = self.listener.accept()
        self.hello = self.connection.recv(4096)
        self.connection.sendall(self.answer)

    def connect(self, deadline_s: float = 5.0) -> AgentLink:
        return AgentLink.connect(self.path, HELLO, deadline_s=deadline_s, on_lost=self._on_lost)

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.lost_event.set()

    def say(self, *messages: object) -> None:
        self.thread.join()
        assert self.connection is not None
        self.connection.sendall(b"".join(encode(m) + b"\n" for m in messages))  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        self.thread.join()
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


START = encode(StartMsg(plan=PLAN, restore_path="/s")) + b"\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "a.sock", START + encode(ReplicatedMsg(step=1)) + b"\n")
    yield agent
    agent.close()


@pytest.fixture
def link(agent: Agent) -> Iterator[AgentLink]:
    link = agent.connect()
    link.start()
    yield link
    link.close()


def test_hello_is_answered_with_the_plan(agent: Agent, link: AgentLink) -> None:
    assert link.start_msg == StartMsg(plan=PLAN, restore_path="/s")
    assert decode(HelloMsg, agent.hello) == HELLO


def test_what_came_with_the_start_is_not_lost(link: AgentLink) -> None:
    assert link.wait(lambda n: n.replicated if n.replicated >= 1 else None, deadline_s=5, what="") == 1


def test_messages_wake_who_waits_and_are_taken_once(agent: Agent, link: AgentLink) -> None:
    agent.say(ReplicatedMsg(step=4), CommittedMsg(generation=3, step=4))
    answer = link.wait(lambda n: n.answers.pop(4, None), deadline_s=5, what="the commit")
    assert answer == CommittedMsg(generation=3, step=4)
    assert link.peek(lambda n: (n.replicated, n.committed, n.answers)) == (4, 4, {})


def test_rank_to_agent(agent: Agent, link: AgentLink) -> None:
    link.send(PhaseMsg(phase="step", step=2))
    assert agent.connection is not None
    assert decode(RankToAgent, agent.connection.recv(4096)) == PhaseMsg(phase="step", step=2)  # pyright: ignore[reportArgumentType]


def test_waiting_has_a_deadline_and_says_for_what(link: AgentLink) -> None:
    with pytest.raises(AgentTimeoutError, match=r"did not report the moon within 0\.01 s"):
        link.wait(lambda n: n.stop, deadline_s=0.01, what="the moon")


def test_a_lost_agent_is_told_once(agent: Agent, link: AgentLink) -> None:
    agent.close()
    assert agent.lost_event.wait(5)
    assert agent.lost == ["it hung up"]


def test_nonsense_counts_as_a_lost_agent(agent: Agent, link: AgentLink) -> None:
    agent.say(PLAN)
    assert agent.lost_event.wait(5)
    assert "broke the protocol" in agent.lost[0]


def test_no_loss_after_the_last_message(agent: Agent, link: AgentLink) -> None:
    link.closing()
    agent.close()
    link.close()
    assert agent.lost == []


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no start from the agent"):
        AgentLink.connect(tmp_path / "none", HELLO, deadline_s=1, on_lost=print)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (encode(ReplicatedMsg(step=1)) + b"\n", "answered hello with ReplicatedMsg"),
        (b"HTTP/1.1 400\n", "speaks another protocol"),
    ],
)
def test_another_answer(tmp_path: Path, answer: bytes, words: str) -> None:
    agent = Agent(tmp_path / "a.sock", answer)
    try:
        with pytest.raises(StartupError, match=words):
            agent.connect()
    finally:
        agent.close()


def test_a_refused_hello(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "a.sock", b"")
    threading.Thread(target=agent.close).start()
    with pytest.raises(StartupError, match="it hung up"):
        agent.connect()


def test_an_agent_that_is_silent(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "a.sock", b"")
    try:
        with pytest.raises(AgentTimeoutError, match=r"within 0\.05 s"):
            agent.connect(deadline_s=0.05)
    finally:
        agent.close()


def test_news_is_a_fold() -> None:
    news = AgentNews(generation=3)
    for message in (
        ReplicatedMsg(step=5),
        ReplicatedMsg(step=4),
        CommittedMsg(generation=3, step=4),
        CommittedMsg(generation=3, step=6, failure="denied"),
        CommittedMsg(generation=2, step=2),
        PoolReadyMsg(paths=("a",)),
        StopMsg(reason="shutdown", grace_s=1),
    ):
        news.apply(message)
    assert (news.replicated, news.committed) == (5, 4)
    assert sorted(news.answers) == [4, 6]
    assert news.pool is not None
    assert news.stop is not None
    with pytest.raises(StartupError):
        news.apply(StartMsg(plan=PLAN))

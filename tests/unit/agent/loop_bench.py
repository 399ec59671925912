"""The step loop with fakes at every edge: an agent that answers at once, one or two ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.agent.batches import StepData
from surefoot.agent.exchange import StepWord, unpack_word
from surefoot.agent.failures import AgentTimeoutError
from surefoot.agent.link import AgentNews
from surefoot.agent.steps import Limits, LoopFacts, StepLoop
from surefoot.agent.tracing import Tracer
from surefoot.ckpt.errors import SlotTooSmallError
from surefoot.ckpt.manifest import LedgerRow
from surefoot.controller.wire import (
    CommittedMsg,
    Plan,
    PoolMsg,
    PoolReadyMsg,
    Reason,
    ReplicatedMsg,
    SnapshotMsg,
    StartingPoint,
)

MEMORY = StartingPoint(generation=3, step=10, tier="memory")
STORE = StartingPoint(generation=3, step=10, tier="object_store")
LIMITS = Limits(pool_s=0.05, replicated_s=0.05, committed_s=0.05, retry_pauses_s=(1.0, 2.0))
GENERATION = 4


@dataclass
class FakeBatch:
    step: int
    global_valid_tokens: int = 2

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return (f"a:0:f:{self.step}",)


class FakeLoader(Iterator[FakeBatch]):
    def __init__(self, last: int = 100) -> None:
        self.step = 0
        self.last = last

    def __next__(self) -> FakeBatch:
        if self.step == self.last:
            raise StopIteration
        self.step += 1
        return FakeBatch(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.step = state["step"]

    def close(self) -> None:
        self.last = self.step


@dataclass
class FakeRestored:
    generation: int
    step: int
    cursor: dict[str, Any]
    ledger: tuple[LedgerRow, ...] = ()


class FakeStager:
    """Remembers what was staged; `size` may be changed by a test."""

    def __init__(self) -> None:
        self.size = 16
        self.staged: list[tuple[int, int, tuple[int, ...]]] = []
        self.restored = FakeRestored(3, 10, {"step": 10})

    def nbytes(self) -> int:
        return self.size

    def stage(self, buf: memoryview, /, *, generation: int, step: int, cursor: Any, ledger: Any) -> None:
        if len(buf) < self.size:
            raise SlotTooSmallError(needed=self.size, actual=len(buf))
        assert cursor == {"step": step}
        self.staged.append((generation, step, tuple(row.step for row in ledger)))

    def restore(self, buf: memoryview, /) -> FakeRestored:
        return self.restored


class FakeLink:
    """An agent that answers inside `send`. Tests replace `on_snapshot` or pre-set the news."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.news = AgentNews(generation=GENERATION)
        self.sent: list[Any] = []
        self.failures: list[str] = []
        self.commits = True
        self.replicates = True
        self.held: dict[int, int] = {}

    def send(self, message: Any) -> None:
        self.sent.append(message)
        match message:
            case PoolMsg():
                paths = [self.folder / f"slot-{i}" for i in range(message.slots)]
                for path in paths:
                    path.write_bytes(bytes(message.slot_bytes))
                self.news.apply(PoolReadyMsg(paths=tuple(map(str, paths)), held=self.held))
            case SnapshotMsg():
                self.held[message.slot] = message.step
                if self.replicates:
                    self.news.apply(ReplicatedMsg(step=message.step))
                if message.attempt is not None and self.commits:
                    failure = self.failures.pop(0) if self.failures else ""
                    self.news.apply(CommittedMsg(generation=GENERATION, step=message.step, failure=failure))

    def peek(self, look: Callable[[AgentNews], Any]) -> Any:
        return look(self.news)

    def wait(self, look: Callable[[AgentNews], Any], *, deadline_s: float, what: str) -> Any:
        found = look(self.news)
        if found is None:
            raise AgentTimeoutError(what)
        return found

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeShell:
    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.reports: tuple[float, int] = (3.0, 1)

    def enter_phase(self, phase: str, step: int) -> None:
        self.phases.append((phase, step))

    def within(self, area: str) -> AbstractContextManager[object]:
        return nullcontext()

    def take_reports(self) -> tuple[float, int]:
        return self.reports


def _like_rank_0(word: StepWord) -> StepWord:
    return StepWord(generation=word.generation, step=word.step, replicated=word.replicated)


class Bench:
    """The loop of rank 0 of two. For the other speaks `other`, or else it has no loss and is as far as rank 0."""

    def __init__(
        self,
        folder: Path,
        *,
        start: StartingPoint | None = None,
        steps: int = 6,
        every: int = 3,
        every_s: float | None = None,
        data_ends: int = 100,
        auto: bool = False,
        faults: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.link = FakeLink(folder)
        self.stager = FakeStager()
        self.shell = FakeShell()
        self.other: Callable[[StepWord], StepWord] = _like_rank_0
        self.pauses: list[float] = []
        self.committed_calls: list[tuple[int, int]] = []
        self.data = StepData(FakeLoader(data_ends), fetching=nullcontext, taken=lambda batch: None)
        restore_path = folder / "restore"
        restore_path.write_bytes(b"x")
        plan = Plan(
            job="j",
            run_id="r",
            generation=GENERATION,
            members=(),
            world_size=2,
            mesh={"dp": 2},
            start=start or StartingPoint(),
            reason=Reason(kind="first_start"),
            spec_hash="",
            code_version="",
            controller="a",
            faults=faults,
        )
        nonces = iter(range(1, 100))
        self.loop = StepLoop(
            LoopFacts(
                plan=plan,
                rank=0,
                dp_rank=0,
                seed=1,
                steps=steps,
                every_steps=every,
                every_s=every_s,
                auto=auto,
                restore_path=str(restore_path) if plan.start.tier == "memory" else None,
                limits=LIMITS,
            ),
            {},
            self.data,
            shell=self.shell,
            link=self.link,  # pyright: ignore[reportArgumentType]  (the three calls that the loop makes)
            stager=self.stager,
            restore_committed=self._restore_committed,
            gather_words=self._gather,
            tracer=Tracer(generation=GENERATION, rank=0),
            nonce=lambda: next(nonces),
            pause=self.pauses.append,
            clock=lambda: self.now_s,
        )

    def _restore_committed(self, generation: int, step: int) -> FakeRestored:
        self.committed_calls.append((generation, step))
        return self.stager.restored

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values), self.other(unpack_word(values)).pack()]

    def run(self, *, until: int | None = None) -> list[int]:
        steps = []
        for step in self.loop:
            steps.append(step)
            next(self.data)
            if step == until:
                break
        return steps

    @property
    def attempts(self) -> list[tuple[int, str | None]]:
        return [(m.step, m.attempt) for m in self.link.of(SnapshotMsg) if m.attempt is not None]

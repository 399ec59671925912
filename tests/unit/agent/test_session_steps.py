"""The step loop with fakes at every edge: an agent that answers at once, one or two ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot.agent.batches import StepData
from surefoot.agent.exchange import StepWord, unpack_word
from surefoot.agent.failures import (
    AgentTimeoutError,
    BatchCountError,
    CommitGivenUpError,
    DataEndedError,
    RanksDisagreeError,
    StartDamagedError,
    StartupError,
    report,
)
from surefoot.agent.link import AgentNews
from surefoot.agent.steps import Limits, LoopFacts, StepLoop, attempt_due
from surefoot.agent.tracing import Tracer
from surefoot.ckpt.errors import DamagedError, ImageError, SlotTooSmallError, StepMissingError
from surefoot.ckpt.manifest import LedgerRow
from surefoot.controller.wire import (
    CadenceMsg,
    CommittedMsg,
    Plan,
    PoolMsg,
    PoolReadyMsg,
    Reason,
    ReplicatedMsg,
    SnapshotMsg,
    StartingPoint,
    StepMsg,
    StopMsg,
)

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
    def __init__(self, last: int) -> None:
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

    def close(self) -> None: ...


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


class Bench:
    """One rank's loop (rank 0 of one, unless `other` speaks for a second rank)."""

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
        self.other: Callable[[StepWord], StepWord] | None = None
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
            world_size=1,
            mesh={"dp": 1},
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
        words = [list(values)]
        if self.other is not None:
            words.append(self.other(unpack_word(values)).pack())
        return words

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


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


MEMORY = StartingPoint(generation=3, step=10, tier="memory")
STORE = StartingPoint(generation=3, step=10, tier="object_store")


# ---------------------------------------------------------------- an undisturbed run


def test_runs_all_steps_and_commits_on_time(bench: Bench) -> None:
    assert bench.run() == [1, 2, 3, 4, 5, 6]
    assert [(g, t) for g, t, _ in bench.stager.staged] == [(GENERATION, t) for t in range(1, 7)]
    assert [step for step, _ in bench.attempts] == [3, 6]
    assert bench.loop.finished == 6
    assert bench.loop.ended


def test_tells_the_agent_in_order(bench: Bench) -> None:
    bench.run()
    kinds = [type(m).__name__ for m in bench.link.sent]
    assert kinds == ["PoolMsg"] + ["SnapshotMsg", "StepMsg"] * 6
    assert bench.shell.phases[:3] == [("restore", 0), ("step", 1), ("save", 1)]
    assert {m.loss for m in bench.link.of(StepMsg)} == {(1.5).hex()}


def test_the_ledger_reaches_back_to_the_last_commit(bench: Bench) -> None:
    bench.run()
    assert [steps for _, _, steps in bench.stager.staged] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (4,),
        (4, 5),
        (4, 5, 6),
    ]


def test_a_step_without_a_report_has_no_loss(bench: Bench) -> None:
    bench.shell.reports = (0.0, 0)
    bench.run()
    assert {m.loss for m in bench.link.of(StepMsg)} == {None}


def test_a_step_without_a_batch_is_refused(bench: Bench) -> None:
    with pytest.raises(BatchCountError):
        for _ in bench.loop:
            pass
    assert bench.stager.staged == []


def test_an_unreplicated_snapshot_holds_the_next_step_up(bench: Bench) -> None:
    bench.link.replicates = False
    with pytest.raises(AgentTimeoutError, match="the snapshot of step 1 as replicated"):
        bench.run()
    assert [t for _, t, _ in bench.stager.staged] == [1]


def test_larger_snapshots_get_larger_slots(bench: Bench) -> None:
    loop = iter(bench.loop)
    for size in (16, 16, 40, 40):
        next(loop)
        next(bench.data)
        bench.stager.size = size
    next(loop)
    assert [m.slot_bytes for m in bench.link.of(PoolMsg)] == [16, 40]
    assert sorted(filter(None, bench.loop.pool.held)) == [2, 3, 4]


# ---------------------------------------------------------------- two ranks


def _behind(steps: int) -> Callable[[StepWord], StepWord]:
    return lambda word: StepWord(
        generation=word.generation, step=word.step, replicated=max(word.replicated - steps, -1)
    )


def test_a_slot_is_kept_until_the_other_rank_is_safe_too(bench: Bench) -> None:
    """Rank 1's replication is one step behind: rank 0 keeps one snapshot more, and three slots still do."""
    bench.other = _behind(1)
    loop = bench.run(until=5)
    assert loop == [1, 2, 3, 4, 5]
    assert sorted(filter(None, bench.loop.pool.held)) == [2, 3, 4]


def test_without_a_free_slot_nothing_is_overwritten(bench: Bench) -> None:
    """By the protocol nobody is two steps behind; if it were so, that is an error and not a lost way back."""
    bench.other = _behind(2)
    with pytest.raises(RanksDisagreeError, match="no slot is free for step 4"):
        bench.run()
    assert sorted(filter(None, bench.loop.pool.held)) == [1, 2, 3]


def test_a_rank_in_another_step_is_found_out(bench: Bench) -> None:
    bench.other = lambda word: StepWord(generation=word.generation, step=word.step + (word.step == 2))
    with pytest.raises(RanksDisagreeError, match="rank 1 ended step 3"):
        bench.run()


def test_the_loss_is_everybodys(bench: Bench) -> None:
    bench.other = lambda word: StepWord(
        generation=word.generation, step=word.step, loss_sum=5.0, reports=2, replicated=word.replicated
    )
    bench.run()
    assert bench.link.of(StepMsg)[0].loss == (4.0).hex()


# ---------------------------------------------------------------- starting points


def test_from_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY, steps=14, every=6)
    rows = tuple(LedgerRow(step=t, generation=3, dp_rank=0) for t in (9, 10))
    bench.stager.restored.ledger = rows
    bench.link.held = {0: 9, 1: 10, 2: 11}
    assert bench.run() == [11, 12, 13, 14]
    assert [m.slot for m in bench.link.of(SnapshotMsg)][:3] == [0, 2, 1], "the starting point goes last"
    assert [steps for _, _, steps in bench.stager.staged] == [
        (9, 10, 11),
        (9, 10, 11, 12),
        (13,),
        (13, 14),
    ]


def test_from_the_object_store(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=STORE, steps=12)
    bench.stager.restored.ledger = (LedgerRow(step=10, generation=3, dp_rank=0),)
    assert bench.run() == [11, 12]
    assert bench.committed_calls == [(3, 10)]
    assert bench.stager.staged[0] == (GENERATION, 11, (11,)), "what the manifest holds is not committed again"


def test_what_was_restored_must_be_what_was_planned(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY)
    bench.stager.restored = FakeRestored(3, 9, {"step": 9})
    with pytest.raises(StartupError, match=r"step 10 of generation 3.*step 9 of generation 3"):
        bench.run()


@pytest.mark.parametrize("start", [MEMORY, STORE])
def test_a_damaged_tier_is_never_made_up_for_by_another(tmp_path: Path, start: StartingPoint) -> None:
    """CKP-44: memory is at one step and the object store at another. Where the planned tier is damaged, or holds another step,
    the rank gives up, with the cursor untouched: what comes next is the next plan's to say."""
    for restored in (None, FakeRestored(3, 4, {"step": 4})):
        bench = Bench(tmp_path, start=start)
        before = bench.loop.data.state_dict()

        def restore(*_: Any, found: FakeRestored | None = restored) -> FakeRestored:
            if found is None:
                raise ImageError("corrupt", "one bit") if start is MEMORY else DamagedError("r0", key="r0")
            return found

        if start is MEMORY:
            bench.stager.restore = restore
        else:
            bench.loop.restore_committed = restore
        wrong = (ImageError, StartDamagedError) if restored is None else StartupError
        with pytest.raises(wrong):
            bench.run()
        assert bench.loop.data.state_dict() == before
        assert not bench.committed_calls, "no other tier was asked"


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (DamagedError("rank 1: r1: block 0 differs " + "x" * 1000, key="r1"), "r1"),
        (StepMissingError("there is none"), "gen-0003/step-0000000010/manifest.json"),
    ],
)
def test_a_damaged_step_is_told_by_name(tmp_path: Path, error: Exception, key: str) -> None:
    """Generation, step and object, for the controller; in few words, since all ranks of a node say it."""
    bench = Bench(tmp_path, start=STORE)

    def restore(*_: Any) -> FakeRestored:
        raise error

    bench.loop.restore_committed = restore
    with pytest.raises(StartDamagedError, match="step 10 of generation 3 cannot be restored") as raised:
        bench.run()
    told = report(raised.value, area="checkpoint", first_step_begun=False)
    assert told.kind == "checkpoint"
    assert told.damaged is not None
    assert (told.damaged.generation, told.damaged.step, told.damaged.key) == (3, 10, key)
    assert told.damaged.detail == str(error)[:500]


def test_all_ranks_must_have_restored_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY)
    bench.other = lambda word: StepWord(generation=2, step=word.step)
    with pytest.raises(StartupError, match=r"others from \[\(2, 10\)\]"):
        bench.run()


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=STORE, steps=10)
    assert bench.run() == []
    assert bench.loop.ended


# ---------------------------------------------------------------- commits


@pytest.mark.parametrize(
    ("step", "attempted", "pending", "due"),
    [
        (19, 0, False, False),
        (20, 0, False, True),
        (21, 20, False, False),
        (40, 20, True, False),  # one at a time
        (41, 20, False, True),  # made up
        (60, 41, False, True),
        (100, 80, True, True),  # the last
    ],
)
def test_attempt_due(step: int, attempted: int, pending: bool, due: bool) -> None:
    assert attempt_due(step, steps=100, every_steps=20, attempted=attempted, pending=pending) is due


@pytest.mark.parametrize(
    ("step", "since_s", "pending", "due"),
    [(20, 9.9, False, False), (21, 10.0, False, True), (22, 11.0, True, False), (100, 0.0, True, True)],
)
def test_attempt_due_by_seconds(step: int, since_s: float, pending: bool, due: bool) -> None:
    how = {"every_steps": 20, "attempted": 0, "every_s": 10.0}
    assert attempt_due(step, steps=100, pending=pending, since_s=since_s, **how) is due


def test_commits_by_the_clock(tmp_path: Path) -> None:
    """Steps of 4 s, a checkpoint as soon as 10 s have passed since the last."""
    bench = Bench(tmp_path, steps=10, every_s=10.0)
    for _ in bench.loop:
        next(bench.data)
        bench.now_s += 4.0
    assert [step for step, _ in bench.attempts] == [3, 6, 9, 10]


@pytest.mark.parametrize(("faults", "after"), [(0, 1170), (47, 165)])
def test_commits_as_often_as_is_worth_it(tmp_path: Path, faults: int, after: int) -> None:
    """Steps of 4 s, and one of 12 s beside each upload. The first commit is due at once and is measured; what follows is Daly's choice
    for a cost of 8 s and the faults that the plan tells."""
    bench = Bench(tmp_path, steps=1000, data_ends=1000, auto=True, faults=faults)
    for step in bench.loop:
        next(bench.data)
        bench.now_s += 12.0 if step - 1 in dict(bench.attempts) else 4.0
        if len(bench.attempts) == 3:
            break
    first, second, third = (step for step, _ in bench.attempts)
    assert first == 1
    for earlier, later in ((first, second), (second, third)):
        seconds = 12 + 4 * (later - earlier - 1)
        assert abs(seconds - after) < 0.04 * after
    (why,) = {message.why for message in bench.link.of(CadenceMsg)}
    assert "a save costs 8 s of training" in why
    assert f"({faults} faults in " in why


def test_a_commit_that_is_never_alone_is_not_followed_by_another(tmp_path: Path) -> None:
    """As long as it is under way, nothing is known of its cost."""
    bench = Bench(tmp_path, steps=50, auto=True)
    bench.link.commits = False
    for _ in bench.loop:
        next(bench.data)
        bench.now_s += 1000.0
        if bench.loop.finished == 40:
            break
    assert [step for step, _ in bench.attempts] == [1]
    assert bench.link.of(CadenceMsg) == []


def test_an_unanswered_attempt_does_not_stop_training(bench: Bench) -> None:
    bench.link.commits = False
    with pytest.raises(AgentTimeoutError, match="the checkpoint of step 6 as committed"):
        bench.run()
    assert [step for step, _ in bench.attempts] == [3, 6]
    assert bench.stager.staged[-1][2] == (1, 2, 3, 4, 5, 6), "uncommitted rows stay in the ledger"


def test_a_failed_commit_is_made_up_at_the_next_due_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=9)
    bench.link.failures = ["no answer"]
    bench.run()
    assert [step for step, _ in bench.attempts] == [3, 6, 9]
    assert bench.stager.staged[5][2] == (1, 2, 3, 4, 5, 6)


def test_the_last_commit_is_tried_again_under_another_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=2)
    bench.link.failures = ["no answer", "no answer"]
    bench.run()
    assert [step for step, _ in bench.attempts] == [2, 2, 2]
    assert len({attempt for _, attempt in bench.attempts}) == 3
    assert bench.pauses == [1.0, 2.0]


def test_the_last_commit_is_given_up_at_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=2)
    bench.link.failures = ["no answer"] * 3
    with pytest.raises(CommitGivenUpError, match="not committed in 3 attempts; the last said: no answer"):
        bench.run()


def test_a_stop_commits_the_step_it_falls_in(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=100, every=50)
    seen = []
    for step in bench.loop:
        next(bench.data)
        seen.append(step)
        if step == 7:
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
    assert seen == list(range(1, 8))
    assert [step for step, _ in bench.attempts] == [7]
    assert bench.loop.ended


# ---------------------------------------------------------------- the data ends first


def test_the_end_of_the_data_ends_the_loop_with_a_commit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=6, every=3, data_ends=4)
    assert bench.run() == [1, 2, 3, 4]
    assert [step for step, _ in bench.attempts] == [3, 4]
    assert bench.loop.ended
    assert bench.loop.finished == 4


def test_resumed_at_the_end_of_the_data_there_is_nothing_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=STORE, steps=20, data_ends=10)
    assert bench.run() == []
    assert bench.attempts == []
    assert bench.loop.ended


def test_resumed_from_memory_at_the_end_of_the_data_that_step_is_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=MEMORY, steps=20, data_ends=10)
    assert bench.run() == []
    assert [step for step, _ in bench.attempts] == [10]
    assert bench.loop.ended


def test_data_without_a_first_batch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataEndedError):
        Bench(tmp_path, data_ends=0).run()

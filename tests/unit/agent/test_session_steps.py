"""The step loop: an undisturbed run, two ranks, and data that end first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loop_bench import GENERATION, MEMORY, STORE, Bench

from surefoot.agent.exchange import StepWord
from surefoot.agent.failures import AgentTimeoutError, BatchCountError, DataEndedError, RanksDisagreeError
from surefoot.controller.wire import PoolMsg, StepMsg

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

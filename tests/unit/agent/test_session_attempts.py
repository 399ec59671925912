"""When a rank's loop begins to commit, and what it does about attempts that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_bench import Bench

from surefoot.agent.attempts import attempt_due
from surefoot.agent.exchange import StepWord
from surefoot.agent.failures import AgentTimeoutError, CommitGivenUpError
from surefoot.controller.wire import CadenceMsg, StopMsg


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


def _told_too(word: StepWord) -> StepWord:
    return StepWord(generation=word.generation, step=word.step, replicated=word.replicated, stop=word.stop)


def test_a_stop_of_all_commits_the_step_it_falls_in(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=100, every=50)
    bench.other = _told_too
    seen = []
    for step in bench.loop:
        next(bench.data)
        seen.append(step)
        if step == 7:
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
    assert seen == list(range(1, 8))
    assert [step for step, _ in bench.attempts] == [7]
    assert bench.loop.ended == "stopped"


def test_who_is_told_alone_commits_and_trains_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=12, every=50)
    for step in bench.loop:
        next(bench.data)
        if step == 7:
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
    assert [step for step, _ in bench.attempts] == [7, 12]
    assert bench.loop.ended == "steps"


def test_each_further_rank_that_is_told_is_one_more_commit_and_the_last_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=100, every=50)
    for step in bench.loop:
        next(bench.data)
        if step == 4:
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
        if step == 6:
            bench.other = _told_too
    assert [step for step, _ in bench.attempts] == [4, 6]
    assert bench.loop.ended == "stopped"


def test_a_commit_before_leaving_is_made_up_at_once_if_it_fails(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=12, every=50)
    bench.link.failures = ["no answer", "no answer"]
    for step in bench.loop:
        next(bench.data)
        if step == 7:
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
    assert [step for step, _ in bench.attempts] == [7, 8, 9, 12]


@pytest.mark.parametrize(("data_ends", "ended"), [(7, "data"), (100, "steps")])
def test_a_stop_at_the_end_changes_nothing_about_what_ended_it(
    tmp_path: Path, data_ends: int, ended: str
) -> None:
    bench = Bench(tmp_path, steps=8, every=50, data_ends=data_ends)
    bench.other = _told_too
    for step in bench.loop:
        next(bench.data)
        if step == min(data_ends, 8):
            bench.link.news.apply(StopMsg(reason="shutdown", grace_s=30))
    assert bench.loop.ended == ended

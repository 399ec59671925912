"""The table of legal moves: every move in it is made, everything else raises and changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from surefoot.controller.core import events as ev
from surefoot.controller.core.advance import advance
from surefoot.controller.core.moves import FINAL, MOVES, IllegalMoveError, Mind, Turn, move

ALL = list(itertools.product(Mind, Turn))


@pytest.mark.parametrize(("mind", "turn"), ALL, ids=[f"{m.name}-{t.name}" for m, t in ALL])
def test_every_pair(mind: Mind, turn: Turn) -> None:
    if (mind, turn) in MOVES:
        assert move(mind, turn) is MOVES[mind, turn]
    else:
        with pytest.raises(IllegalMoveError) as e:
            move(mind, turn, ("it began",))
        assert (e.value.mind, e.value.turn) == (mind, turn)
        assert "it began" in str(e.value)


def test_nothing_leaves_a_final_mind_but_a_new_look() -> None:
    assert {t for m, t in MOVES if m in FINAL} == {Turn.ELECTED}


def test_every_mind_is_reached() -> None:
    assert {MOVES[k] for k in MOVES} == set(Mind)


def test_what_may_happen_while_running_may_happen_while_commits_are_on_hold() -> None:
    running = {turn: to for (mind, turn), to in MOVES.items() if mind is Mind.RUNNING}
    hold = {turn: to for (mind, turn), to in MOVES.items() if mind is Mind.HOLD_COMMITS}
    assert running.pop(Turn.STORE_LOST) is Mind.HOLD_COMMITS
    assert hold.pop(Turn.STORE_BACK) is Mind.RUNNING
    assert hold == running


def test_illegal_move_changes_nothing(bench: Any) -> None:
    """A state that contradicts itself makes the core raise in mid-batch; the former state stands, and goes on working."""
    bench.running(step=4)
    good = bench.state
    broken = dataclasses.replace(good, mind=Mind.HELD, held_why="x")
    # HELD with a plan in force: what came up cannot be found faulty from there.
    broken = dataclasses.replace(broken, forming=_coming_up(bench))
    before = dataclasses.replace(broken)
    exit_told = _kill(bench)
    with pytest.raises(IllegalMoveError):
        _advance_all(broken, [[exit_told], *_answers(bench)], bench.now)
    assert broken == before
    bench.state = good
    bench.send(exit_told)
    bench.perform()
    assert bench.plan.generation == 2


def _advance_all(state: Any, batches: Any, now_s: float) -> None:
    for events in batches:
        state, _ = advance(state, events, now_s)


def _coming_up(bench: Any) -> Any:
    from surefoot.controller.core.state import ComingUp, Forming

    return Forming(why=bench.plan.reason, stage=ComingUp(), since_s=bench.now)


def _kill(bench: Any) -> ev.Event:
    from surefoot.controller import wire

    uid = bench.rank(1, exit=wire.ExitReport(signal=9))
    return ev.StatusReported(status=bench.nodes[uid].status())


def _answers(bench: Any) -> list[list[ev.Event]]:
    op = bench.state.next_op
    return [[ev.ProbeAnswered(op=op, uid=uid, status=bench.nodes[uid].status()) for uid in ("n0", "n1")]]

"""Who is taken for dead in a call that all ranks make together, and lines on which no call lasts for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from surefoot.ckpt import lives
from surefoot.ckpt.errors import ElsewhereError
from surefoot.ckpt.storeline import ChannelError, Line
from surefoot.ckpt.vigil import LOOKS, Roll, Vigil, beat, seen_to_run, trouble


def looks(roll: Roll, count: int, *beats: bytes) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found = roll.look(beats)
    return found


# ---------------------------------------------------------------- the rule


def test_who_has_entered_and_beats_no_more_is_silent() -> None:
    roll = Roll(2)
    assert roll.look([beat(1, 0), beat(1, 0)]) == []
    for n in range(1, LOOKS):
        assert roll.look([beat(1, n), beat(1, 0)]) == []
    assert roll.look([beat(1, LOOKS), beat(1, 0)]) == [1]
    assert looks(roll, LOOKS - 1, beat(1, LOOKS), beat(1, 0)) == [1], "the other has LOOKS - 1"
    assert looks(roll, 1, beat(1, LOOKS), beat(1, 0)) == [0, 1]


def test_who_has_not_come_is_late_however_long_it_takes() -> None:
    assert looks(Roll(2), 100 * LOOKS, b"", beat(1, 0)) == [1]


def test_who_has_left_is_late_for_the_next_call() -> None:
    """Also after it was in one, and died since: of that nobody can tell."""
    roll = Roll(1)
    looks(roll, 3, beat(1, 5))
    assert looks(roll, 100 * LOOKS, b"") == []


def test_who_goes_on_was_slow() -> None:
    roll = Roll(1)
    assert looks(roll, 2 * LOOKS, beat(1, 5)) == [0]
    assert looks(roll, 1, beat(1, 6)) == []
    assert looks(roll, LOOKS - 1, beat(1, 6)) == []


def test_who_fell_silent_in_one_call_is_silent_in_the_next() -> None:
    """The others are told at the first look: nobody waits again."""
    roll = Roll(2)
    looks(roll, LOOKS + 1, beat(1, 5), beat(1, 2))
    assert looks(roll, 1, beat(2, 0), beat(1, 2)) == [1]


def test_what_the_others_are_told() -> None:
    assert "rank 3 has left" in trouble(3, KeyboardInterrupt())
    assert "was interrupted (KeyboardInterrupt)" in trouble(3, KeyboardInterrupt())
    assert "raised OSError: no room" in trouble(3, OSError("no room"))
    assert issubclass(ChannelError, ElsewhereError), "it stands in the table of errors"


# ---------------------------------------------------------------- the vigil


class FakeStore:
    """What rank 0's TCPStore does, for one process."""

    def __init__(self) -> None:
        self.words: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.words[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.words[key]

    def check(self, keys: list[str]) -> bool:
        return all(k in self.words for k in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.words.get(k, b"") for k in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        if not self.words.get(key):
            self.set(key, desired)


def test_rank_0_leaves_word_of_who_is_silent() -> None:
    store = FakeStore()
    store.set("l/2", beat(7, 3))
    told = threading.Event()
    vigil = Vigil(Line(store, own=True), 0, 3, 0.001, lambda _: told.set())
    vigil.enter(7)
    assert vigil.hear(10_000) is not None
    assert told.wait(10)
    assert "rank 2 fell silent" in str(vigil.error)
    assert store.words["f/7"].decode() == str(vigil.error)
    vigil.enter(8)
    assert vigil.hear(10_000) is not None, "it is as silent in the next call"
    vigil.end()


def test_who_is_late_and_whose_process_has_ended_will_not_come() -> None:
    store = FakeStore()
    here, pid, begun = lives.card().split()
    store.set("p/1", lives.card())
    store.set("p/2", f"{here} {pid} {int(begun) + 1}")
    vigil = Vigil(Line(store, own=True), 0, 4, 0.001, lambda _: None)
    vigil.enter(1)
    assert "rank 2 will not come" in str(vigil.hear(10_000))
    vigil.end()


def test_others_hear_what_was_left_and_of_no_earlier_call() -> None:
    store = FakeStore()
    store.set("f/1", "rank 2 has left")
    vigil = Vigil(Line(store, own=True), 1, 3, 0.001, lambda _: None)
    vigil.enter(2)
    assert vigil.hear(20) is None
    assert store.words["l/1"].startswith(b"2 ")
    store.set("f/2", "rank 0 has left")
    heard = vigil.hear(10_000)
    assert str(heard) == "rank 0 has left"
    vigil.leave()
    vigil.end()


def test_rank_0_sees_the_others_off() -> None:
    """It waits for those that are in the call, and live; but not for ever."""
    store = FakeStore()
    vigil = Vigil(Line(store, own=True), 0, 3, 0.01, lambda _: None)
    vigil.see_off(4)
    store.set("l/1", beat(4, 2))
    vigil.see_off(4)
    vigil.see_off(5)


def test_a_process_that_is_seen_to_run_is_not_dead() -> None:
    """Whatever keeps it from beating. One that is stopped, gone, or another by the same number is none that runs."""
    store = FakeStore()
    store.set("p/2", lives.card())
    assert seen_to_run(store, 2)
    assert not seen_to_run(store, 1), "nothing is known of it"
    here, pid, begun = lives.card().split()
    assert not lives.runs(f"{here} {pid} {int(begun) + 1}")
    assert not lives.runs(f"elsewhere {pid} {begun}")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = f"{here} {child.pid} {lives._stat(child.pid)[1]}"
    assert lives.runs(its)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not lives.runs(its)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not lives.runs(its), "dead, and not reaped"
    assert lives.ended(its)
    child.communicate()
    assert not lives.runs(its)
    assert lives.ended(its)
    assert not lives.runs("")
    for cannot_be_told in ("", f"elsewhere {pid} {begun}", lives.card()):
        assert not lives.ended(cannot_be_told)
    assert lives.ended(f"{here} {pid} {int(begun) + 1}"), "another has its number"


# ---------------------------------------------------------------- lines


def test_a_call_that_is_not_answered_ends() -> None:
    gate = threading.Event()
    line = Line(None)
    with pytest.raises(ChannelError, match="rank 0 has not answered for 0 s"):
        line.call(lambda _: gate.wait(), 0.05)
    gate.set()
    assert line.call(lambda _: 5, 10) == 5, "the next one is answered"
    line.end()


def test_an_answer_of_a_process_that_runs_is_waited_for() -> None:
    gate, looked = threading.Event(), threading.Event()

    def runs() -> bool:
        gate.set()
        looked.set()
        return True

    line = Line(None, runs=runs)
    assert line.call(lambda _: gate.wait(), 0.01)
    assert looked.is_set(), "it was late"
    line.end()


def test_a_call_can_be_failed_from_another_thread() -> None:
    gate, begun = threading.Event(), threading.Event()
    line = Line(None)

    def ask(_: Any) -> None:
        begun.set()
        gate.wait()

    def fail() -> None:
        assert begun.wait(10)
        line.fail(ChannelError("rank 3 is gone"))

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(ChannelError, match="rank 3 is gone"):
        line.call(ask, 100)
    failing.join()
    line.post(lambda _: None)
    gate.set()
    assert line.call(lambda _: 5, 10) == 5
    with pytest.raises(TimeoutError, match="of its own"):
        line.call(lambda _: (_ for _ in ()).throw(TimeoutError("of its own")), 10)
    line.end()

"""Who says that a call waits for ranks that have not come to it: one rank, once, and only where it is true."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from surefoot.ckpt.late import LATE_S, NAMED_MAX, Late, named, never_came
from surefoot.ckpt.storeline import Line
from surefoot.ckpt.vigil import Vigil, beat

WORLD = 4


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def said_by(rank: int, *there: int, after: float = LATE_S) -> str:
    """What `rank` says when it has waited so long, and `there` have come to the call as well."""
    clock = Clock()
    late = Late(rank, WORLD, 300.0, clock)
    late.begin("save(step 1)")
    clock.at += after
    whom = late.at_whom()
    return late.words([r for r in whom if r in (rank, *there)]) if whom else ""


# ---------------------------------------------------------------- the rule


def test_rank_0_names_all_that_have_not_come() -> None:
    said = said_by(0, 2)
    assert said.startswith("save(step 1) has waited 15 s for ranks 1, 3: all ranks make every call"), said
    assert "`if rank == 0:`" in said
    assert said.endswith("300 s in all")
    assert said_by(0, 1, 2, 3) == "", "somebody is slow, and all have come"


def test_nobody_is_late_before_its_time() -> None:
    assert said_by(0, after=LATE_S - 0.1) == ""


def test_of_those_that_wait_for_rank_0_the_first_speaks() -> None:
    assert "for rank 0: all" in said_by(1, 2, 3)
    assert said_by(2, 1, 3) == "", "rank 1 says it"
    assert said_by(3, 1, 2) == ""
    assert "for rank 0: all" in said_by(2), "alone"
    assert said_by(1, 0) == said_by(2, 0) == "", "rank 0 is there, and knows whom it waits for"


def test_it_is_said_once_in_a_call_and_only_by_who_waits() -> None:
    clock = Clock()
    late = Late(0, WORLD, 300.0, clock)
    assert late.at_whom() == ()
    for call in ("load()", "save(step 1)"):
        late.begin(call)
        clock.at += LATE_S
        assert list(late.at_whom()) == [0, 1, 2, 3]
        assert late.words([0]).startswith(f"{call} has waited")
        clock.at += LATE_S
        assert late.at_whom() == ()
    late.begin("load()")
    late.end()
    clock.at += LATE_S
    assert late.at_whom() == ()
    assert late.words([0]) == "", "they came while it looked"


def test_what_is_told_in_the_end() -> None:
    assert never_came("load()", 300, [1]).startswith(
        "waited 300 s for rank 1, which has not come to load(): all ranks make every call"
    )
    assert "ranks 1, 2, which have not" in never_came("load()", 300, [1, 2])
    assert named([3]) == "rank 3"
    assert named(range(NAMED_MAX + 2)).endswith("6, 7 and 2 more")


# ---------------------------------------------------------------- with the beats


class FakeStore:
    """What rank 0's TCPStore does, for one process."""

    def __init__(self, **words: bytes) -> None:
        self.words = {k.replace("_", "/"): word for k, word in words.items()}

    def set(self, key: str, value: bytes) -> None:
        self.words[key] = value

    def get(self, key: str) -> bytes:
        return self.words[key]

    def check(self, keys: list[str]) -> bool:
        return all(k in self.words for k in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.words.get(k, b"") for k in keys]


def warnings_of(rank: int, store: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged when `rank` looks at call 7, for which it has waited too long."""
    clock = Clock()
    late = Late(rank, WORLD, 300.0, clock)
    late.begin("save(step 1)")
    clock.at += LATE_S
    Vigil(Line(store, own=True), rank, WORLD, 0.001, lambda _: None, late)._beat_and_look(store, 7)
    for thread in threading.enumerate():
        if thread.name == "ckpt-late":
            thread.join()
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_who_is_in_an_earlier_call_or_in_none_has_not_come(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(l_1=beat(7, 3), l_2=beat(6, 3), l_3=b"")
    (said,) = warnings_of(0, store, caplog)
    assert "for ranks 2, 3:" in said


def test_who_came_and_left_is_not_late(caplog: pytest.LogCaptureFixture) -> None:
    """The others have the answer, this rank has not looked yet."""
    store = FakeStore(**{"l_0": b"", "a_7.1": b"=answer"})
    assert warnings_of(1, store, caplog) == []

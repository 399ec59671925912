"""Seconds and "auto" on several ranks whose clocks differ: they save the same steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from surefoot.ckpt.record import Record, StartRef
from surefoot.ckpt.saving.cadence import Cadence


class Clock:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class Rank:
    """A rank with a clock of its own. Rank 0 speaks first; the words are handed on."""

    def __init__(self, rank: int, words: list[bytes], **options: Any) -> None:
        self.rank = rank
        self.words = words
        self.asked = 0
        self.clock = Clock(1000.0 * rank)
        self.cadence = Cadence(**options, clock=self.clock)

    def exchange(self, word: bytes, /) -> list[bytes]:
        self.asked += 1
        if self.rank == 0:
            self.words.append(word)
        return [self.words[-1], word]

    def due(self, step: int, took: float, *, uploading: bool = False) -> bool:
        self.clock.at += took
        return self.cadence.due(step, lambda: self, records, uploading=uploading)


def records() -> Mapping[int, Record]:
    start = StartRef()
    return {
        1: Record(generation=1, start=start, reason="first_start", created_by="t"),
        2: Record(generation=2, start=start, reason="restart rank_exit", created_by="t"),
    }


def run(ranks: list[Rank], steps: int, seed: int, stall: float = 0.1) -> list[int]:
    draw = random.Random(seed)
    saved: list[int] = []
    for step in range(1, steps + 1):
        due = [r.due(step, draw.uniform(0.8, 1.2)) for r in ranks]
        assert len(set(due)) == 1, f"step {step}: {due}"
        if due[0]:
            saved.append(step)
            for r in ranks:
                r.clock.at += stall
                r.cadence.saved(stall)
    return saved


@pytest.mark.parametrize("seed", [1, 2])
def test_by_seconds_all_ranks_save_the_same_steps(seed: int) -> None:
    words: list[bytes] = []
    ranks = [Rank(r, words, every_s=60.0) for r in range(3)]
    saved = run(ranks, 1000, seed)
    assert len(saved) == pytest.approx(1000 / 60, abs=2)
    assert {r.asked for r in ranks} == {len(words)}
    assert len(words) < 1000 / 4


def test_auto_measures_chooses_and_tells() -> None:
    words: list[bytes] = []
    ranks = [Rank(r, words, every="auto") for r in range(2)]
    assert ranks[0].cadence.choice is None
    saved = run(ranks, 4000, 3, stall=0.5)
    choice = ranks[0].cadence.choice
    assert choice is not None
    assert (choice.faults, choice.cost_s) == (1, 0.5)
    gaps = [b - a for a, b in itertools.pairwise(saved[2:])]
    assert all(g == pytest.approx(choice.interval_s, rel=0.15) for g in gaps)
    facts = ranks[0].cadence.facts()
    assert facts["interval"] == choice.why
    assert "1 fault in" in choice.why
    assert facts["ran_s"] == pytest.approx(4000, rel=0.05)


def test_what_was_loaded_counts_as_saved_and_how_long_the_job_has_run_is_handed_on() -> None:
    rank = Rank(0, [], every_s=10.0)
    rank.cadence.loaded({"ran_s": 5000.0})
    assert [s for s in range(1, 21) if rank.due(s, 1.0)] == [10, 20]
    assert rank.cadence.facts()["ran_s"] == 5020.0
    rank.cadence.loaded({"ran_s": "nonsense"})
    assert rank.cadence.facts()["ran_s"] == 0.0


def test_by_steps_nobody_asks() -> None:
    rank = Rank(0, [], every=5)
    assert [s for s in range(1, 21) if rank.due(s, 1.0)] == [5, 10, 15, 20]
    assert rank.asked == 0
    assert Rank(0, []).due(3, 1.0)


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": "often"}, {"every_s": 0}, {"every_s": -1.0}, {"every": 5, "every_s": 5.0}],
)
def test_refused_with_the_reason(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every"):
        Cadence(**options)

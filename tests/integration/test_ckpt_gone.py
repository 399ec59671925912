"""A rank that dies, is stopped or leaves in the middle of a call is named to all others, wherever they wait for it; who is late or
slow is not. A fall back to the channel's timeout of five minutes fails these tests by theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankHost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

Ranks = Callable[..., list[Any]]
WORLD = 4


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


class Play:
    """Runs an act that one rank does not survive, and looks at what the others were told."""

    def __init__(self, host: RankHost, eventually: Any) -> None:
        self._host = host
        self._eventually = eventually

    def __call__(self, victim: int, end: str, function: str, *args: Any) -> None:
        running = self._host.start(WORLD, function, *args)
        running._killed.add(victim)
        others = [r for r in range(WORLD) if r != victim]
        try:
            self._eventually(lambda: all("closed" in running.log(r) for r in others), within_s=100)
        finally:
            if end == "stop":
                running.kill(victim)
        ended = running.wait(30)
        assert [ended[r].code for r in others] == [0] * len(others), "\n".join(map(str, ended))
        for r in others:
            said = next(line for line in ended[r].log.splitlines() if line.startswith("told: "))
            assert f"rank {victim} " in said, (r, said)
            assert "rank 0" not in said or victim == 0, (r, said)


@pytest.fixture
def play(rank_host: RankHost, eventually: Any) -> Play:
    return Play(rank_host, eventually)


LOADS = [
    ("agreement", "ddp", "pages"),
    ("manifest", "ddp", "pages"),
    ("memory", "ddp", "memory"),
    ("vote", "ddp", "memory"),
    ("transfer", "ddp", "group"),
    ("transfer", "tp", "group"),
    ("outcome", "ddp", "group"),
]
"""Where it goes, the layout that is loaded (of the whole tensors all is broadcast, of others each sends to each), and how ranks share."""


ENDS = ["kill", "stop", "interrupt", "fail"]
EVERY_END_EVERYWHERE = [
    *(
        pytest.param(2, *load, end, marks=[] if i % len(ENDS) == j else pytest.mark.soak)
        for i, load in enumerate(LOADS)
        for j, end in enumerate(ENDS)
    ),
    *(
        (0, place, "ddp", by, end)
        for place, by in (("agreement", "pages"), ("transfer", "group"))
        for end in ENDS[:3]
    ),
]
"""Of a rank that is not 0 every place has one end among the tests of every day, and all of them in a soak."""


@pytest.mark.parametrize(("victim", "place", "layout", "by", "end"), EVERY_END_EVERYWHERE)
def test_a_rank_that_goes_in_a_load(
    ranks: Ranks, play: Play, root: str, victim: int, place: str, layout: str, by: str, end: str
) -> None:
    ranks(1, "loading_acts:save", root, "ddp", 20)
    play(victim, end, "gone_acts:load", root, victim, place, end, layout, by)


@pytest.mark.parametrize("end", ["kill", "stop", "interrupt"])
@pytest.mark.parametrize(("victim", "place"), [(2, "agreement"), (2, "generation"), (0, "generation")])
def test_a_rank_that_goes_as_a_save_begins(play: Play, root: str, victim: int, place: str, end: str) -> None:
    """Before there is a flight to tell of it."""
    play(victim, end, "gone_acts:save", root, victim, place, end)


@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_has_died_before_the_call(ranks: Ranks, play: Play, root: str, victim: int) -> None:
    """It has not come, and might be late; but its process, on this machine, is no more."""
    ranks(1, "loading_acts:save", root, "ddp", 20)
    play(victim, "kill", "gone_acts:load_again", root, victim)


@pytest.mark.parametrize("what", ["late", "late 0", "slow reading", "slow end", "locked"])
def test_a_rank_that_is_late_or_slow_is_waited_for(ranks: Ranks, root: str, what: str) -> None:
    ranks(1, "loading_acts:save", root, "ddp", 20)
    assert ranks(WORLD, "gone_acts:load_late_and_slowly", root, what) == [20] * WORLD


ALONE = pytest.mark.parametrize(("who", "opened"), [(0, True), (0, False), (1, True), (1, False)])
"""The rank that calls, and whether there were calls of all ranks before."""


@ALONE
def test_who_waits_for_others_says_for_whom_and_in_which_call(
    ranks: Ranks, root: str, tmp_path: Path, who: int, opened: bool
) -> None:
    """`if rank == 0: c.save(...)`, the commonest slip, is silent for minutes otherwise. Who is only late does no harm."""
    note = tmp_path / "said"
    ranks(2, "gone_acts:comes_when_it_is_missed", root, str(note), 1 - who, opened)
    assert note.read_text().startswith("save(step 1) has waited ")
    assert f"for rank {1 - who}: all ranks make every call" in note.read_text()


@ALONE
def test_who_waits_in_vain_is_told_what_to_do(ranks: Ranks, root: str, who: int, opened: bool) -> None:
    told = ranks(2, "gone_acts:saves_alone", root, who, opened)[who]
    assert f"for rank {1 - who}, which has not come to save(step 1): all ranks make every call" in told

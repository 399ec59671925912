"""The fixture `ranks` itself: what goes wrong in a rank must not stay there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks as ranks_module
from ranks import RankHost

pytestmark = pytest.mark.slow


def test_results_come_back_by_rank(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(3, "rank_acts:sums", 5) == [(18, 3)] * 3
    assert ranks(1, "rank_acts:sums", 5) == [(5, 1)]


def test_a_failure_of_one_rank_fails_the_test_with_its_traceback(ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 1.*had enough.*before") as caught:
        ranks(2, "rank_acts:one_fails")
    assert "one_fails" in str(caught.value)
    with pytest.raises(AssertionError, match="No module named 'no_such_acts'"):
        ranks(2, "no_such_acts:any")
    assert ranks(2, "rank_acts:sums", 0) == [(1, 2)] * 2, "and the next act works"


def test_a_hang_shows_all_stacks_and_ends(ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"hangs") as caught:
        ranks(2, "rank_acts:hangs", timeout_s=1.0)
    assert "rank_acts.py" in str(caught.value)
    assert str(caught.value).count("Current thread") == 2


def test_a_rank_can_be_killed(rank_host: RankHost, eventually: Callable[..., Any]) -> None:
    running = rank_host.start(3, "rank_acts:waits_to_be_killed")
    eventually(lambda: "ready" in running.log(1))
    running.kill(1)
    ended = running.wait()
    assert [e.code for e in ended] == [0, -9, 0]
    assert [e.value for e in ended] == ["survived", None, "survived"]


def test_a_process_left_behind_is_ended_and_told(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "ORPHANS_S", 0.5)
    with pytest.raises(AssertionError, match=r"left processes behind.*Event\(\)\.wait\(\)"):
        ranks(2, "rank_acts:leaves_a_process_behind")

import math

import pytest

from surefoot.agent.exchange import WORD, StepWord, attempt_name, judge, unpack_word
from surefoot.agent.failures import RanksDisagreeError


def _word(**changes: object) -> StepWord:
    return StepWord(**({"generation": 2, "step": 5, "reports": 1} | changes))  # pyright: ignore[reportArgumentType]  (named in each test)


def _judge(*words: StepWord, denominator: int = 1, mesh: dict[str, int] | None = None):
    return judge(words, mesh=mesh or {"dp": len(words)}, generation=2, step=5, denominator=denominator)


@pytest.mark.parametrize("loss", [0.0, -0.0, 1 / 3, -1e300, math.inf, 5e-324])
def test_a_word_survives_the_wire_to_the_last_bit(loss: float) -> None:
    word = _word(loss_sum=loss, replicated=-1, attempt=2**62 - 1, stop=True)
    values = word.pack()
    assert len(values) == WORD
    assert all(-(2**63) <= value < 2**63 for value in values)
    assert unpack_word(values) == word
    assert math.copysign(1, unpack_word(values).loss_sum) == math.copysign(1, loss)


def test_nan_survives() -> None:
    assert math.isnan(unpack_word(_word(loss_sum=math.nan).pack()).loss_sum)


def test_the_loss_is_summed_in_rank_order() -> None:
    a, b, c = 1e16, 1.0, -1e16
    assert _judge(_word(loss_sum=a), _word(loss_sum=b), _word(loss_sum=c)).loss == (a + b) + c
    assert _judge(_word(loss_sum=a), _word(loss_sum=c), _word(loss_sum=b), denominator=4).loss == 0.25


def test_ranks_without_a_loss_add_nothing() -> None:
    assert _judge(_word(loss_sum=6.0), _word(reports=0, loss_sum=9.0), denominator=3).loss == 2.0
    assert _judge(_word(reports=0), _word(reports=0)).loss is None


def test_what_tp_ranks_report_together_counts_once() -> None:
    """Ranks (dp, tp): (0, 0) (0, 1) (1, 0) (1, 1). Of one dp coordinate it is the first that reported."""
    words = [_word(loss_sum=n) for n in (1.0, 1.0, 4.0, 4.0)]
    assert _judge(*words, mesh={"pp": 1, "dp": 2, "tp": 2}).loss == 5.0
    words[2] = _word(reports=0)
    assert _judge(*words, mesh={"pp": 1, "dp": 2, "tp": 2}).loss == 5.0


def test_stages_add_up() -> None:
    """Ranks (pp, dp, tp): the first stage has none, or one of its own; tp ranks have the same."""
    mesh = {"pp": 2, "dp": 1, "tp": 2}
    last = [_word(loss_sum=6.0)] * 2
    assert _judge(_word(reports=0), _word(reports=0), *last, mesh=mesh).loss == 6.0
    assert _judge(_word(loss_sum=0.5), _word(loss_sum=0.5), *last, mesh=mesh).loss == 6.5


def test_replicated_is_the_slowest_ranks() -> None:
    assert _judge(_word(replicated=4), _word(replicated=3), _word(replicated=4)).replicated == 3


def test_the_attempt_is_rank_0s() -> None:
    verdict = _judge(_word(attempt=255), _word(attempt=7, stop=True))
    assert verdict.attempt == attempt_name(255) == "00000000000000ff"
    assert (verdict.told, verdict.stop) == (1, False)
    quiet = _judge(_word(), _word(attempt=7))
    assert quiet.attempt is None
    assert (quiet.told, quiet.stop) == (0, False)


def test_only_if_all_are_told_to_stop_do_all_stop() -> None:
    assert _judge(_word(stop=True), _word(stop=True)).stop
    assert not _judge(_word(stop=True), _word(stop=True), _word(), mesh={"dp": 3}).stop


@pytest.mark.parametrize("changes", [{"step": 6}, {"generation": 1}])
def test_words_of_another_step_or_generation_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(RanksDisagreeError, match="rank 1"):
        _judge(_word(), _word(**changes))

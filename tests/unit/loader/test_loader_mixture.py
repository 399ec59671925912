import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.loader.errors import MixtureError
from surefoot.loader.mixture import Draw, MixState, Mixture, Source, exact_weight, next_source, whole_shares

NAMES = "abcdefghijkl"
weights = st.lists(st.integers(0, 100), min_size=1, max_size=12).filter(any)


def mixture(weight_list, **settings_of_all):
    return Mixture(
        [Source(NAMES[i], "x", weight=w, **settings_of_all) for i, w in enumerate(weight_list)], seed=1
    )


def draw_names(draw, count):
    names = []
    while len(names) < count and (turn := draw.peek()) is not None:
        names.append(turn[0])
        draw.take()
    return names


@settings(deadline=None, max_examples=60)
@given(weights)
def test_the_mix_is_within_one_sample_of_its_weights_at_every_prefix(weight_list):
    draw = Draw(mixture(weight_list), {name: 10**9 for name in NAMES[: len(weight_list)]})
    total = sum(weight_list)
    counts = dict.fromkeys(NAMES, 0)
    for n, name in enumerate(draw_names(draw, min(400, 2 * total)), 1):
        counts[name] += 1
        for i, weight in enumerate(weight_list):
            assert abs(n * weight - counts[NAMES[i]] * total) < total


def test_the_largest_deficit_alone_strays_further():
    """Why the draw looks at due dates: the plain rule breaks the bound on these very weights."""
    weight_list = [1, 100, 3, 100, 100, 1, 3, 100, 5, 100, 20, 1]
    total, counts, worst = sum(weight_list), [0] * 12, 0
    for n in range(1, total + 1):
        i = max(range(12), key=lambda i: (n * weight_list[i] - counts[i] * total, -i))
        counts[i] += 1
        worst = max(worst, *(abs(n * w - c * total) for w, c in zip(weight_list, counts, strict=True)))
    assert worst > total


@settings(deadline=None, max_examples=60)
@given(weights, st.data())
def test_any_state_gives_the_same_continuation(weight_list, data):
    policies = data.draw(st.lists(st.sampled_from(["repeat", "stop"]), min_size=12, max_size=12))
    rows = {name: data.draw(st.integers(0, 30)) for name in NAMES[: len(weight_list)]}
    mix = Mixture(
        [Source(NAMES[i], "x", weight=w, when_used_up=policies[i]) for i, w in enumerate(weight_list)],
        seed=1,
    )
    draw = Draw(mix, rows)
    draw_names(draw, data.draw(st.integers(0, 80)))
    again = Draw(mix, rows, draw.state)
    assert draw_names(again, 50) == draw_names(draw, 50)
    assert again.state == draw.state


def test_the_state_is_a_value_that_later_draws_leave_alone():
    draw = Draw(mixture([1, 1]), {"a": 5, "b": 5})
    before = draw.state
    draw_names(draw, 3)
    assert before == MixState(drawn={"a": 0, "b": 0}, segment={"a": 0, "b": 0})


def test_peeking_changes_nothing():
    draw = Draw(mixture([2, 1]), {"a": 5, "b": 5})
    assert draw.peek() == draw.peek() == ("a", 0)
    assert draw.state == Draw(mixture([2, 1]), {"a": 5, "b": 5}).state


def test_the_order_in_which_sources_are_listed_has_no_meaning():
    sources = [Source(n, "x", weight=w) for n, w in (("a", 0.4), ("b", 0.3), ("c", 0.2), ("d", 0.1))]
    rows = dict.fromkeys("abcd", 100)
    expected = draw_names(Draw(Mixture(sources, seed=1), rows), 100)
    random.Random(5).shuffle(sources)
    assert draw_names(Draw(Mixture(sources, seed=1), rows), 100) == expected


def test_sources_that_stop_leave_and_the_others_share_what_was_theirs():
    draw = Draw(mixture([1, 1, 2], when_used_up="stop"), {"a": 5, "b": 50, "c": 50})
    names = draw_names(draw, 1000)
    assert [names.count(n) for n in "abc"] == [5, 50, 50]
    gone = max(i for i, n in enumerate(names) if n == "a") + 1
    after = names[gone : gone + 60]
    for n in range(1, len(after) + 1):
        assert abs(3 * after[:n].count("c") - 2 * n) < 3
    assert draw.peek() is None
    with pytest.raises(RuntimeError, match="ended"):
        draw.take()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.data())
def test_from_the_step_on_where_a_source_leaves_the_rest_is_within_one_sample_again(weight_list, data):
    names = NAMES[: len(weight_list)]
    rows = {name: data.draw(st.integers(1, 40)) for name in names}
    draw = Draw(mixture(weight_list, when_used_up="stop"), rows)
    weight, left = dict(zip(names, weight_list, strict=True)), dict(rows)
    counts, n = dict.fromkeys(names, 0), 0
    for name in draw_names(draw, sum(rows.values())):
        counts[name], n, left[name] = counts[name] + 1, n + 1, left[name] - 1
        total = sum(weight[other] for other in counts)
        for other in counts:
            assert abs(n * weight[other] - counts[other] * total) < total
        if not left[name]:
            counts, n = {other: 0 for other in counts if left[other]}, 0
    assert not any(left.values())


def test_sources_without_rows_or_weight_are_never_drawn():
    draw = Draw(mixture([1, 1, 0, 1]), {"a": 3, "b": 0, "c": 9, "d": 3})
    assert set(draw_names(draw, 50)) == {"a", "d"}
    without = Draw(mixture([1, 0, 0, 1]), {"a": 3, "b": 7, "c": 9, "d": 3})
    assert draw_names(without, 50) == draw_names(
        Draw(mixture([1, 1, 0, 1]), {"a": 3, "b": 0, "c": 9, "d": 3}), 50
    )


def test_a_source_that_repeats_goes_on_counting():
    draw = Draw(mixture([1]), {"a": 2})
    numbers = []
    for _ in range(5):
        turn = draw.peek()
        assert turn is not None
        numbers.append(turn[1])
        draw.take()
    assert numbers == [0, 1, 2, 3, 4]


def test_weights_are_exact():
    assert exact_weight(0.7) == Fraction(7, 10)
    assert exact_weight(3) == 3
    assert exact_weight(Fraction(1, 3)) == Fraction(1, 3)
    assert whole_shares({"b": Fraction(7, 10), "a": Fraction(3, 10), "c": Fraction(0)}) == {"a": 3, "b": 7}


def test_ties_go_to_the_smaller_name():
    assert next_source({"b": 1, "a": 1}, {"a": 0, "b": 0}) == "a"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Source("", "x"), "needs a name"),
        (lambda: Source("a:b", "x"), "no colon"),
        (lambda: Source("a b", "x"), "no colon, space"),
        (lambda: Source("a" * 201, "x"), "200 is the limit"),
        (lambda: Source("a", ""), "'a': url must be"),
        (lambda: Source("a", "x", column=""), "'a': column must be"),
        (lambda: Source("a", "x", weight=-1), "must not be below 0, and is -1"),
        (lambda: Source("a", "x", weight=float("nan")), "'a': the weight must be finite, not nan"),
        (lambda: Source("a", "x", weight=float("inf")), "must be finite"),
        (lambda: Source("a", "x", weight="1"), "must be a number, not '1'"),
        (lambda: Source("a", "x", weight=True), "must be a number, not True"),
        (lambda: Source("a", "x", when_used_up="end"), "'repeat' or 'stop', not 'end'"),
        (lambda: Source("a", "x", block_rows=0), "block_rows must be a whole number above 0"),
        (lambda: Source("a", "x", window_blocks=0), "window_blocks must be a whole number above 0"),
        (lambda: Mixture([], seed=1), "at least one source"),
        (lambda: Mixture([Source("a", "x"), Source("a", "y")], seed=1), "two sources are named 'a'"),
        (lambda: Mixture([Source("a", "x", weight=0)], seed=1), "every source has weight 0"),
        (lambda: Mixture(["a"], seed=1), "made of Source objects"),
        (lambda: Mixture([Source("a", "x")], seed=-1), "seed must be a whole number"),
        (lambda: Mixture([Source("a", "x")], seed=2**64), "seed must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(MixtureError, match=says):
        make()

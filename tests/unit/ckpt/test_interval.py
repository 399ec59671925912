"""How often to save: the formulas, the rate of faults, the cost, and seconds turned into steps."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt.planning.interval import (
    INTERVAL_S_MAX,
    INTERVAL_S_MIN,
    PRIOR_MTBF_S,
    CostMeter,
    Pace,
    choose,
    daly_s,
    faults_of,
    mtbf_of,
    young_s,
)
from surefoot.ckpt.record import Record, StartRef


def waste(t: float, cost: float, mtbf: float) -> float:
    """Daly's expected wall time per second of computing, with a restart that is free (2006, equation 20)."""
    return mtbf / t * math.expm1((t + cost) / mtbf)


@pytest.mark.parametrize(
    ("cost", "mtbf"), [(1.0, 86400.0), (30.0, 3600.0), (300.0, 3600.0), (1000.0, 3000.0)]
)
def test_daly_is_near_the_true_optimum_and_young_is_not_always(cost: float, mtbf: float) -> None:
    best = min((waste(t, cost, mtbf), t) for t in [mtbf * i / 2000 for i in range(1, 4000)])
    assert waste(daly_s(cost, mtbf), cost, mtbf) <= best[0] * 1.001
    if cost > mtbf / 20:
        assert waste(young_s(cost, mtbf), cost, mtbf) > waste(daly_s(cost, mtbf), cost, mtbf)


def test_where_a_save_takes_longer_than_faults_are_apart() -> None:
    assert daly_s(100.0, 50.0) == 50.0


@given(st.floats(0, 1e5), st.integers(0, 1000), st.floats(0, 1e8))
def test_what_is_chosen_stays_within_bounds_and_says_why(cost: float, faults: int, observed: float) -> None:
    c = choose(cost_s=cost, faults=faults, observed_s=observed)
    assert INTERVAL_S_MIN <= c.interval_s <= INTERVAL_S_MAX
    assert f"{faults} fault" in c.why
    assert c.clamped == ("bound" in c.why)


def test_more_faults_mean_more_saves_and_dearer_saves_mean_fewer() -> None:
    calm = choose(cost_s=2, faults=0, observed_s=3600)
    assert choose(cost_s=2, faults=9, observed_s=3600).interval_s < calm.interval_s
    assert choose(cost_s=8, faults=0, observed_s=3600).interval_s == pytest.approx(
        2 * calm.interval_s, rel=0.02
    )
    assert mtbf_of(0, 0) == PRIOR_MTBF_S
    with pytest.raises(ValueError, match="negative"):
        choose(cost_s=-1, faults=0, observed_s=0)


def record(generation: int, reason: str, *, rollback: bool = False, by: str = "alone:h:1:x") -> Record:
    start = StartRef(generation=generation - 1, step=1) if generation > 1 else StartRef()
    return Record(generation=generation, start=start, rollback=rollback, reason=reason, created_by=by)


def test_faults_are_read_from_the_reasons_of_generations() -> None:
    records = [
        record(1, "first_start"),
        record(2, "replace node_loss n2 is gone"),
        record(3, "burnt"),
        record(4, "restart rank_exit rank 3: SIGKILL"),
        record(5, "resume"),
        record(6, "rollback", rollback=True),
        record(7, "start", by="import:h:1:x"),
        record(8, "start"),
    ]
    assert faults_of({r.generation: r for r in records}) == 3
    assert faults_of({}) == 0


def test_the_cost_of_a_save_is_its_stall_and_what_it_takes_from_the_steps_beside_it() -> None:
    meter, now = CostMeter(), 0.0
    for step in range(40):
        busy = step % 10 in (1, 2, 3) and step > 10
        now += 1.5 if busy else 1.0
        meter.step_ended(now, uploading=busy)
        if step % 10 == 0 and step:
            now += 0.25
            meter.save_returned(now, 0.25)
    assert meter.step_s == 1.0
    assert meter.cost_s == pytest.approx(0.25 + 1.5)


def test_nothing_is_known_before_the_first_save() -> None:
    assert CostMeter().cost_s is None
    assert CostMeter().step_s is None


@pytest.mark.parametrize("seed", range(5))
def test_seconds_become_steps_with_few_questions(seed: int) -> None:
    draw = random.Random(seed)
    pace, now, ask_at, saves, asked = Pace(600.0), 0.0, 1, [], 0
    for step in range(1, 6001):
        now += draw.uniform(0.5, 1.5)
        if step < ask_at:
            continue
        asked += 1
        due = pace.ask(step, now, 1.0)
        ask_at = due.ask_at
        assert ask_at > step
        if due.save:
            saves.append(now)
    gaps = [b - a for a, b in itertools.pairwise(saves)]
    assert len(saves) == pytest.approx(6000 / 600, abs=1)
    assert all(600 <= g < 603 for g in gaps), gaps
    assert asked / len(saves) < 16


def test_without_a_step_time_every_step_asks() -> None:
    pace = Pace(10.0)
    assert pace.ask(1, 0.0, None) == pace.__class__(10.0).ask(1, 0.0, None)
    assert pace.ask(2, 1.0, None).ask_at == 3
    assert not pace.ask(3, 2.0, None).save
    assert pace.ask(4, 11.0, None).save


def test_what_was_loaded_counts_as_saved() -> None:
    pace = Pace(10.0)
    pace.begin(100.0)
    assert not pace.ask(1, 101.0, 1.0).save

"""Random histories through the real core: seeded, in virtual time, judged by the invariants (tests/sim/toy_world.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.toy_world import TwoRuns, World

from surefoot.controller.core import forming, invariants, starting

SEEDS = 200
BATCH = 20


@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_random_histories(batch: int) -> None:
    """Nothing breaks while everything goes wrong; when it stops, the job ends with all that was acknowledged."""
    fired, seen = 0, Counter[str]()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        world = World(seed)
        world.run()
        assert world.broken == [], f"seed {seed}: {world.faults}"
        fired += len(world.faults)
        for record in world.records.values():
            reason, start = record.plan["reason"], record.plan["start"]
            seen.update({reason["kind"], reason["fault"], start["tier"]})
    assert fired > 2 * BATCH
    # A batch in which these did not come up would prove little.
    assert {"restart", "replace", "burnt", "node_loss", "rank_exit", "hang", "memory", "object_store"} <= set(
        seen
    )


def test_same_seed_same_history() -> None:
    def history(seed: int) -> tuple[object, ...]:
        world = World(seed)
        world.run()
        return (world.clock.now, world.revision, world.faults, world.acked, sorted(world.records))

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_races_between_commit_and_record() -> None:
    """The same where that race is likely, and steps turn out damaged; with the second listing it is won each time (the negative
    controls are below)."""
    seen, rollbacks = Counter[str](), 0
    for seed in range(BATCH):
        world = World(seed, racy=True)
        world.run()
        assert world.broken == [], f"seed {seed}: {world.faults}"
        for record in world.records.values():
            seen.update({record.plan["reason"]["kind"], record.plan["reason"]["fault"]})
            rollbacks += record.rollback
    assert {"burnt", "step_damaged"} <= set(seen)
    assert rollbacks > seen["step_damaged"]  # some of them found by `ckpt verify`, while ranks train on


@pytest.mark.parametrize("batch", range(5))
def test_two_runs_on_one_root(batch: int) -> None:
    """The newest record wins, the other run ends; there is one lineage, and all that was acknowledged is on it."""
    taken_over, ended = Counter[str](), Counter[int]()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        two = TwoRuns(seed, racy=bool(seed % 2))
        two.run()
        assert two.broken == [], f"seed {seed}: {[w.faults for w in two.runs.values()]}"
        taken_over.update(two.taken_over)
        ended[len(two.taken_over)] += 1
    assert taken_over["run1"] > BATCH / 4  # a batch without these would prove little
    assert taken_over["run2"] > 0
    assert ended[1] > BATCH / 2


def test_undisturbed_history() -> None:
    """Without faults: one generation, no incident, every checkpoint acknowledged."""
    world = World(1)
    world.calm = True
    world.clock.run(200.0, lambda: world.done)
    assert world.broken == []
    assert sorted(world.records) == [1]
    assert sorted(step for _, step in world.acked) == list(range(5, 101, 5))


def _seeds_until_red(most: int, **sabotage: bool) -> int:
    for seed in range(most):
        world = World(seed, **sabotage)
        world.run()
        if world.broken:
            return seed
    pytest.fail(f"{sabotage or 'the sabotage'} was not found in {most} seeds")


def test_negative_control_no_second_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second listing something acknowledged gets lost, and that is seen."""
    monkeypatch.setattr(forming, "_why_burnt", lambda d, stage: None)
    _seeds_until_red(100, racy=True)


def test_negative_control_a_rollback_does_not_look_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left behind on purpose is one thing, what is acknowledged meanwhile another."""
    look = starting.left_behind

    def blind(truth: object, start: object, *, ran: int, avoided: object = None) -> str | None:
        return None if avoided else look(truth, start, ran=ran)

    for module in (starting, invariants):
        monkeypatch.setattr(module, "left_behind", blind)
    _seeds_until_red(200, racy=True)


def test_negative_control_no_fence() -> None:
    """With etcd's condition switched off two controllers publish, and that is seen."""
    _seeds_until_red(400, fenced=False)


def _two_runs_until_red(most: int) -> None:
    for seed in range(most):
        two = TwoRuns(seed, racy=True)
        two.run()
        if two.broken:
            return
    pytest.fail(f"the sabotage was not found in {most} seeds")


def test_negative_control_nobody_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that step over each other's generations: two lineages, and that is seen."""
    for module in (starting, invariants):
        monkeypatch.setattr(module, "newer_run", lambda truth, run_id: None)
    _two_runs_until_red(20)

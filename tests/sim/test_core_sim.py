"""Random histories through the real core: seeded, in virtual time, judged by the invariants (tests/sim/toy_world.py)."""

from __future__ import annotations

import pytest
from tests.sim.toy_world import World

from surefoot.controller.core import forming

SEEDS = 200
BATCH = 20


@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_random_histories(batch: int) -> None:
    """Nothing breaks while everything goes wrong; when it stops, the job ends with all that was acknowledged."""
    fired = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        world = World(seed)
        world.run()
        assert world.broken == [], f"seed {seed}: {world.faults}"
        fired += len(world.faults)
    assert fired > 2 * BATCH


def test_same_seed_same_history() -> None:
    def history(seed: int) -> tuple[object, ...]:
        world = World(seed)
        world.run()
        return (world.clock.now, world.revision, world.faults, world.acked, sorted(world.records))

    assert history(5) == history(5)
    assert history(5) != history(6)


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
    _seeds_until_red(400)


def test_negative_control_no_fence() -> None:
    """With etcd's condition switched off two controllers publish, and that is seen."""
    _seeds_until_red(400, fenced=False)

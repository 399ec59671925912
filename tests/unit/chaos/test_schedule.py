"""The demo's schedule is a function of its seed, and leaves the run room to heal between faults."""

import pytest

from surefoot.chaos.schedule import STEPS_MIN, demo_schedule


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("steps", [STEPS_MIN, 60, 500])
def test_faults_come_in_order_and_inside_the_run(seed: int, steps: int):
    faults = demo_schedule(seed, steps=steps, nodes=2, ranks_per_node=2)
    assert [f.kind for f in faults] == ["rank_kill", "rank_hang", "node_loss", "controller_kill"]
    at = [f.step for f in faults]
    assert at == sorted(set(at))
    assert at[0] > 1
    assert at[-1] < steps
    assert all(f.target in range(2 if f.kind == "node_loss" else 4) for f in faults)


def test_the_same_seed_gives_the_same_schedule_and_seeds_differ():
    def of(seed: int):
        return demo_schedule(seed, steps=60, nodes=2, ranks_per_node=2)

    assert of(3) == of(3)
    assert len({of(seed) for seed in range(20)}) > 15


@pytest.mark.parametrize(
    ("steps", "nodes", "reason"), [(10, 2, "at least 20 steps"), (60, 1, "at least 2 nodes")]
)
def test_what_cannot_hold_four_faults_is_refused(steps: int, nodes: int, reason: str):
    with pytest.raises(ValueError, match=reason):
        demo_schedule(1, steps=steps, nodes=nodes, ranks_per_node=2)

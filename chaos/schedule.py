"""Which fault strikes what, and when: seeded data, PURE.

The demo's schedule is one of each kind, in an order in which none hides another, at seeded steps and on seeded targets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["rank_kill", "rank_hang", "node_loss", "controller_kill"]

WINDOWS: tuple[tuple[FaultKind, float, float], ...] = (
    ("rank_kill", 0.12, 0.22),
    ("rank_hang", 0.30, 0.42),
    ("node_loss", 0.50, 0.62),
    ("controller_kill", 0.72, 0.82),
)
"""The part of the run (fractions of its steps) in which each fault strikes. They leave room between them for the run to
be healed: a fault that strikes while the one before is still being handled is a harder test, and another one."""

STEPS_MIN = 20
"""Below this the windows run into each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` strikes `target` (a rank; for a node its index among the plan's members; unused for a controller) in step `step`."""

    kind: FaultKind
    step: int
    target: int


def demo_schedule(seed: int, *, steps: int, nodes: int, ranks_per_node: int) -> tuple[Fault, ...]:
    """The four faults of the demo.

    Raises:
        ValueError: the run is too short or too small for them.
    """
    if steps < STEPS_MIN:
        raise ValueError(f"the demo's four faults need at least {STEPS_MIN} steps, not {steps}")
    if nodes < 2:
        raise ValueError(
            f"the demo loses a whole node and restores it from a peer: it needs at least 2 nodes, not {nodes}"
        )
    rng = random.Random(seed)
    world = nodes * ranks_per_node

    def draw(kind: FaultKind, first: float, last: float) -> Fault:
        step = rng.randint(int(first * steps) + 1, int(last * steps))
        target = rng.randrange(nodes if kind == "node_loss" else world)
        return Fault(kind=kind, step=step, target=target)

    return tuple(draw(*window) for window in WINDOWS)

"""The victims of test_ckpt_kill_points.py, and the starts that come after them."""

from __future__ import annotations

import os
from typing import Any

import kill_points
import torch
from kill_points import Kill, Watch

from surefoot import ckpt

ELEMENTS = 600_000
"""2.4 MB: several writes of the uploader's."""


def state_at(step: int) -> dict[str, Any]:
    """Every element is its own index, and the step's. On each rank the same."""
    return {
        "w": torch.arange(ELEMENTS, dtype=torch.float32) + step,
        "b": torch.arange(5, dtype=torch.float64) - step,
        "epoch": step,
    }


def save(
    root: str, step: int, watch: dict[str, Any] | None = None, kill: dict[str, Any] | None = None
) -> None:
    """Load the newest step, save `step` in the background, and wait for it."""
    rank = int(os.environ["RANK"])
    if watch is not None:
        kill_points.install(Watch(**watch), f"rank{rank}")
    with ckpt.Checkpointer(root) as c:
        c.load(state_at(0))
        if watch is not None and rank == 0:
            kill_points.arm(watch["log"], Kill(**kill) if kill else None)
        c.save(step, state_at(step)).wait()
        print(f"acknowledged {step}", flush=True)


def go_on(roots: list[tuple[str, int]], step: int) -> None:
    """The next start on each of these roots: it loads the step that is expected, whole, and saves `step`."""
    for root, expected in roots:
        with ckpt.Checkpointer(root) as c:
            state = state_at(0)
            loaded = c.load(state)
            assert loaded is not None, root
            assert (loaded.step, loaded.passed_over) == (expected, ()), (root, loaded)
            for name, value in state_at(expected).items():
                assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), (root, name)
            c.save(step, state_at(step)).wait()

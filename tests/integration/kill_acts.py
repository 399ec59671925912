"""The victims of test_ckpt_kill_points.py, and the starts that come after them."""

from __future__ import annotations

import os
from typing import Any

import kill_points
import torch
import torch.distributed as dist
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
        state = state_at(0)
        loaded = ckpt.load(root, state)
        assert loaded is not None, root
        assert (loaded.step, loaded.passed_over) == (expected, ()), (root, loaded)
        for name, value in state_at(expected).items():
            assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), (root, name)
        ckpt.save(root, step, state_at(step))


def record(root: str, log: str) -> None:
    """Save steps 20 and 40; the points of the second are noted."""
    rank = int(os.environ["RANK"])
    kill_points.install(Watch(log=log, folder=root.removeprefix("file://")), f"rank{rank}")
    with ckpt.Checkpointer(root) as c:
        c.save(20, state_at(20)).wait()
        if rank == 0:
            kill_points.arm(log, None)
        dist.barrier()
        c.save(40, state_at(40)).wait()


def fail_each(root: str, steps: list[int]) -> list[str]:
    """Commit step 20, then save these steps, each of which the store refuses a rank, and then one more.

    Returns what this rank heard of each (empty: that it was committed).
    """
    heard: list[str] = []
    with ckpt.Checkpointer(root, deadline_s=60) as c:
        c.save(20, state_at(20)).wait()
        for step in steps:
            handle = c.save(step, state_at(step))
            try:
                handle.wait()
                heard.append("")
            except Exception as e:
                heard.append(f"{type(e).__name__}: {e}")
                c._in_flight = None  # it was waited for
            dist.barrier()
        c.save(steps[-1] + 1, state_at(steps[-1] + 1)).wait()
    return heard


def fail_at(root: str, log: str, kills: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """Commit step 20; then save a step per fault, all of which this rank meets together with the others; then one more.

    Returns, per fault, whether it fired, and what this rank heard of that save (empty: that it was committed).
    """
    rank = int(os.environ["RANK"])
    kill_points.install(Watch(log=log, folder=root.removeprefix("file://")), f"rank{rank}")
    heard: list[tuple[bool, str]] = []
    with ckpt.Checkpointer(root, deadline_s=20) as c:
        c.save(20, state_at(20)).wait()
        for i, kill in enumerate(kills):
            if rank == 0:
                kill_points.arm(log, Kill(**kill))
            dist.barrier()
            words = ""
            try:
                c.save(40 + i, state_at(40 + i)).wait()
            except Exception as e:
                words = f"{type(e).__name__}: {e}"
                c._in_flight = None  # it was waited for
            dist.barrier()
            heard.append((kill_points.fired(log), words))
            dist.barrier()
        c.save(40 + len(kills), state_at(40 + len(kills))).wait()
    return heard

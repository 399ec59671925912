"""Jobs for the tests of the command: ranks import this module by its name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from surefoot import agent, loader


def data(params: Mapping[str, Any]) -> tuple[loader.Mixture, loader.Pack]:
    source = loader.Source("text", params["text"], weight=1)
    return loader.Mixture([source], seed=3), loader.Pack(seq_len=32, step_tokens=128, microbatch_tokens=64)


def _loop(run: agent.Run, body: Any) -> None:
    value = torch.zeros(4)
    data = run.data()
    for step in run.steps({"value": value}, data):
        batch = next(data)
        value += batch.step  # the same on all ranks: it is a replica
        run.report(loss=1.0 / step)
        body(step)


def quick(run: agent.Run) -> None:
    """Does next to nothing in a step."""
    _loop(run, lambda step: None)


def slow(run: agent.Run) -> None:
    """Steps of a tenth of a second, so that there is time to disturb them."""
    _loop(run, lambda step: time.sleep(0.1))


def slow_with_children(run: agent.Run) -> None:
    """As `slow`, and each rank leaves a process of its own session behind that nobody would find by its parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    slow(run)


def broken(run: agent.Run) -> None:
    """Raises before the first step."""
    raise RuntimeError("the training function is broken on purpose")


def dies_once(run: agent.Run) -> None:
    """Rank 0 is killed in step 4, the first time."""
    marker = Path(os.environ["CLI_JOBS_MARKER"])

    def body(step: int) -> None:
        if run.rank == 0 and step == 4 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)

    _loop(run, body)

"""Ranks that train through an outage of the object store: an act for test_ckpt_outage.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot import ckpt

EVERY = 20
STEP_S = 0.005


def train(root: str, over: str) -> tuple[int, int]:
    """Train, saving every 20 steps, until `over` exists and a step from after that is committed.

    Returns that step, and the last one before.
    """
    w = torch.zeros(1000)
    rank = int(os.environ["RANK"])
    seen_over = 0
    last: ckpt.SaveHandle | None = None
    with ckpt.Checkpointer(root, busy="skip") as c:
        c.load({"w": w})
        step = 0
        while True:
            step += 1
            w += 1
            time.sleep(STEP_S)  # the step's work
            if step % EVERY:
                continue
            handle = c.save(step, {"w": w})
            word = torch.tensor([float(Path(over).exists())])
            dist.broadcast(word, src=0)
            if rank == 0:
                print(f"step {step}", flush=True)
            if word.item() and not seen_over:
                seen_over = step
            if seen_over and step > seen_over and (last := handle).wait() is not None:
                break
    assert last is not None
    return last.step, seen_over

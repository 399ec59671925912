"""Saves steps without Checkpointer, as agents do, and is killed on the way to the last: an act for test_ckpt_kill.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "ckpt"))

from ckpt_images import a_row, arrays, make_images  # pyright: ignore[reportMissingImports]

from surefoot import failpoint
from surefoot.ckpt import tiers
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import open_store

WRITERS = 2


def save(root: str, generation: int, start: tuple[int, int], steps: list[int], armed: str) -> None:
    """Save `steps` in a generation that starts from `start` (generation, step); ``NAME=crash`` takes effect in the last of them.
    Prints each step once it is acknowledged."""
    store = open_store(root)
    point = StartRef(generation=start[0], step=start[1])
    create_record(
        store, Record(generation=generation, start=point, reason="test", created_by=f"victim{os.getpid()}")
    )
    for step in steps:
        failpoint.arm(failpoint.parse(armed) if step == steps[-1] else None)
        rows = a_row(step, generation)
        images = make_images(arrays(), WRITERS, step=step, generation=generation, ledger=rows)
        attempt = f"p{os.getpid()}-{step}"
        for writer, image in enumerate(images):
            tiers.upload_images(
                store,
                [image],
                generation=generation,
                step=step,
                attempt=attempt,
                writer=writer,
                deadline_s=60,
            )
        outcome = tiers.commit(
            store, generation=generation, step=step, attempt=attempt, writers=WRITERS, deadline_s=60, facts={}
        )
        assert isinstance(outcome, tiers.Committed), outcome
        print(step, flush=True)

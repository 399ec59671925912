"""Saves steps 20 and 40 without torch, and is killed on the way to the second: see test_ckpt_kill.py.

Arguments: root, generation, starting generation and step, then the steps to save; a failpoint armed in the environment of
the form ``NAME=crash`` takes effect in the last of them. Prints each step once it is acknowledged.
"""

import os
import sys

from ckpt_images import arrays, make_images

from surefoot import failpoint
from surefoot.ckpt import tiers
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import open_store

WRITERS = 2


def main() -> None:
    root, generation, start_generation, start_step = sys.argv[1], *map(int, sys.argv[2:5])
    steps = [int(s) for s in sys.argv[5:]]
    store = open_store(root)
    start = StartRef(generation=start_generation, step=start_step)
    create_record(
        store, Record(generation=generation, start=start, reason="test", created_by=f"victim{os.getpid()}")
    )
    for step in steps:
        failpoint.arm(failpoint.parse(os.environ.get("VICTIM_FAILPOINT", "")) if step == steps[-1] else None)
        images = make_images(arrays(), WRITERS, step=step, generation=generation)
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


if __name__ == "__main__":
    main()

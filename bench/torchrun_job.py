"""The benchmark's job as torchrun runs it: the GPT of examples/ in a plain loop, noting when each step ends.

It saves nothing and starts again at step 1 after a restart: what a job would spend on finding and loading a checkpoint
is not held against torchrun. ``torchrun … bench/torchrun_job.py HISTORY_FOLDER DATA_ROOT STEPS``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from surefoot import history
from surefoot.agent.clip import clip_grad_norm_
from surefoot.agent.seeding import seed_all, seed_of
from surefoot.examples import gpt
from surefoot.loader import Loader


def main(folder: Path, data_root: str, steps: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    history.open_history(folder / f"rank-{rank}-g{life}.jsonl", f"rank-{rank}")
    history.note("launched", step=0, generation=life, rank=rank)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    seed_all(seed_of(7, 0, 0))
    model, optim, sched = gpt.build(mesh["dp"], torch.device("cpu"))
    mix, pack = gpt.data({"data_root": data_root})
    for batch in Loader(mix, pack, dp_rank=rank, dp_size=world):
        history.note("step_begin", step=batch.step, generation=life, rank=rank)
        for mb in batch.microbatches:
            loss = gpt.sum_of_token_losses(model, mb, torch.device("cpu"))
            (loss * world / batch.global_valid_tokens).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        optim.zero_grad()
        dist.barrier()  # Surefoot's steps end with one small collective, too
        history.note("step_end", step=batch.step, generation=life, rank=rank)
        if batch.step == steps:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

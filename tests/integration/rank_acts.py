"""What the ranks of test_ranks.py do."""

import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist


def sums(start: int) -> tuple[int, int]:
    found = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(found)
    return int(found.item()), int(os.environ["WORLD_SIZE"])


def one_fails() -> None:
    print("before", flush=True)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def hangs() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def waits_to_be_killed() -> str:
    if dist.get_rank() == 1:
        print("ready", flush=True)
        threading.Event().wait()
    dist.destroy_process_group()
    return "survived"


def leaves_a_process_behind() -> None:
    subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])

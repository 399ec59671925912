"""Functions that tests have forked as ranks, in place of the session. Imported by zygotes, so light."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path


def nothing() -> int:
    return 0


def tell() -> int:
    """Write down what a forked rank finds around it."""
    facts = {
        "pid": os.getpid(),
        "sid": os.getsid(0),
        "rank": os.environ["RANK"],
        "cwd": os.getcwd(),
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": os.readlink("/proc/self/fd/0"),
        "random": random.random(),
    }
    print(facts)
    print("to stderr", file=sys.stderr)
    return 7


def say_and_sleep() -> int:
    print("asleep")
    time.sleep(600)
    return 0


def raise_error() -> int:
    raise RuntimeError("the stand-in raises")


def exit_with_words() -> int:
    sys.exit("no such luck")


def gloo_job() -> int:
    """Two ranks join through the agent's TCPStore and add up."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    Path(os.environ["RESULT"] + os.environ["RANK"]).write_text(str(total.item()))
    dist.destroy_process_group()
    return 0

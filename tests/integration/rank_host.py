"""The process that forks the ranks of tests: it imports torch once, so that an act of four ranks costs a few tenths of a second.

Started by ranks.py, which holds the other end of the connection, and ends with it. One act at a time: it forks the ranks,
tells their pids, tells how each ended, and last what the ranks left behind: it is a subreaper, so whatever a rank started
and did not end becomes its child.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import botocore.session
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel
from botocore.loaders import JSONFileLoader

import surefoot.ckpt.objects.s3
import surefoot.ckpt.saving.checkpointer  # noqa: F401  (once: the ranks are forked from here)
from surefoot.agent import linux

SHOW_STACKS = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads to its log."""
STARVED_S = 30.0
"""How long a process may want to run without being let, beyond its time: 0.05 s of processor time in 16 s were seen."""
IMPORTS_S = 1.0
"""Processor time in which any process of ours has come to the line that ties it to its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """`world` ranks call the function ``module:name`` with `args`. What they print goes to ``<folder>/<rank>.log``.
    What they started may live on for `orphans_s`."""

    world: int
    function: str
    args: tuple[Any, ...]
    folder: str
    environ: dict[str, str]
    orphans_s: float


def main() -> None:
    linux.die_with_parent(int(sys.argv[2]))
    linux.become_subreaper()
    torch.set_num_threads(1)
    warm_up()
    with Connection(int(sys.argv[1])) as test:
        test.send("ready")
        while True:
            try:
                act = Act(**test.recv())
            except EOFError:
                os._exit(0)  # a tidy end of the interpreter takes torch a second
            play(act, test)


def warm_up() -> None:
    """A first optimizer step imports the compiler, which takes a second: once here instead of once per rank."""
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.zeros(1)
    torch.optim.AdamW([p]).step()
    warm_up_s3()
    assert linux.threads_running() == 1, "a process that forks has one thread"


def warm_up_s3() -> None:
    """Each S3 client parses the description of the service, which takes 0.3 s: once here, and the ranks find it parsed."""
    parse = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda self, file_path: parse(file_path)
    loader = botocore.session.get_session().get_component("data_loader")
    for kind in ("service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"):
        loader.load_service_model("s3", kind)
    for data in ("endpoints", "partitions", "_retry", "sdk-default-configuration"):
        loader.load_data(data)


def play(act: Act, test: Connection) -> None:
    module = act.function.partition(":")[0]
    trouble = ""
    try:
        importlib.import_module(module)
    except Exception:
        trouble = traceback.format_exc()
    pids = [] if trouble else [fork_rank(act, rank) for rank in range(act.world)]
    test.send((pids, trouble))
    living = set(pids)
    while living:
        pid, status = os.waitpid(-1, 0)
        if pid in living:
            living.remove(pid)
            test.send((pids.index(pid), os.waitstatus_to_exitcode(status)))
    test.send(reap_orphans(act.orphans_s))


def fork_rank(act: Act, rank: int) -> int:
    host = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        linux.die_with_parent(host)
        log = os.open(f"{act.folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(SHOW_STACKS, file=2)
        be_rank(act, rank)
    finally:
        os._exit(1)


def be_rank(act: Act, rank: int) -> None:
    os.environ.clear()
    os.environ.update(act.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(act.world), MASTER_ADDR="127.0.0.1"
    )
    module, _, name = act.function.partition(":")
    code, result = 1, b""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{act.folder}/meet", rank=rank, world_size=act.world
        )
        value = getattr(importlib.import_module(module), name)(*act.args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        result = pickle.dumps((value, ""))
        code = 0
    except BaseException:
        result = pickle.dumps((None, traceback.format_exc()))
    Path(act.folder, f"{rank}.result").write_bytes(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reap_orphans(within_s: float) -> list[str]:
    """Wait for what the ranks started; returns the command lines of what would not end, and was killed. What gets no processor
    on a busy machine is given `STARVED_S` more."""
    until = time.monotonic() + within_s
    stubborn: list[str] = []
    while children := Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        late_s = time.monotonic() - until
        if late_s > STARVED_S or (late_s > 0 and not any(starved(Path("/proc", pid)) for pid in children)):
            for pid in children:
                stubborn.append(describe(Path("/proc", pid)))
                os.kill(int(pid), signal.SIGKILL)
                os.waitpid(int(pid), 0)
        elif os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.01)  # the pace of polling
    return stubborn


def starved(process: Path) -> bool:
    """It wants to run, and has hardly been let: it may not have come to the line by which it ends with its rank."""
    fields, used_s = used(process)
    return fields[0] in "RD" and used_s < IMPORTS_S


def used(process: Path) -> tuple[list[str], float]:
    """The fields of its status from the state on, and its seconds of processor time."""
    fields = (process / "stat").read_text().rpartition(") ")[2].split()
    return fields, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def describe(process: Path) -> str:
    """Its command line, and what may tell a process that hangs from one that is slow."""
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    fields, used_s = used(process)
    ticks = os.sysconf("SC_CLK_TCK")
    lived_s = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / ticks
    where = (process / "wchan").read_text() or "?"
    return f"{command} (state {fields[0]} in {where}, {used_s:.2f} s of CPU in {lived_s:.1f} s, {fields[17]} threads)"


if __name__ == "__main__":
    main()

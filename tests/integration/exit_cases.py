"""Scripts that end in one way or another while a save is under way: for test_ckpt_saving.py. Forks one interpreter per case.

Arguments: the root, then names of cases. Prints ``name code seconds`` for each, and what the case wrote to stderr.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import surefoot.ckpt.saving.checkpointer  # noqa: F401  (once, for all cases)
from surefoot import ckpt, failpoint

STATE: dict[str, Any] = {"w": torch.ones(1000)}


def committed_at_exit(root: str) -> None:
    failpoint.arm(failpoint.parse("upload.before_finish=delay:0.5"))
    c = ckpt.Checkpointer(root)
    c.save(1, STATE)


def failed_at_exit(root: str) -> None:
    failpoint.arm(failpoint.parse("upload.before_finish=error"))
    c = ckpt.Checkpointer(root)
    c.save(1, STATE)


def failed_and_noticed(root: str) -> None:
    failpoint.arm(failpoint.parse("upload.before_finish=error"))
    c = ckpt.Checkpointer(root)
    try:
        c.save(1, STATE).wait()
    except Exception:
        print("noticed", file=sys.stderr)


def failed_before_the_next(root: str) -> None:
    failpoint.arm(failpoint.parse("upload.before_finish=error"))
    c = ckpt.Checkpointer(root)
    c.save(1, STATE)
    c.save(2, STATE)


def interrupted(root: str) -> None:
    from surefoot.ckpt.saving import checkpointer as saving
    from surefoot.ckpt.saving import handles

    handles.GRACE_S = saving.GRACE_S = 0.5
    failpoint.arm(failpoint.parse("upload.before_finish=delay:300"))
    with ckpt.Checkpointer(root) as c:
        c.save(1, STATE)
        raise KeyboardInterrupt


def raised_without_close(root: str) -> None:
    from surefoot.ckpt.saving import handles

    handles.GRACE_S = 0.5
    failpoint.arm(failpoint.parse("upload.before_finish=delay:300"))
    c = ckpt.Checkpointer(root)
    c.save(1, STATE)
    raise ZeroDivisionError


def failed_in_a_child(root: str) -> None:
    p = multiprocessing.get_context("fork").Process(target=failed_at_exit, args=(root,))
    p.start()
    p.join()
    sys.exit(40 + p.exitcode)


def main() -> None:
    torch.set_num_threads(1)
    root, names = sys.argv[1], sys.argv[2:]
    begun, running = time.monotonic(), {}
    for name in names:
        said = tempfile.TemporaryFile()  # noqa: SIM115  (closed when its case has ended)
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 2)
            globals()[name](f"{root}/{name}")
            return  # and the interpreter ends as it does for any script
        running[pid] = (name, said)
    while running:
        pid, status = os.waitpid(-1, 0)
        name, said = running.pop(pid)
        took_s = time.monotonic() - begun
        with said:
            said.seek(0)
            text = said.read().decode().replace("\n", " | ")
        code = os.waitstatus_to_exitcode(status)
        print(f"{name} {code} {took_s:.1f} {left_behind(f'{root}/{name}')} {text}", flush=True)


def left_behind(root: str) -> int:
    """Processes that work on this root and do not end."""
    until = time.monotonic() + 5
    while True:
        left = [p for p in Path("/proc").glob("[0-9]*") if root.encode() in cmdline(p)]
        if not left or time.monotonic() > until:
            return len(left)
        time.sleep(0.02)  # the pace of polling


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


main()

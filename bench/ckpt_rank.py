"""One rank of the checkpoint benchmark: serves the orders of a `World` (ckpt_world.py), one after the other.

An order is the name of a public method of `Rank` and its words. All ranks get the same orders; what is timed begins at a
barrier and ends, on each rank, when its own part is done.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ckpt_peers
import ckpt_state
import paired
import torch
import torch.distributed as dist

from surefoot import ckpt

STEADY_STEPS = 10


def serve(rank: int, ranks: int, meet: str, orders: Connection) -> None:
    """Answer every order with (True, what it returned) or (False, its traceback), until told to end."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        me = Rank(rank)
        while (order := orders.recv()) is not None:
            name, words = order
            orders.send((True, getattr(me, name)(**words)))
        me.end()
        dist.destroy_process_group()
    except EOFError:
        pass  # the benchmark ended
    except BaseException:
        orders.send((False, traceback.format_exc()))


class Rank:
    """What one rank holds between orders."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._dcp = ckpt_peers.Dcp()
        self._checkpointer: ckpt.Checkpointer | None = None
        self._state: dict[str, Any] = {}
        self._views: list[memoryview] = []
        self._copy: torch.Tensor | None = None
        self._step = 0

    # ---- the state

    def build(self, *, layout: str, nbytes: int) -> int:
        """Returns the bytes that this rank holds."""
        self._state = ckpt_state.build(layout, nbytes)
        self._views = ckpt_peers.views_of(ckpt_state.locals_of(self._state))
        self._loop = ckpt_state.Loop(self._state)
        return sum(map(len, self._views))

    def train(self, *, steps: int) -> list[float]:
        return [self._loop.step() for _ in range(steps)]

    # ---- Surefoot

    def open(self, *, root: str, prepare: bool = False) -> None:
        """Use a checkpointer on `root` from now on, with all its defaults; `prepare` is what its `load` ends with."""
        self.end()
        self._checkpointer = ckpt.Checkpointer(root)
        if prepare:
            self._checkpointer.prepare(self._state)

    def end(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()
        gc.collect()

    @property
    def _c(self) -> ckpt.Checkpointer:
        assert self._checkpointer is not None, "open() comes first"
        return self._checkpointer

    def _next(self) -> int:
        self._step += 1
        return self._step

    def save(self) -> float:
        """A blocking save: it returns with the commit, and raises where there is none."""
        return self._timed(lambda: self._c.save(self._next(), self._state, blocking=True))

    def load(self, *, checked: bool) -> float:
        """Load the newest step into live memory."""
        return self._loaded(lambda: self._c.load(self._state), checked)

    def save_in_background(self) -> float:
        """Returns the seconds until it was committed; training goes on beside it."""
        begun = time.perf_counter()
        handle = self._c.save(self._next(), self._state)
        busy = True
        while busy:
            self._loop.step(not handle.done())
            busy = self._loop.busy
        handle.wait()
        return time.perf_counter() - begun

    # ---- steps that hold a save

    def memcpy(self) -> float:
        """Copy this rank's bytes into memory that was written before."""
        parts = ckpt_state.locals_of(self._state)
        if self._copy is None:
            self._copy = torch.zeros(sum(t.nbytes for t in parts), dtype=torch.uint8)
        copy = self._copy

        def work() -> None:
            at = 0
            for t in parts:
                copy[at : at + t.nbytes].copy_(t.view(-1).view(torch.uint8))
                at += t.nbytes

        return self._timed(work)

    def stall(self, *, of: str, to: str = "") -> dict[str, float]:
        """Train; save in one step; train until it is committed. `of`: ``ours``, ``dcp_thread``, ``dcp_process``."""
        gc.collect()
        steady = [self._loop.step() for _ in range(STEADY_STEPS)]
        begun = time.perf_counter()
        self._loop.step()
        done = self._begin(of, to)
        saving = time.perf_counter() - begun
        after = []
        busy = True
        while busy:
            after.append(self._loop.step(not done.done()))
            busy = self._loop.busy
        result = done.wait if isinstance(done, ckpt.SaveHandle) else done.result
        result()
        whole = time.perf_counter() - begun
        stall_s, drag_s = paired.stall_and_drag(steady, saving, after)
        return {
            "stall_s": stall_s,
            "drag_s": drag_s,
            "step_s": sorted(steady)[len(steady) // 2],
            "whole_s": whole,
        }

    def _begin(self, of: str, to: str) -> Any:
        if of == "ours":
            return self._c.save(self._next(), self._state)
        return self._dcp.async_save(self._state, to, process=of == "dcp_process")

    # ---- peers

    def raw_write(self, *, how: str, folder: str) -> float:
        path = Path(folder) / f"raw-{self._rank}"
        path.unlink(missing_ok=True)
        return self._timed(lambda: ckpt_peers.WRITERS[how](path, self._views))

    def raw_read(self, *, how: str, folder: str) -> float:
        path = Path(folder) / f"raw-{self._rank}"
        return self._timed(lambda: ckpt_peers.READERS[how](path, self._views))

    def dcp_save(self, *, to: str) -> float:
        return self._timed(lambda: self._dcp.save(self._state, to))

    def dcp_load(self, *, source: str, checked: bool) -> float:
        return self._loaded(lambda: self._dcp.load(self._state, source), checked)

    def boto3_put(self, *, bucket: str, part_nbytes: int) -> float:
        boto3 = ckpt_peers.Boto3(part_nbytes)
        return self._timed(lambda: boto3.put(bucket, f"boto3-{self._rank}", self._views))

    def boto3_get(self, *, bucket: str, part_nbytes: int, checked: bool) -> float:
        boto3 = ckpt_peers.Boto3(part_nbytes)
        return self._loaded(lambda: boto3.get(bucket, f"boto3-{self._rank}", self._views), checked)

    # ---- between turns

    def clear(self, *, folder: str) -> None:
        """Take away what lies in the folder, each rank its share of the files; the records of generations stay."""
        files = [p for p in Path(folder).rglob("*") if p.is_file() and p.parent.name != "generations"]
        files.sort(key=lambda p: (-p.stat().st_size, p))
        dist.barrier()
        for path in files[self._rank :: dist.get_world_size()]:
            path.unlink()
        dist.barrier()

    # ---- time

    def _timed(self, act: Callable[[], object]) -> float:
        gc.collect()
        dist.barrier()
        begun = time.perf_counter()
        act()
        return time.perf_counter() - begun

    def _loaded(self, act: Callable[[], object], checked: bool) -> float:
        if checked:
            ckpt_state.blank(self._state)
        took = self._timed(act)
        if checked:
            ckpt_state.check(self._state)
        return took

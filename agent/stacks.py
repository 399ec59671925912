"""Stacks of a hung rank, taken before it is ended.

``py-spy dump --nonblocking`` reads the process's memory without stopping it, so it works on a rank that holds the GIL for
ever or was stopped. It may do so because the rank permits its agent and the agent's children (PR_SET_PTRACER).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from surefoot.agent.exits import Whereabouts, whereabouts
from surefoot.agent.processes import Processes, WatchedProcess

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
"""The job waits meanwhile; a dump takes about half a second (py-spy reads torch's symbols), all ranks at once."""


async def dump_stacks(
    processes: Processes, pids: Mapping[int, int], folder: Path, generation: int
) -> dict[int, Whereabouts]:
    """Write ``stacks-g<generation>-r<rank>.txt`` for each rank (`pids`: rank to pid); returns where each one stands.

    Never fails and never takes longer than `DEADLINE_S`: without stacks a hang is still ended.
    """
    program = py_spy()
    if program is None:
        log.warning("no stacks: py-spy is not installed beside %s", sys.executable)
        return {}
    paths = {rank: folder / f"stacks-g{generation}-r{rank}.txt" for rank in pids}
    dumps: list[WatchedProcess] = []
    for rank, pid in pids.items():
        try:
            dumps.append(
                processes.spawn(
                    ["dump", "--nonblocking", "--pid", str(pid)],
                    program=program,
                    name=f"py-spy-r{rank}",
                    env=os.environ,
                    log_path=paths[rank],
                )
            )
        except OSError as e:
            log.warning("no stacks of rank %d: %s", rank, e)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(d.wait() for d in dumps))
    except TimeoutError:
        log.warning("stacks took more than %g s; going on with what there is", DEADLINE_S)
    finally:
        for dump in dumps:
            dump.kill_group()
    return {rank: whereabouts(_read(path)) for rank, path in paths.items()}


def py_spy() -> str | None:
    """The program, beside our interpreter or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

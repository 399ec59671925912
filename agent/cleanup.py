"""Ending everything that ranks leave behind: found by the mark, whatever its parent, group or session has become.

The ranks' own processes are ended through `processes.py`; this finds their children and children's children. The agent
itself and its living helpers carry the same mark and are spared by pid. `marks.end` does the same for other incarnations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection

from surefoot import history, marks
from surefoot.agent.errors import StillAliveError
from surefoot.failpoint import failpoint

PREDECESSORS_TIMEOUT_S = 10.0
"""A new incarnation has so long to end what the former left (CTL-33)."""


def end_predecessors(run_id: str, uid: str, incarnation: str) -> int:
    """End all processes of former incarnations of this node; blocks. Returns how many were found.

    Raises:
        StillAliveError: some would not end.
    """
    found = marks.find(run_id=run_id, node=uid, other_than_incarnation=incarnation)
    failpoint("cleanup.before_kill")
    if not found:
        return 0
    with history.operation("stop", what="predecessors", pids=[p.pid for p in found]) as result:
        survivors = marks.end(found, timeout_s=PREDECESSORS_TIMEOUT_S)
        result["survivors"] = [p.pid for p in survivors]
    if survivors:
        raise StillAliveError(_complaint(survivors, PREDECESSORS_TIMEOUT_S, "of a former life of this node"))
    return len(found)


async def end_leftovers(
    run_id: str,
    uid: str,
    *,
    quiet: Callable[[], Awaitable[None]],
    spared: Callable[[], Collection[int]],
    timeout_s: float,
) -> int:
    """SIGKILL all marked processes of this node but the spared, until none is left. Returns how many were ended.

    Args:
        quiet: waits until nothing is being forked, so that whatever is ours is known by its pid.
        spared: looked at before each scan; both run in the event loop, so nothing can be started between them.

    Raises:
        StillAliveError: some would not end within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    ended: set[int] = set()
    empty_scans = 0
    # Why several: marks.EMPTY_SCANS.
    while empty_scans < marks.EMPTY_SCANS:
        await quiet()
        keep = {*spared(), *_self_and_parents()}
        left = [p for p in marks.find(run_id=run_id, node=uid) if p.pid not in keep]
        if left and time.monotonic() >= deadline:
            raise StillAliveError(_complaint(left, timeout_s, "of ranks that were ended"))
        empty_scans = 0 if left else empty_scans + 1
        failpoint("cleanup.before_kill")
        await asyncio.gather(*(_kill(p, deadline) for p in left))
        ended.update(p.pid for p in left)
        await asyncio.sleep(0)
    return len(ended)


async def _kill(process: marks.MarkedProcess, deadline: float) -> None:
    """SIGKILL this very process, and wait for its end or the deadline."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        if marks.start_time(process.pid) != process.start_time:
            return  # that pid went to another
        loop.add_reader(pidfd, gone.set)
        with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            async with asyncio.timeout_at(loop.time() + max(0.0, deadline - time.monotonic())):
                await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _complaint(processes: Collection[marks.MarkedProcess], timeout_s: float, whose: str) -> str:
    pids = ", ".join(str(p.pid) for p in processes)
    return (
        f"processes {pids} {whose} did not end within {timeout_s:g} s of SIGKILL: they hang in the kernel (a dead "
        "network file system, a device) or are started anew; no rank is started beside them. End them, or reboot the node."
    )


def _self_and_parents() -> set[int]:
    """This process and those that started it: a wrapper around the agent may carry its mark."""
    pids: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        pid = _parent_of(pid)
    return pids


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0

"""The rank's snapshot slots: files in the node's shared memory that the agent owns and the rank writes.

Which slot may be overwritten is decided by `choose_slot`, a pure function. A snapshot is given up only when a newer one
is replicated for *all* ranks: until then it may be the job's only way back. An upload does not hold a slot: the agent
puts what it will upload aside before it calls the snapshot replicated.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

from surefoot.agent.failures import StartupError
from surefoot.controller.wire import PoolReadyMsg

SLOTS = 3
"""One that is replicated for all ranks, one whose replication is only known for this one, one being written."""


def choose_slot(held: Sequence[int | None], replicated: int) -> int | None:
    """The slot to write next, or None while there is none.

    Args:
        held: per slot the step of its snapshot, None if it holds nothing of use.
        replicated: the newest step whose snapshots are replicated for all ranks; what is older may go.
    """
    for slot, step in enumerate(held):
        if step is None:
            return slot
    old = [(step, slot) for slot, step in enumerate(held) if step is not None and step < replicated]
    return min(old)[1] if old else None


def holdings(
    ready: PoolReadyMsg, known: Mapping[str, int | None], start_step: int | None
) -> list[int | None]:
    """Per slot the step that it holds and that must be kept; None: the slot is free.

    Args:
        ready: says what the slots hold of the starting point.
        known: what this life has put into slots, by path: a slot that has only grown keeps what it holds.
        start_step: of the starting point, if it was restored from memory. Everything else that stands in slots older
            than this life has served, or lies on a path that the plan has left.
    """
    return [
        known[path] if path in known else (start_step if ready.held.get(slot) == start_step else None)
        for slot, path in enumerate(ready.paths)
    ]


class SlotPool:
    """The mapped slots of this rank. Not thread-safe: the training thread's own."""

    def __init__(self) -> None:
        self.slot_bytes = 0
        self.held: list[int | None] = []
        self._paths: tuple[str, ...] = ()
        self._maps: list[mmap.mmap] = []

    def open(self, ready: PoolReadyMsg, *, slot_bytes: int, start_step: int | None) -> None:
        """Map the slot files of `ready`, in place of former ones. `start_step`: see `holdings`.

        Raises:
            StartupError: a file is missing or smaller than `slot_bytes`.
        """
        self.held = holdings(ready, dict(zip(self._paths, self.held, strict=True)), start_step)
        self._paths = ready.paths
        self.close()
        self._maps = [_map(path, slot_bytes) for path in ready.paths]
        self.slot_bytes = slot_bytes

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes, writable; as many as the file has."""
        return memoryview(self._maps[slot])

    def close(self) -> None:
        for mapped in self._maps:
            mapped.close()
        self._maps = []


def _map(path: str, slot_bytes: int) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise StartupError(f"the agent's snapshot slot {path} cannot be opened: {e.strerror}") from e
    try:
        size = os.fstat(fd).st_size
        if size < slot_bytes:
            raise StartupError(
                f"the agent's snapshot slot {path} has {size} bytes, {slot_bytes} were asked for"
            )
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)

"""Ranks for test_ckpt_gone.py: one of them dies, is stopped or leaves in the middle of a call that all make together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loading_acts import state_of

from surefoot import ckpt
from surefoot.ckpt import channel, late
from surefoot.ckpt.errors import ElsewhereError
from surefoot.ckpt.loading import carrying, fetching, nodememory, sharing, together
from surefoot.ckpt.saving import calls
from surefoot.ckpt.saving.generation import OwnGeneration

LATE_S = 3.0
"""Longer than a rank may be silent here."""


def quick() -> None:
    """The same in less time, but for a busy machine still enough."""
    channel.SILENT_S = 3.0
    channel.GOODBYE_S = 1.0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise MemoryError("of this rank alone")


ENDS = {"kill": kill, "stop": stop, "interrupt": interrupt, "fail": fail}


def before(owner: Any, name: str, act: Callable[[], None], *, call: int = 1) -> None:
    """Whoever comes to this call of a function does `act` instead."""
    real, calls = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


PLACES: dict[str, tuple[Any, str, int]] = {
    "agreement": (channel.StoreChannel, "_answer", 2),
    "manifest": (sharing.SharingParty, "from_first", 1),
    "memory": (carrying, "meet", 1),
    "vote": (sharing.SharingParty, "vote", 2),
    "transfer": (sharing.SharingParty, "post", 1),
    "outcome": (together, "_word_of", 1),
    "generation": (OwnGeneration, "open", 1),
}
"""Where the rank goes: an owner, one of its functions, and which call of that."""


def load(root: str, victim: int, place: str, end: str, layout: str, by: str) -> None:
    """All load; `by` as in loading_acts."""
    quick()
    fetching.NEARBY = fetching.NEARBY._replace(round_nbytes=2**20)
    nodememory.ENABLED = by != "group"
    fetching.machine = lambda: f"machine {dist.get_rank()}"
    c = ckpt.Checkpointer(root)
    state = state_of(layout, filled=False)
    dist.barrier()
    one_goes(victim, place, end, lambda: c.load(state))
    c.close()
    print("closed", flush=True)
    os._exit(0)


def save(root: str, victim: int, place: str, end: str) -> None:
    """All begin a first save."""
    quick()
    c = ckpt.Checkpointer(root)
    state = {"w": torch.ones(8)}
    dist.barrier()
    one_goes(victim, place, end, lambda: c.save(1, state))
    c.close()
    print("closed", flush=True)
    os._exit(0)


def load_again(root: str, victim: int) -> None:
    """It dies between two loads."""
    quick()
    c = ckpt.Checkpointer(root)
    state = state_of("fsdp", filled=False)
    c.load(state)
    dist.barrier()
    if dist.get_rank() == victim:
        kill()
    with pytest.raises(ElsewhereError) as caught:
        c.load(state)
    print(f"told: {caught.value}", flush=True)
    c.close()
    print("closed", flush=True)
    os._exit(0)


def one_goes(victim: int, place: str, end: str, call: Callable[[], Any]) -> None:
    if dist.get_rank() == victim:
        owner, name, nth = PLACES[place]
        before(owner, name, ENDS[end], call=nth)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            call()
        print("gone", flush=True)
        return
    with pytest.raises(ElsewhereError) as caught:
        call()
    print(f"told: {caught.value}", flush=True)


def load_late_and_slowly(root: str, what: str) -> int:
    """One rank comes when the others have waited for long; or is in, and slow. Nobody is taken for dead."""
    channel.SILENT_S = LATE_S / 3
    rank = dist.get_rank()
    state = state_of("fsdp", filled=False)
    with ckpt.Checkpointer(root) as c:
        dist.barrier()
        if rank == (0 if what == "late 0" else 2):
            lock = what == "locked"
            busy = lambda: ctypes.PyDLL(None).sleep(round(LATE_S)) if lock else time.sleep(LATE_S)  # noqa: E731  (what it is busy with)
            if what.startswith("late"):
                busy()
            elif what in ("slow reading", "locked"):
                before(carrying.Carrier, "run", busy)
            else:
                before(together, "_word_of", busy)
        loaded = c.load(state)
    assert loaded is not None
    return loaded.step


class Pinned(logging.Handler):
    """The first warning of the ranks' talk goes into a file, whole at once."""

    def __init__(self, at: Path) -> None:
        super().__init__(logging.WARNING)
        self._at = at

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == late.__name__:
            draft = self._at.with_suffix(".draft")
            draft.write_text(record.getMessage())
            draft.rename(self._at)


def comes_when_it_is_missed(root: str, note: str, who: int, opened: bool) -> None:
    """Rank `who` calls save when another has said in `note` that it waits for it, and all is well. `opened`: it is not the first call."""
    quick()
    late.LATE_S = 0.2
    state = {"w": torch.ones(8)}
    with ckpt.Checkpointer(root) as c:
        if opened:
            c.prepare(state)
        if dist.get_rank() == who:
            while not Path(note).exists():
                time.sleep(0.01)  # the pace of polling
        else:
            logging.getLogger().addHandler(Pinned(Path(note)))
        c.save(1, state).wait()


def saves_alone(root: str, who: int, opened: bool) -> str:
    """Only rank `who` calls save, until it has waited long enough. Returns what it is told."""
    quick()
    calls.CHANNEL_TIMEOUT_S = 3.0
    state, told = {"w": torch.ones(8)}, ""
    c = ckpt.Checkpointer(root)
    if opened:
        c.prepare(state)
    if dist.get_rank() == who:
        with pytest.raises(ElsewhereError) as caught:
            c.save(1, state)
        told = str(caught.value)
    dist.barrier()
    c.close()
    return told

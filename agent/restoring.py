"""Back to the starting point: from the tier that the plan names and no other, and then every rank hears what every rank holds."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from surefoot.agent.exchange import GatherWords, StepWord, unpack_word
from surefoot.agent.failures import StartCursorError, StartDamagedError, StartupError
from surefoot.ckpt.errors import DamagedError, StepMissingError
from surefoot.ckpt.manifest import LedgerRow, manifest_key
from surefoot.controller.wire import DamagedStep, StartingPoint

DAMAGE_CHARS_MAX = 500
"""Of what was wrong: it travels in statuses, and stands in the record of the next generation."""
CURSOR_CHARS_MAX = 100


class Restored(Protocol):
    """What a starting point brought back, besides the state itself (`ckpt.tiers.Restored`)."""

    @property
    def generation(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def cursor(self) -> Mapping[str, Any]: ...

    @property
    def ledger(self) -> Sequence[LedgerRow]: ...


def restored_from(
    start: StartingPoint,
    *,
    path: str | None,
    restore: Callable[[memoryview], Restored],
    restore_committed: Callable[[int, int], Restored],
) -> Restored:
    """Restore `start` from its tier, ``memory`` or ``object_store``.

    Args:
        path: the slot file that the agent names.
        restore: from a slot's bytes.
        restore_committed: from the object store, by generation and step.

    Raises:
        StartupError: it is in memory, but the agent names no slot.
        StartDamagedError: it is damaged, or missing, in the object store.
        CkptError: the snapshot in the slot is damaged.
    """
    if start.tier == "memory":
        if path is None:
            raise StartupError(f"the plan restores {_name(start)} from memory, but the agent names no slot")
        return _restore_slot(restore, path)
    try:
        return restore_committed(start.generation, start.step)
    except DamagedError as e:
        raise StartDamagedError(_damaged(start, e.key, str(e))) from e
    except StepMissingError as e:
        key = manifest_key(start.generation, start.step)
        raise StartDamagedError(_damaged(start, key, str(e))) from e


def _restore_slot(restore: Callable[[memoryview], Restored], path: str) -> Restored:
    """Restore from a slot file, read-only."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with mapped, memoryview(mapped) as buffer:
        return restore(buffer)


def require_start(restored: Restored, start: StartingPoint) -> None:
    """Raises: StartupError: something else was restored than was planned."""
    if (restored.generation, restored.step) != (start.generation, start.step):
        raise StartupError(
            f"the plan starts from {_name(start)}, but what was restored is "
            f"step {restored.step} of generation {restored.generation}"
        )


def require_cursor(cursor: Mapping[str, Any], start: StartingPoint) -> None:
    """A script may have saved without one, or with one of its own.

    Raises: StartCursorError: it is no cursor of the loader after the batch of the starting point's step.
    """
    if not cursor:
        lacks = "was saved without a loader cursor"
    elif "step" not in cursor:
        lacks = f"holds a cursor that is none of surefoot.loader's: {str(dict(cursor))[:CURSOR_CHARS_MAX]}"
    elif cursor["step"] != start.step:
        lacks = f"holds the loader's cursor after step {cursor['step']}, and here one batch is one step"
    else:
        return
    raise StartCursorError(
        f"{_name(start)} {lacks}: this job cannot tell where its data goes on. Either let the script that saved it read "
        "through surefoot.loader, one batch a step, and give c.save(…, cursor=batches.state_dict()); or give this job a root "
        "of its own (job.root) and take the weights from here, with ckpt.load(OLD_ROOT, state, strict=False) at the top of "
        "train: its steps and its data then begin anew"
    )


def agree_on_start(start: StartingPoint, gather_words: GatherWords) -> None:
    """Every rank gathers what every rank holds now; a difference would train on a state that never was.

    Raises:
        StartupError: they differ.
    """
    mine = StepWord(generation=start.generation, step=start.step)
    words = [unpack_word(values) for values in gather_words(mine.pack())]
    others = {(w.generation, w.step) for w in words} - {(start.generation, start.step)}
    if others:
        raise StartupError(f"this rank starts from {_name(start)}, others from {sorted(others)}")


def _damaged(start: StartingPoint, key: str, detail: str) -> DamagedStep:
    return DamagedStep(
        generation=start.generation, step=start.step, key=key, detail=detail[:DAMAGE_CHARS_MAX]
    )


def _name(start: StartingPoint) -> str:
    return f"step {start.step} of generation {start.generation}"

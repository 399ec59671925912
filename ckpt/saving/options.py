"""What callers of a `Checkpointer` hand in, looked at before anything is done."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from surefoot.ckpt.errors import CkptUserError, StateError


def whole_step(step: Any) -> int:
    """Raises CkptUserError for what is no step."""
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if found < 0:
        raise CkptUserError(f"{step!r} is no step: steps are whole numbers from 0")
    return found


def require_plain(**given: dict[str, Any] | None) -> None:
    """Raises StateError naming what JSON has no form for."""
    for name, value in given.items():
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as e:
            raise StateError(f"{name} has to consist of numbers, text, lists and mappings: {e}") from e


def require_sensible(keep: Any, keep_every: Any, memory_budget: Any, deadline_s: Any, busy: Any) -> None:
    """Raises ValueError for options that would fail later, or be passed over in silence."""
    for name, count in (("keep", keep), ("keep_every", keep_every), ("memory_budget", memory_budget)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            unit = " of bytes" if name == "memory_budget" else ""
            raise ValueError(f"{name} = {count!r}: a whole number{unit}, at least 1, or leave it out")
    if keep_every is not None and keep is None:
        raise ValueError("keep_every says what stays beside the newest `keep`: give keep as well")
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ValueError(f"deadline_s = {deadline_s!r}: a positive number of seconds")
    if busy not in ("wait", "skip"):
        raise ValueError(f"busy = {busy!r}: 'wait' or 'skip'")

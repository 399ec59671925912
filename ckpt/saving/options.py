"""What callers of a `Checkpointer` hand in, looked at before anything is done."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from surefoot.ckpt.errors import CkptUserError, StateError
from surefoot.ckpt.keeping.retention import NEWEST_MIN
from surefoot.ckpt.manifest import COUNT_MAX


def whole_step(step: Any) -> int:
    """Raises CkptUserError for what is no step."""
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found <= COUNT_MAX:
        raise CkptUserError(f"{step!r} is no step: steps are whole numbers from 0 to {COUNT_MAX}")
    return found


def require_mapping(state: Any) -> None:
    """Raises StateError for a module, an optimizer or a list on its own: it has no name to be stored under."""
    if not isinstance(state, Mapping):
        raise StateError(f"state is a {type(state).__name__}: give a mapping, such as {{'model': module}}")


def require_names(skip: Any) -> None:
    """Raises ValueError for one text, which would be read letter by letter, and for what is no text."""
    if isinstance(skip, str) or not all(isinstance(name, str) and name.strip(".") for name in skip):
        raise ValueError(f"skip = {skip!r}: a list of names, such as ['model.head']")


def require_sensible(keep: Any, keep_every: Any, memory_budget: Any, deadline_s: Any, busy: Any) -> None:
    """Raises ValueError for options that would fail later, or be passed over in silence."""
    for name, count, least in (
        ("keep", keep, NEWEST_MIN),
        ("keep_every", keep_every, 1),
        ("memory_budget", memory_budget, 1),
    ):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
            unit = " of bytes" if name == "memory_budget" else ""
            why = ", since the newest may turn out damaged" if name == "keep" else ""
            raise ValueError(
                f"{name} = {count!r}: a whole number{unit}, at least {least}{why}, or leave it out"
            )
    if keep_every is not None and keep is None:
        raise ValueError("keep_every says what stays beside the newest `keep`: give keep as well")
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ValueError(f"deadline_s = {deadline_s!r}: a positive number of seconds")
    if busy not in ("wait", "skip"):
        raise ValueError(f"busy = {busy!r}: 'wait' or 'skip'")

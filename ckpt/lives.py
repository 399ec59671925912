"""Is the process of another rank seen to run? It is where it can be looked at: on this machine, in this namespace of processes.
Torch-free.

A process gives no sign while a call into C keeps Python's lock (a library that is loaded from a slow disk), or while a busy machine does
not let it run. Linux knows better than its silence whether it is stopped or gone.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_STOPPED, _GONE = "Tt", "ZXx"


def card() -> str:
    """Where this process is found: for `runs`. Empty where Linux does not tell."""
    return _card(os.getpid())


@cache
def _card(pid: int) -> str:
    try:
        return f"{_here()} {pid} {_stat(pid)[1]}"
    except (OSError, IndexError):
        return ""


def runs(of: str) -> bool:
    """Is the process of that card seen here, neither stopped nor gone?"""
    return _state(of) not in ("", *_STOPPED, *_GONE)


def ended(of: str) -> bool:
    """Was the process of that card here, and is it no more?"""
    return _state(of) in tuple(_GONE)


def _state(of: str) -> str:
    """As Linux calls it; X also where there is no such process any more, and nothing where it cannot be told: elsewhere."""
    try:
        here, pid, begun = of.split()
        if here != _here():
            return ""
        state, since = _stat(int(pid))
        return state if since == begun else "X"
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, ValueError, IndexError):
        return ""


@cache
def _here() -> str:
    """The machine, as long as it runs, and the namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it was started, in ticks since the machine was."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return fields[0], fields[19]

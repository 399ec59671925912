"""The append-only history: what each process tried, and how it ended.

One JSON line per event in a file of the process's own, written with a single unbuffered ``write`` so that nothing noted
before a SIGKILL is lost. Lines carry the process's own monotonic clock (``t``, seconds; CLOCK_MONOTONIC, one clock for
all processes of a machine) and a sequence number; no two machines' clocks are ever compared. An operation is opened as
``invoke`` and closed as ``ok``, ``fail`` or ``unknown``: a timeout is unknown, for it may have taken effect.

A process without `open_history` notes nothing and pays nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UnknownOutcomeError(Exception):
    """Base of errors after which nobody knows whether the operation took effect (a timeout, a broken connection)."""


class _History:
    def __init__(self, path: Path, who: str) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.who = who
        self.seq = 0

    def write(self, kind: str, fields: dict[str, Any]) -> int:
        self.seq += 1
        line = {
            "t": time.monotonic(),
            "n": self.seq,
            "who": self.who,
            "pid": os.getpid(),
            "kind": kind,
            **fields,
        }
        os.write(self.fd, (json.dumps(line, separators=(",", ":"), default=str) + "\n").encode())
        return self.seq


_open: _History | None = None


def open_history(path: Path, who: str) -> None:
    """Let this process note into `path` (created, appended to) under the name `who`, e.g. ``rank-2`` or ``controller-a``.

    Called again (after a fork) it replaces the former file.
    """
    global _open
    close_history()
    path.parent.mkdir(parents=True, exist_ok=True)
    _open = _History(path, who)


def close_history() -> None:
    """Close the file; later notes go nowhere."""
    global _open
    if _open is not None:
        os.close(_open.fd)
        _open = None


def note(kind: str, **fields: Any) -> int | None:
    """Append one event; returns its number in this file, or None where no history is open."""
    return _open.write(kind, fields) if _open is not None else None


@contextmanager
def operation(op: str, **fields: Any) -> Generator[dict[str, Any]]:
    """Note an operation from *invoke* to *ok*, *fail* or *unknown*; what the caller puts into the yielded dict goes with the end."""
    result: dict[str, Any] = {}
    opened = note("invoke", op=op, **fields)
    try:
        yield result
    except (UnknownOutcomeError, TimeoutError, ConnectionError) as e:
        note("unknown", op=op, of=opened, error=repr(e), **result)
        raise
    except BaseException as e:
        note("fail", op=op, of=opened, error=repr(e), **result)
        raise
    note("ok", op=op, of=opened, **result)

"""Reading what the processes of a run wrote about themselves: the history files, while they grow and afterwards.

A one-way street: the harness reads files, and the product does not know that it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""One line of a history file: `t` (CLOCK_MONOTONIC seconds), `n`, `who`, `pid`, `kind` and the event's own fields."""


def parse_line(line: bytes) -> Event | None:
    """An event, or None for a line that a SIGKILL cut short."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


@dataclass(slots=True)
class _File:
    path: Path
    offset: int = 0
    rest: bytes = b""


@dataclass(slots=True)
class TraceTail:
    """Follows every history file below `folder` that matches `pattern`, from its beginning.

    `read` returns what was appended since the last call; finding new files costs a directory walk, so it is done only
    where `look` says so.
    """

    folder: Path
    pattern: str
    files: dict[Path, _File] = field(default_factory=dict)

    def look(self) -> None:
        """Find new files."""
        for path in sorted(self.folder.glob(self.pattern)):
            self.files.setdefault(path, _File(path))

    def read(self) -> list[Event]:
        """New whole lines of all known files, file by file. A file that vanished keeps what was read of it."""
        return [event for file in list(self.files.values()) for event in self._read_one(file)]

    def _read_one(self, file: _File) -> Iterator[Event]:
        try:
            with file.path.open("rb") as f:
                f.seek(file.offset)
                data = f.read()
        except FileNotFoundError:
            return
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        yield from filter(None, map(parse_line, lines))


def read_all(folders: Iterable[Path], pattern: str) -> list[Event]:
    """All events of all matching files below the folders, in order of time."""
    events = []
    for folder in folders:
        tail = TraceTail(folder, pattern)
        tail.look()
        events += tail.read()
    return sorted(events, key=lambda e: (e["t"], e["n"]))

"""The controller's diary: what it was told, what it decided, and every incident. Append-only, local and durable.

Locally it is one file of JSON lines, ``<state-dir>/journal/<start>.jsonl``. The same lines go to the object store as
segments, ``journal/<start>-<controller>/<number>.jsonl``, created conditionally every two seconds when there is something
new and at once at an incident; so `why` works after etcd is gone. Each version of an incident is an object of its own,
``incidents/<id>/<number>.json``: the highest number counts (`read_incidents`).

Nothing here ever stops control: what cannot be stored is kept and tried again, at most `KEPT_BYTES_MAX` of it; what was
dropped beyond that is said in the next segment. Lines are numbered, so a segment that was stored twice after a timeout does
no harm.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from surefoot.ckpt.store import ObjectExistsError, ObjectStore, ObjectStoreError, ObjectUnknownError
from surefoot.controller import wire
from surefoot.controller.core import events as ev
from surefoot.controller.core.decisions import Decision
from surefoot.controller.core.state import State

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""The journal in the object store is at most this far behind."""

LAST_RETRY_S = 0.2
"""The pace of retries of a controller that is leaving."""

KEPT_BYTES_MAX = 16 << 20
"""What is kept while the object store is away: hours of an eventful job."""

TRIES_MAX = 1000
"""Numbers of one incident; a restarted controller goes on from the first free one."""


# ---------------------------------------------------------------- what a line says


def summary(event: ev.Event) -> dict[str, Any] | None:
    """One event, for a line; None where it says nothing new by itself (time, and heartbeats of healthy ranks)."""
    match event:
        case ev.Ticked():
            return None
        case ev.StatusReported(status=status):
            told = _status(status)
            return None if told is None else {"type": "StatusReported", **told}
        case ev.ProbeAnswered(status=status, op=op, uid=uid):
            return {"type": "ProbeAnswered", "op": op, "uid": uid, **(_status(status) or {})}
        case ev.LineageListed(op=op, records=records, manifests=manifests, aside=aside):
            last = manifests[-1] if manifests else None
            newest = [last.generation, last.step] if last is not None else None
            top = max(records, default=0)
            return {"type": "LineageListed", "op": op, "top": top, "newest": newest, "aside": sorted(aside)}
        case ev.WorldListed():
            return {
                "type": "WorldListed",
                "revision": event.revision,
                "nodes": len(event.nodes),
                "pointer": plain(event.pointer),
                "outcome": plain(event.outcome),
            }
        case _:
            return {"type": type(event).__name__, **plain(event)}


def _status(status: wire.NodeStatus) -> dict[str, Any] | None:
    """What of a status matters to a reader of the journal: ends, failures, fences."""
    ends = {r.rank: plain(r.exit) for r in status.ranks if r.exit is not None}
    fenced = status.committed is not None and (status.committed.fenced_by or status.committed.failure)
    if not ends and status.start_failure is None and not fenced:
        return None
    steps = {r.rank: [r.phase, r.step] for r in status.ranks}
    return {
        "uid": status.uid,
        "generation": status.generation,
        "seq": status.seq,
        "ranks": steps,
        "ends": ends,
        "start_failure": plain(status.start_failure),
        "committed": plain(status.committed) if fenced else None,
    }


def plain(value: Any) -> Any:
    """A value of the core as JSON can say it; empty fields are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return {k: v for k, v in named.items() if v not in (None, "", (), [], {})}
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | frozenset | set):
        return [plain(v) for v in value]
    return value


def line_of(
    state: State, events: Iterable[ev.Event], decisions: Sequence[Decision], now_s: float
) -> dict[str, Any] | None:
    """What one `advance` adds to the journal; None where nothing happened."""
    told = [s for e in events if (s := summary(e)) is not None]
    if not told and not decisions:
        return None
    return {
        "t": round(now_s, 6),
        "token": state.token,
        "mind": state.mind.value,
        "generation": state.in_force.plan.generation if state.in_force is not None else 0,
        "events": told,
        "decisions": [{"type": type(d).__name__, **plain(d)} for d in decisions],
    }


# ---------------------------------------------------------------- where lines go


class Journal:
    """See the module. `add` and `incident` never block on the object store; `run` is the thread that stores."""

    def __init__(self, folder: Path, store: ObjectStore, controller: str) -> None:
        start = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{os.getpid()}"
        self.prefix = f"journal/{start}-{controller}/"
        self._store = store
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{start}.jsonl").open("ab", buffering=0)
        self._lock = threading.Lock()
        self._numbers = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._dropped = 0
        self._incidents: deque[wire.Incident] = deque()
        self._segment = 0
        self._wanted = threading.Event()
        self._stopped = False
        self._stop_by_s = 0.0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Store what is left, within the time."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._stopped = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._file.close()

    def add(self, line: dict[str, Any]) -> None:
        """Append one line; it is in the local file when this returns."""
        with self._lock:
            self._numbers += 1
            data = (
                json.dumps({"n": self._numbers, **line}, separators=(",", ":"), default=str).encode() + b"\n"
            )
            self._file.write(data)
            self._kept.append(data)
            self._kept_bytes += len(data)
            while self._kept_bytes > KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popleft())
                self._dropped += 1

    def incident(self, incident: wire.Incident) -> None:
        """Store this version of an incident, and the journal up to it, as soon as can be."""
        with self._lock:
            self._incidents.append(incident)
        self._wanted.set()

    # ---- the thread

    def _run(self) -> None:
        while not self._stopped:
            self._wanted.wait(FLUSH_S)
            self._wanted.clear()
            if not self._stored():
                time.sleep(
                    FLUSH_S if not self._stopped else 0
                )  # the pace of retries; nobody waits for this thread
        while not self._stored() and time.monotonic() < self._stop_by_s:
            time.sleep(LAST_RETRY_S)  # likewise; whoever stops it waits no longer than it said

    def _stored(self) -> bool:
        """Store what there is to store; False if the object store did not take it."""
        try:
            self._store_incidents()
            self._store_lines()
        except ObjectStoreError as e:
            if not self._failing:
                log.warning("the journal is not stored yet, it is kept and tried again: %s", e)
            self._failing = True
            return False
        self._failing = False
        return True

    def _store_lines(self) -> None:
        with self._lock:
            lines, dropped = list(self._kept), self._dropped
        if not lines:
            return
        note = json.dumps({"n": 0, "dropped": dropped}).encode() + b"\n" if dropped else b""
        self._create(f"{self.prefix}{self._segment + 1:06d}.jsonl", note + b"".join(lines))
        self._segment += 1
        with self._lock:
            for line in lines:
                # What was dropped meanwhile is not here any more; what was stored is not needed any more.
                if self._kept and self._kept[0] is line:
                    self._kept_bytes -= len(self._kept.popleft())
            self._dropped -= dropped

    def _create(self, key: str, data: bytes) -> None:
        """Create a segment; one that exists under our own name is our own, from a try that timed out."""
        try:
            self._store.create(key, data)
        except ObjectExistsError:
            pass
        except ObjectUnknownError:
            self._segment += 1  # that number may turn up at any time: the lines go into the next one as well
            raise

    def _store_incidents(self) -> None:
        while self._incidents:
            incident = self._incidents[0]
            self._create_next(f"incidents/{incident.id}/", wire.encode(incident))
            with self._lock:
                self._incidents.popleft()

    def _create_next(self, prefix: str, data: bytes) -> None:
        taken = [_number(o.key) for o in self._store.list(prefix)]
        first = max((n for n in taken if n is not None), default=0) + 1
        for number in range(first, first + TRIES_MAX):
            try:
                self._store.create(f"{prefix}{number:04d}.json", data)
            except ObjectExistsError:
                continue
            return


def _number(key: str) -> int | None:
    stem = key.rsplit("/", 1)[-1].removesuffix(".json")
    return int(stem) if stem.isdecimal() else None


def read_incidents(store: ObjectStore) -> dict[str, wire.Incident]:
    """The newest version of every incident in the object store, by id; what cannot be read is left out.

    Raises: ObjectStore…Error.
    """
    newest: dict[str, tuple[int, str]] = {}
    for found in store.list("incidents/"):
        number, parts = _number(found.key), found.key.split("/")
        if number is not None and len(parts) == 3:
            newest[parts[1]] = max(newest.get(parts[1], (0, "")), (number, found.key))
    incidents: dict[str, wire.Incident] = {}
    for identity, (_, key) in sorted(newest.items()):
        try:
            incidents[identity] = wire.decode(wire.Incident, store.read(key))
        except msgspec.MsgspecError as e:
            log.warning("%s cannot be read: %s", key, e)
    return incidents

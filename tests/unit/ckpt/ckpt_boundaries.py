"""A store that notes every operation of a save by who did it, and fails at any one of them: before it, or after it took effect.

What a recorded run passed is the list of boundaries; a run with a `Fault` hits one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from surefoot.ckpt.store import (
    ObjectInfo,
    ObjectStore,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
    Unfinished,
    Upload,
)

_T = TypeVar("_T")

CREATES = ("create", "finish")
"""Operations that make an object visible: an answer that is lost leaves open whether they did."""


@dataclass(frozen=True, slots=True)
class Op:
    """The `nth` time (from 1) that `actor` did `what` to `key`."""

    actor: str
    what: str
    key: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.actor}: {self.what} {self.key}#{self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At `op`, before or after it takes effect. `dead`: the actor can do nothing more from there on."""

    op: Op
    after: bool
    dead: bool

    def __str__(self) -> str:
        return f"{'dead' if self.dead else 'error'} {'after' if self.after else 'before'} {self.op}"


@dataclass(slots=True)
class Track:
    """What all actors did, and the fault that awaits one of them."""

    fault: Fault | None = None
    passed: list[Op] = field(default_factory=list[Op])
    fired: bool = False
    _counts: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])

    def store(self, inner: ObjectStore, actor: str) -> TrackedStore:
        return TrackedStore(inner, self, actor)

    def dead(self, actor: str) -> bool:
        return self.fault is not None and self.fault.dead and self.fired and self.fault.op.actor == actor

    def do(self, actor: str, what: str, key: str, act: Callable[[], _T]) -> _T:
        fault = self.fault
        self._counts[actor, what, key] += 1
        op = Op(actor, what, key, self._counts[actor, what, key])
        self.passed.append(op)
        if self.dead(actor):
            raise ObjectStoreUnavailableError(f"{op}: {actor} is dead")
        if fault is None or fault.op != op:
            return act()
        self.fired = True
        if not fault.after:
            raise ObjectStoreUnavailableError(f"{op}: failed on cue")
        act()
        kind = ObjectUnknownError if what in CREATES else ObjectStoreUnavailableError
        raise kind(f"{op}: its answer is lost on cue")


class TrackedStore:
    """One actor's way to a store."""

    def __init__(self, inner: ObjectStore, track: Track, actor: str) -> None:
        self._inner, self._track, self._actor = inner, track, actor
        self.nearby = inner.nearby

    @property
    def root(self) -> str:
        return self._inner.root

    def _do(self, what: str, key: str, act: Callable[[], _T]) -> _T:
        return self._track.do(self._actor, what, key, act)

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._do("create", key, lambda: self._inner.create(key, data))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._do("read", key, lambda: self._inner.read(key, start, length))

    def read_into(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        return self._do("read_into", key, lambda: self._inner.read_into(key, start, views))

    def sight(self) -> str:
        return ""

    def look(self, key: str, start: int, nbytes: int) -> memoryview | None:
        return None

    def release(self) -> None:
        self._inner.release()

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._do("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._inner.delete(key))

    def unfinished(self, prefix: str) -> list[Unfinished]:
        return self._do("unfinished", prefix, lambda: self._inner.unfinished(prefix))

    def discard(self, unfinished: Unfinished) -> None:
        self._do("discard", unfinished.key, lambda: self._inner.discard(unfinished))

    def upload(self, key: str, size: int, *, deadline_s: float) -> Upload:
        inner = self._do("upload", key, lambda: self._inner.upload(key, size, deadline_s=deadline_s))
        return _TrackedUpload(inner, self._track, self._actor, key)


class _TrackedUpload:
    def __init__(self, inner: Upload, track: Track, actor: str, key: str) -> None:
        self._inner, self._track, self._actor, self._key = inner, track, actor, key

    def put(self, data: memoryview) -> None:
        self._track.do(self._actor, "put", self._key, lambda: self._inner.put(data))

    def drain(self) -> None:
        self._track.do(self._actor, "drain", self._key, self._inner.drain)

    def finish(self) -> None:
        self._track.do(self._actor, "finish", self._key, self._inner.finish)

    def abort(self) -> None:
        """It never raises, so it is no boundary; but a dead actor aborts nothing."""
        if not self._track.dead(self._actor):
            self._inner.abort()

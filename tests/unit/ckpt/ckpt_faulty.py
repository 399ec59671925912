"""An object store in memory that fails when told to: the real one's ways, on cue."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.ckpt.store import MemoryObjectStore, ObjectInfo, ObjectUnknownError


class FaultyStore(MemoryObjectStore):
    """`script` holds, per key suffix, what the next creations of such a key do, in order.

    ``ok``; ``done``: it takes effect, but the answer is lost; ``lost``: it takes no effect, and the answer is lost; an exception:
    raised, nothing done. `before` runs something just before a creation, `on_list` before a listing.
    """

    def __init__(self) -> None:
        super().__init__("faulty://")
        self.script: dict[str, list[str | Exception]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.list_errors: list[Exception] = []
        self.created: list[str] = []

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        for suffix, act in list(self.before.items()):
            if key.endswith(suffix):
                del self.before[suffix]
                act()
        todo = next((s for suffix, s in self.script.items() if key.endswith(suffix) and s), None)
        outcome = todo.pop(0) if todo else "ok"
        if isinstance(outcome, Exception):
            raise outcome
        if outcome != "lost":
            super().create(key, data)
            self.created.append(key)
        if outcome != "ok":
            raise ObjectUnknownError(f"faulty://: {key}: no answer")

    def list(self, prefix: str) -> list[ObjectInfo]:
        if self.list_errors:
            raise self.list_errors.pop(0)
        return super().list(prefix)

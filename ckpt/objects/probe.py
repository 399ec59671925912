"""Does this object store create conditionally? Asked once, when a start opens its generation. Torch-free.

Everything rests on it: of two writers of one manifest, or of two starts that claim one number, exactly one may win. A store that
does not know ``If-None-Match`` mostly ignores it and overwrites, and nobody would notice until history had been rewritten.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectStore,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectUnknownError,
)

_log = logging.getLogger(__name__)

PREFIX = "probes/"
"""Below the root. Empty but while somebody probes, or where a probe was killed: those objects are of no use."""
RACERS = 2


class Exclusion(Enum):
    """What a store does with a second creation of one key."""

    KEPT = "the second is refused, and of writers at the same moment one wins"
    IGNORED = "the second overwrites the first"
    RACY = "the second is refused, but of writers at the same moment several win"
    REFUSED = "conditional creation is refused altogether"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What `probe_conditional` found; `detail` says it in words."""

    exclusion: Exclusion
    detail: str

    @property
    def exclusive(self) -> bool:
        return self.exclusion is Exclusion.KEPT


def probe_conditional(store: ObjectStore, prefix: str = PREFIX) -> Probe:
    """Create one object twice, and another by two writers at once, below `prefix`; both are deleted again.

    Raises: ObjectStoreDeniedError, ObjectStoreUnavailableError: nothing was learnt.
    """
    nonce = secrets.token_hex(8)
    twice, raced = f"{prefix}{nonce}-twice", f"{prefix}{nonce}-raced"
    try:
        return _probe(store, twice, raced)
    finally:
        for key in (twice, raced):
            try:
                store.delete(key)
            except ObjectStoreError:
                pass  # a few bytes that nobody reads


def _probe(store: ObjectStore, twice: str, raced: str) -> Probe:
    try:
        store.create(twice, b"first")
    except ObjectStoreError as e:
        if "NotImplemented" in str(e):
            return Probe(exclusion=Exclusion.REFUSED, detail=str(e))
        raise
    if _creates(store, twice, b"second") or store.read(twice) != b"first":
        return Probe(
            exclusion=Exclusion.IGNORED, detail=f"{store.root}: a second creation of {twice} succeeded"
        )
    winners = _race(RACERS, lambda i: _creates(store, raced, b"%d" % i))
    if len(winners) != 1 or store.read(raced) != b"%d" % winners[0]:
        return Probe(
            exclusion=Exclusion.RACY,
            detail=f"{store.root}: of {RACERS} writers {len(winners)} created {raced}",
        )
    return Probe(exclusion=Exclusion.KEPT, detail=f"{store.root} creates conditionally")


def _creates(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return False
    except ObjectUnknownError:
        return store.read(key) == data
    return True


def _race(n: int, creates: Callable[[int], bool]) -> list[int]:
    """Who of n threads that begin at once wins. Raises what one of them raised."""
    begin = threading.Barrier(n)
    winners: list[int] = []
    errors: list[Exception] = []

    def run(i: int) -> None:
        try:
            begin.wait()
            if creates(i):
                winners.append(i)
        except threading.BrokenBarrierError:
            pass  # not all of them were started
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(n)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        begin.abort()  # after Ctrl-C in between nobody waits for ever
    if errors:
        raise errors[0]
    return sorted(winners)


def ensure_exclusive(store: ObjectStore) -> Probe:
    """Probe; where conditional creation is missing, make the store do without it, or refuse.

    S3 falls back to put and read back a nonce, with a warning: what that does not protect from is told by `s3create.create_once`,
    in short: only one job at a time may write to such a root.

    Raises:
        ObjectStoreDeniedError: this store cannot hold checkpoints.
        ObjectStoreUnavailableError: it could not be asked.
    """
    probe = probe_conditional(store)
    if probe.exclusive:
        return probe
    if not do_without_conditions(store):
        raise ObjectStoreDeniedError(
            f"{probe.detail}: two jobs could overwrite each other's checkpoints; choose a root whose store creates conditionally "
            f"(files: link(2); S3: If-None-Match)"
        )
    _log.warning(
        "%s; going on without conditional creation: let no other job write to this root, also none that was cut off",
        probe.detail,
    )
    return probe


def do_without_conditions(store: ObjectStore) -> bool:
    """Use a store in the way that `ensure_exclusive` falls back to, which somebody has found to be needed; False where it has none."""
    fall_back = getattr(store, "do_without_conditions", None)
    if fall_back is not None:
        fall_back()
    return fall_back is not None


def does_without_conditions(store: ObjectStore) -> bool:
    """Has this store fallen back?"""
    return not getattr(store, "conditional", True)

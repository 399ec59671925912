"""Opening a generation without a controller: the forming rule of the lineage (record.py), for a start on its own. Torch-free."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from surefoot.ckpt.errors import CkptError, CkptUserError, CkptWorldError
from surefoot.ckpt.objects.probe import do_without_conditions, does_without_conditions, ensure_exclusive
from surefoot.ckpt.record import (
    ManifestRef,
    Record,
    RecordTakenError,
    StartRef,
    beyond,
    create_record,
    list_manifests,
    read_records,
    require_recorded,
)
from surefoot.ckpt.saving.jobs import Trouble
from surefoot.ckpt.saving.troubles import error_of, failed, trouble_of
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, until

if TYPE_CHECKING:
    from surefoot.ckpt.channel import Channel

TRIES = 20
"""How many other starts may take a number before us, at the same moment, until we call it a fault."""


class StaleStartError(CkptWorldError):
    """The root holds steps that this start has not loaded. `newest` is the last of them."""

    def __init__(self, root: str, start: StartRef, newest: ManifestRef) -> None:
        origin = f"step {start.step} of generation {start.generation}" if start.generation else "nothing"
        self.start, self.newest = start, newest
        super().__init__(
            f"{root} holds step {newest.step} (generation {newest.generation}), and this start continues from {origin}: load first, "
            f"choose another root, or pass start_over=True to leave those steps behind"
        )


class Opened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The generation of a start, as its rank 0 tells the others, or why there is none. `conditional` False: this store creates
    only without conditions, so all processes of the start do without. `stale`: what a StaleStartError is made of."""

    generation: int = 0
    conditional: bool = True
    trouble: Trouble | None = None
    stale: tuple[StartRef, ManifestRef] | None = None


class OwnGeneration:
    """Where a start without a controller goes on from, and the generation that its first save opens. Rank 0 acts, all hear."""

    def __init__(self, store: ObjectStore, *, start_over: bool) -> None:
        self._store = store
        self._start_over = start_over
        self._start = StartRef()
        self._seen: frozenset[ManifestRef] = frozenset()
        self._opened: Opened | None = None
        self._committed: set[int] = set()

    def look_around(self) -> None:
        """Before a load, on rank 0: what a later start than this one finds beyond these was not there for the load to take."""
        self._seen = frozenset(list_manifests(self._store))

    def goes_on_from(self, start: StartRef) -> None:
        """That was loaded; the next save opens a generation that continues it."""
        self._start, self._opened = start, None
        self._committed.clear()

    def note_committed(self, step: int) -> None:
        """In the generation that is open. All ranks hear it with the outcome."""
        self._committed.add(step)

    def require_new(self, step: int) -> None:
        """Raises CkptUserError where this generation has committed `step`: its manifest is never replaced."""
        if step in self._committed:
            raise CkptUserError(
                f"step {step} is committed already by this start, and no checkpoint is ever replaced: save under another number, or "
                f"load an older step first and go on from there"
            )

    def open(self, step: int, channel: Channel, *, deadline_s: float) -> Opened:
        """Once per start; its first save is of `step`. Collective, and raises the same on all ranks.

        Args:
            deadline_s: how long the object store may take.

        Raises: CkptUserError where `step` is not beyond what this start goes on from; StaleStartError, LineageError as
            `open_generation`; CommitError for what else was in the way of that.
        """
        if self._opened is not None:
            return self._opened
        error: Exception | None = None

        def act(_: list[bytes]) -> bytes:
            nonlocal error
            try:
                opened = self._open(step, until(self._store, time.monotonic() + deadline_s))
            except StaleStartError as e:
                error, opened = e, Opened(stale=(e.start, e.newest))
            except (CkptError, ObjectStoreError) as e:
                error = failed(f"step {step} was not saved, since no generation could be opened", e)
                opened = Opened(trouble=trouble_of(error))
            return msgspec.json.encode(opened)

        opened = msgspec.json.decode(channel.decide(b"", act), type=Opened)
        if opened.stale is not None:
            raise error or StaleStartError(self._store.root, *opened.stale)
        if opened.trouble is not None:
            raise error or error_of(opened.trouble)
        if not opened.conditional:
            do_without_conditions(self._store)
        self._opened = opened
        return opened

    def _open(self, step: int, store: ObjectStore) -> Opened:
        start = self._start
        if start.generation and step <= start.step:
            raise CkptUserError(
                f"step {step} is not newer than step {start.step}, which this start continues from: save under a higher number"
            )
        created_by = f"alone:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        seen = None if self._start_over else self._seen
        number = open_generation(store, start, seen=seen, created_by=created_by)
        return Opened(generation=number, conditional=not does_without_conditions(store))


def open_generation(
    store: ObjectStore, start: StartRef, *, seen: Collection[ManifestRef] | None, created_by: str
) -> int:
    """Probe the store for conditional creation, create the record of the next generation and return its number.

    Args:
        seen: the manifests there were when `start` was loaded: to leave those behind is the caller's decision, to leave
            newer ones behind would lose another's work. None: leave behind whatever there is.
        created_by: unique to this start.

    Raises:
        StaleStartError: steps beyond `start` were committed that the caller has not seen.
        ObjectStore…Error, LineageError.
    """
    ensure_exclusive(store)
    there = list_manifests(store)
    records = read_records(store)
    require_recorded(records, there)
    for _ in range(TRIES):
        left = beyond(records, list_manifests(store), start)
        _refuse_unseen(store, start, left, seen)
        number = max(records, default=0) + 1
        record = Record(
            generation=number,
            start=start,
            rollback=bool(left),
            reason="rollback" if left else "start",
            created_by=created_by,
        )
        try:
            create_record(store, record)
        except RecordTakenError:
            records = read_records(store, records)
            continue
        _check_again(store, records, record, seen, created_by)
        return number
    raise CkptWorldError(
        f"{store.root}: {TRIES} numbers were taken by others in a row; how many jobs write to this root?"
    )


def _check_again(
    store: ObjectStore,
    before: Mapping[int, Record],
    record: Record,
    seen: Collection[ManifestRef] | None,
    created_by: str,
) -> None:
    """The second listing. What it finds new was perhaps acknowledged: the number is burnt, the next record brings it back
    onto the lineage, and this start has to load again."""
    left = beyond(before, list_manifests(store), record.start)
    unseen = _unseen(left, seen)
    if not unseen:
        return
    mend = Record(
        generation=record.generation + 1,
        start=StartRef(generation=left[-1].generation, step=left[-1].step),
        reason="burnt",
        created_by=created_by,
    )
    try:
        create_record(store, mend)
    except RecordTakenError:
        pass  # whoever formed it has listed after our record, and follows the same rule
    raise StaleStartError(store.root, record.start, unseen[-1])


def _refuse_unseen(
    store: ObjectStore, start: StartRef, left: Iterable[ManifestRef], seen: Collection[ManifestRef] | None
) -> None:
    if unseen := _unseen(left, seen):
        raise StaleStartError(store.root, start, unseen[-1])


def _unseen(left: Iterable[ManifestRef], seen: Collection[ManifestRef] | None) -> list[ManifestRef]:
    return [] if seen is None else [m for m in left if m not in seen]

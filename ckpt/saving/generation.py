"""Opening a generation without a controller: the forming rule of the lineage (record.py), for a start on its own. Torch-free."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Iterable, Mapping

from surefoot.ckpt.errors import CkptUserError, CkptWorldError
from surefoot.ckpt.objects.probe import ensure_exclusive
from surefoot.ckpt.record import (
    ManifestRef,
    Record,
    RecordTakenError,
    StartRef,
    beyond,
    create_record,
    list_manifests,
    read_records,
)
from surefoot.ckpt.store import ObjectStore

TRIES = 20
"""How many other starts may take a number before us, at the same moment, until we call it a fault."""


class StaleStartError(CkptWorldError):
    """The root holds steps that this start has not loaded. `newest` is the last of them."""

    def __init__(self, root: str, start: StartRef, newest: ManifestRef) -> None:
        origin = f"step {start.step} of generation {start.generation}" if start.generation else "nothing"
        super().__init__(
            f"{root} holds step {newest.step} (generation {newest.generation}), and this start continues from {origin}: load first, "
            f"choose another root, or pass start_over=True to leave those steps behind"
        )
        self.newest = newest


def open_alone(
    store: ObjectStore, start: StartRef, step: int, *, seen: Collection[ManifestRef] | None
) -> int:
    """`open_generation` for this process, whose first save is of `step`.

    Raises CkptUserError where that is not beyond `start`, and as `open_generation`.
    """
    if start.generation and step <= start.step:
        raise CkptUserError(
            f"step {step} is not newer than step {start.step}, which this start continues from: save under a higher number"
        )
    created_by = f"alone:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
    return open_generation(store, start, seen=seen, created_by=created_by)


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
    records = read_records(store)
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

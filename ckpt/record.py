"""Records and the lineage: which generations exist, and which manifests count. Torch-free; the lineage itself is PURE.

A generation is its record, the object ``generations/NNNN.json``, created conditionally and never changed. It names the
*starting point* (generation, step) that its ranks restored. The *lineage* of a head is the head's manifests, then those of
the generation it started from up to its starting point, and so on back. What a cut-off generation creates after it was
replaced lies beyond the starting point of its successor, so it is off the lineage without anybody deleting it.

The race that the rules are made for: generation 3 has committed step 20 and is uploading step 40; a node is lost and record
4 is created with starting point (3, 20).

* Manifest 40 came first: the second listing after record 4 finds it (`beyond`), number 4 is burnt, record 5 starts from
  (3, 40). Nothing acknowledged is lost.
* Manifest 40 comes later: its writer looks for a higher record before it acknowledges, finds 4, and reports itself
  fenced. 40 is off the lineage: generation 4 redoes the steps from 20.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from surefoot.ckpt.errors import CkptWorldError, DamagedError, LineageError
from surefoot.ckpt.manifest import (
    COUNT_MAX,
    ManifestRef,
    check_format,
    encode,
    manifest_refs,
    seal_holds,
    sealed,
)
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    ObjectUnknownError,
    each_of,
)
from surefoot.failpoint import failpoint
from surefoot.history import operation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

__all__ = [
    "FORMAT",
    "ManifestRef",
    "Record",
    "RecordTakenError",
    "StartRef",
    "beyond",
    "create_record",
    "decode_record",
    "encode_record",
    "highest_record",
    "lineage",
    "list_manifests",
    "list_records",
    "on_lineage",
    "read_again",
    "read_record",
    "read_records",
    "record_key",
    "require_recorded",
]

FORMAT = 1
RECORDS = "generations/"
_RECORD_KEY = re.compile(r"generations/(\d{4,})\.json")
_CREATE_TRIES = 3
"""How often a creation of unknown outcome is repeated: each try sends the same bytes to the same key, so one too many does
no harm, and what three timeouts cannot settle is for the caller to report."""


class StartRef(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A starting point: the state of `generation` after `step` steps. (0, 0) is the initial state."""

    generation: int = 0
    step: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `created_by` names the creator uniquely (with a nonce where no leader is elected): the same bytes read
    back mean "mine"."""

    format: int = FORMAT
    generation: int
    start: StartRef
    rollback: bool = False
    """True where the starting point deliberately leaves committed steps behind."""
    reason: str
    created_by: str
    plan: dict[str, Any] | None = None
    """The controller's plan as plain values; None alone."""


class _Seal(msgspec.Struct):
    checksum: Any = None


class RecordTakenError(CkptWorldError):
    """Somebody else created the record of that generation; `existing` is theirs."""

    def __init__(self, generation: int, existing: Record) -> None:
        super().__init__(
            f"generation {generation} was opened by {existing.created_by!r} ({existing.reason}): form the next one"
        )
        self.generation = generation
        self.existing = existing


# ---------------------------------------------------------------- bytes and keys


def record_key(generation: int) -> str:
    """``generations/0004.json``; numbers above 9999 simply have more digits."""
    if generation < 1:
        raise ValueError(f"generations count from 1, not {generation}")
    return f"{RECORDS}{generation:04d}.json"


def encode_record(record: Record) -> bytes:
    """Canonical bytes, ending with a checksum of their own: a digit that is another would let other checkpoints count."""
    return sealed(encode(record))


def decode_record(data: bytes, *, key: str = "record") -> Record:
    """Raises FormatError (written by a newer version) or DamagedError, both naming `key`. A record without a checksum was written
    by an older version."""
    try:
        check_format(data, key=key)
        record = msgspec.json.decode(data, type=Record)
        holds = seal_holds(data)
        if holds is False or (holds is None and msgspec.json.decode(data, type=_Seal).checksum is not None):
            raise msgspec.DecodeError("it does not match its checksum")
        return record
    except (DamagedError, msgspec.DecodeError, RecursionError) as e:
        what = e.__cause__ if isinstance(e, DamagedError) else e
        raise DamagedError(
            f"{key} ({len(data)} bytes) is damaged, or no record ({what}): restore it from a backup of the object store; "
            f"which checkpoints count cannot be told without it",
            key=key,
        ) from e


# ---------------------------------------------------------------- the object store's side


def list_records(store: ObjectStore) -> list[int]:
    """The generations that have a record, ascending."""
    found = (_RECORD_KEY.fullmatch(o.key) for o in store.list(RECORDS))
    numbered = ((int(m.group(1)), m.string) for m in found if m is not None)
    return sorted(g for g, key in numbered if 1 <= g <= COUNT_MAX and key == record_key(g))


def highest_record(store: ObjectStore) -> int:
    """The newest generation, or 0 where none exists."""
    return max(list_records(store), default=0)


def read_record(store: ObjectStore, generation: int) -> tuple[Record, bytes]:
    """The record and its very bytes (their hash names the plan).

    Raises: ObjectMissingError, FormatError, DamagedError, ObjectStore…Error.
    """
    key = record_key(generation)

    def read() -> tuple[Record, bytes]:
        data = store.read(key)
        return decode_record(data, key=key), data

    record, data = read_again(read)
    if record.generation != generation:
        raise DamagedError(
            f"{key} calls itself generation {record.generation}: it was copied or moved; restore it", key=key
        )
    return record, data


def read_again(read: Callable[[], _T]) -> _T:
    """What `read` gives, at the second try where the first finds damage: nothing is condemned by one answer, which something on the
    way may have spoilt."""
    try:
        return read()
    except DamagedError as e:
        _log.info("%s; reading it again", e)
    return read()


def read_records(store: ObjectStore, known: MutableMapping[int, Record] | None = None) -> dict[int, Record]:
    """All records by generation. They never change: those in `known` are not read again, and what is read is added to it. A job
    has as many as it was started, and whoever asks after each commit would read ever more.

    Raises: ObjectMissingError, FormatError, DamagedError, ObjectStore…Error.
    """
    known = {} if known is None else known
    there = list_records(store)
    new = [g for g in there if g not in known]

    def read(generation: int) -> None:
        known[generation] = read_record(store, generation)[0]

    each_of(read, new)
    return {g: known[g] for g in there}


def create_record(store: ObjectStore, record: Record) -> bytes:
    """Create the record conditionally; returns its bytes.

    Where the key is taken or the outcome unknown it is read back: the same bytes are a success.

    Raises:
        RecordTakenError: another record stands there.
        ObjectUnknownError: after some tries nobody knows whether it exists.
        ObjectStore…Error: denied, unavailable.
    """
    key, data = record_key(record.generation), encode_record(record)
    failpoint("record.before_create")
    with operation(
        "create_record", generation=record.generation, start=[record.start.generation, record.start.step]
    ):
        _create_or_recognise(store, key, data, lambda found: _taken(record.generation, key, found))
    failpoint("record.after_create")
    return data


def _taken(generation: int, key: str, found: bytes) -> RecordTakenError:
    return RecordTakenError(generation, decode_record(found, key=key))


def _create_or_recognise(
    store: ObjectStore, key: str, data: bytes, other: Callable[[bytes], Exception]
) -> None:
    """Create `key`; where it turns out to hold other bytes than `data`, raise what `other` makes of them."""
    for last in (*[False] * (_CREATE_TRIES - 1), True):
        try:
            store.create(key, data)
        except (ObjectExistsError, ObjectUnknownError) as e:
            try:
                found = store.read(key)
            except ObjectMissingError:
                if last:
                    raise e from None
                continue
            if found != data:
                raise other(found) from e
        return


def list_manifests(store: ObjectStore) -> list[ManifestRef]:
    """Every manifest there is, on the lineage or not, ascending by step."""
    return manifest_refs(o.key for o in store.list("gen-"))


# ---------------------------------------------------------------- the lineage (PURE)


def _chain(records: Mapping[int, Record], head: int) -> list[tuple[int, int | None]]:
    """(generation, last step that counts; None: all), from `head` back to the initial state.

    Raises LineageError where a record is missing or names a starting point that is not older than itself.
    """
    chain: list[tuple[int, int | None]] = []
    generation, limit = head, None
    while generation != 0:
        chain.append((generation, limit))
        record = records.get(generation)
        if record is None:
            raise LineageError(
                f"the record of generation {generation} is missing, and generation {chain[-2][0] if chain[1:] else head} "
                f"descends from it: restore {record_key(generation)}"
            )
        start = record.start
        if not 0 <= start.generation < generation:
            raise LineageError(
                f"{record_key(generation)} starts from generation {start.generation}, which is not older than itself"
            )
        limit = start.step if limit is None else min(limit, start.step)
        generation = start.generation
    return chain


def lineage(
    records: Mapping[int, Record], manifests: Iterable[ManifestRef], head: int | None = None
) -> list[ManifestRef]:
    """The manifests that count, seen from generation `head` (None: the newest record), ascending by step. PURE.

    Raises LineageError.
    """
    head = max(records, default=0) if head is None else head
    limits = dict(_chain(records, head))
    return sorted(m for m in manifests if m.generation in limits and _within(m.step, limits[m.generation]))


def _within(step: int, limit: int | None) -> bool:
    return limit is None or step <= limit


def require_recorded(records: Mapping[int, Record], manifests: Iterable[ManifestRef]) -> None:
    """Raises LineageError where a generation above the newest record has committed: its record was deleted, and the next start would
    take its number once more. PURE. To be asked of manifests that were listed *before* the records: a record precedes its manifests."""
    newest = max(manifests, key=lambda m: (m.generation, m.step), default=None)
    if newest is not None and newest.generation > max(records, default=0):
        raise LineageError(
            f"the record of generation {newest.generation} is missing, and {newest.key} is there: restore "
            f"{record_key(newest.generation)} from a backup of the object store; which checkpoints count cannot be told without it"
        )


def on_lineage(records: Mapping[int, Record], head: int, generation: int, step: int) -> bool:
    """Does the state (generation, step), a manifest's or a snapshot's, count as seen from `head`? PURE.

    The head's own states do; older ones up to the starting point taken from them; the initial state (0, 0) always.
    Raises LineageError.
    """
    if generation == 0:
        return step == 0
    limits = dict(_chain(records, head))
    return generation in limits and _within(step, limits[generation])


def left_by(records: Mapping[int, Record], generation: int) -> Record | None:
    """The record that has left behind what `generation` committed and is not on the lineage: of the first newer generation that is.
    PURE. Raises LineageError."""
    chain = _chain(records, max(records, default=0))
    return next((records[g] for g, _ in reversed(chain) if g > generation), None)


def beyond(
    records: Mapping[int, Record],
    manifests: Iterable[ManifestRef],
    start: StartRef,
    *,
    in_force: int | None = None,
) -> list[ManifestRef]:
    """The manifests that a new generation starting from `start` would leave behind, ascending by step. PURE.

    A caller who just created a record lists again and asks this; unless the record is a rollback, anything returned means
    that the number is burnt and the next record has to name the last of them.

    Args:
        records: all records; the new one may be among them (it has no manifests yet, and changes nothing).
        manifests: all manifests, listed after the record was created.
        start: the starting point of the new record.
        in_force: the newest generation whose plan was published, where that is known. Its lineage alone is asked then. Where it
            is not (etcd was wiped; alone), the newest generation decides that descends from `start` and has manifests beyond
            it: a number that was burnt before anybody listed again must not hide what its predecessor had acknowledged. A
            rollback is respected: what it left behind is not returned.

    Raises LineageError.
    """
    every = list(manifests)
    if in_force is not None:
        return _descend(records, every, start, in_force)
    for head in sorted(records, reverse=True):
        found = [m for m in _descend(records, every, start, head) if not _left_behind(records, m)]
        if found:
            return found
    return []


def _descend(
    records: Mapping[int, Record], manifests: list[ManifestRef], start: StartRef, head: int
) -> list[ManifestRef]:
    """The lineage of `head` beyond `start`; nothing where `head` does not descend from it."""
    if not on_lineage(records, head, start.generation, start.step):
        return []
    return [m for m in lineage(records, manifests, head) if m.step > start.step]


def _left_behind(records: Mapping[int, Record], manifest: ManifestRef) -> bool:
    """Did a rollback later than the manifest's generation go back to before it?"""
    return any(
        r.rollback
        and r.generation > manifest.generation
        and r.start.step < manifest.step
        and on_lineage(records, manifest.generation, r.start.generation, r.start.step)
        for r in records.values()
    )

"""The commit of one attempt: wait for its parts, prove them whole, create the manifest, look for a higher record.

The committer is one process (rank 0's node; alone: rank 0) and learns of the others through their part records only.
Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import xxhash

from surefoot.ckpt.errors import CkptError, CommitError, FencedError
from surefoot.ckpt.format.merge import merge_parts
from surefoot.ckpt.format.piecetable import needs_table, stored_form, with_table
from surefoot.ckpt.manifest import (
    Ledger,
    LedgerRef,
    LedgerRow,
    Manifest,
    PartRecord,
    Previous,
    attempt_prefix,
    decode,
    encode,
    ledger_key,
    manifest_key,
    part_key,
    step_prefix,
)
from surefoot.ckpt.objects.stream import create_or_recognise
from surefoot.ckpt.record import StartRef, highest_record, list_manifests, read_record
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreDeniedError,
    ObjectStoreError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
    each_of,
    until,
)
from surefoot.failpoint import failpoint
from surefoot.history import operation

ANSWER_S = 3.0
"""How long beyond the deadline the object store may take to answer what was asked just before it."""
SEEN_S = 90.0
"""How long parts that are stored, as all ranks have said, may take to be seen here: NFS looks at a folder again after up to a minute.
Whoever's part is not seen by then writes to other storage."""
FIRST_POLL_S, LONGEST_POLL_S = 0.005, 0.5
"""Parts of small states arrive within milliseconds, those of large ones within minutes; a listing costs about 10 ms on S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The checkpoint exists and counts."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """The manifest was created, but generation `by` exists: whether it counts is for the lineage to say."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Another attempt committed this (generation, step) first."""

    winner_attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Nothing was committed, and why: in words, and as the error that said so: one of ours (ReplicasDifferError, for one), or the
    object store's."""

    reason: str
    cause: CkptError | ObjectStoreError | None = None


CommitOutcome = Committed | Fenced | Lost | GivenUp


def error_of_outcome(outcome: Fenced | Lost | GivenUp, *, generation: int, step: int) -> CkptError:
    """What a commit that came to nothing is to whoever waits for it."""
    match outcome:
        case Fenced(by=by):
            return FencedError(generation=generation, step=step, by=by)
        case Lost(winner_attempt=winner):
            return CommitError(
                f"step {step} of generation {generation} was committed by another attempt, {winner}"
            )
        case GivenUp(cause=CkptError() as cause):
            return cause
        case GivenUp(reason=reason, cause=cause):
            error = CommitError(f"step {step} of generation {generation} was not committed: {reason}")
            error.__cause__ = cause
            return error
        case _:
            assert_never(outcome)


def commit(
    store: ObjectStore,
    *,
    generation: int,
    step: int,
    attempt: str,
    writers: int,
    deadline_s: float,
    facts: Mapping[str, Any],
    stored: bool = False,
) -> CommitOutcome:
    """Commit the attempt once all `writers` (numbered from 0) have stored their parts.

    Args:
        stored: all have said that they did.
        deadline_s: how long to wait for parts, and to insist on an answer afterwards; no call outlasts it by more than `ANSWER_S`.
        facts: kept in the manifest for people: host, durations, code version. `committed_at` (seconds since 1970) is added.

    Raises:
        ObjectUnknownError: nobody knows whether the manifest exists. Do not count on it either way: the lineage decides.
        ObjectStoreUnavailableError: the manifest exists, and whether a newer generation does could not be learnt: the same.
        ObjectStoreDeniedError: wrong keys or no permission.
    """
    give_up = time.monotonic() + deadline_s
    store = until(store, give_up + ANSWER_S)
    with operation("commit", generation=generation, step=step, attempt=attempt) as noted:
        dated = {"committed_at": round(time.time(), 3), **facts}
        seen_s = SEEN_S if stored else deadline_s
        outcome = _prepare(store, generation, step, attempt, writers, give_up, seen_s, dated)
        if isinstance(outcome, Manifest):
            failpoint("ckpt.before_manifest")
            outcome = _create_manifest(store, outcome, give_up)
        if isinstance(outcome, Committed):
            failpoint("ckpt.after_manifest")
            outcome = _look_for_higher_record(store, outcome, give_up)
        noted["outcome"] = type(outcome).__name__
        if isinstance(outcome, Committed):
            failpoint("ckpt.before_ack")
    return outcome


# ---------------------------------------------------------------- before the manifest


def _prepare(
    store: ObjectStore,
    generation: int,
    step: int,
    attempt: str,
    writers: int,
    give_up: float,
    seen_s: float,
    facts: Mapping[str, Any],
) -> Manifest | Lost | GivenUp:
    """Everything up to the manifest, whose ledger is stored already. What fails here leaves nothing committed."""
    try:
        awaited = _await_parts(store, generation, step, attempt, writers, give_up, seen_s)
        if isinstance(awaited, Lost):
            return awaited
        parts, sizes = awaited
        manifest, rows = merge_parts(
            parts, sizes, generation=generation, step=step, attempt=attempt, facts=facts
        )
        return _with_ledger(store, _with_table(store, manifest), rows)
    except ObjectStoreDeniedError:
        raise
    except (CkptError, ObjectStoreError) as e:
        return GivenUp(reason=str(e), cause=e)


def _await_parts(
    store: ObjectStore,
    generation: int,
    step: int,
    attempt: str,
    writers: int,
    give_up: float,
    seen_s: float,
) -> tuple[list[PartRecord], dict[str, int]] | Lost:
    """All part records, and the sizes of all objects of the attempt. A failure that is reported ends the wait at once, and so does
    a manifest of another attempt; and a store that answers, and for `seen_s` does not show all parts."""
    mine = attempt_prefix(generation, step, attempt)
    wanted = {part_key(generation, step, attempt, w): w for w in range(writers)}
    parts: dict[str, PartRecord] = {}
    pause_s = FIRST_POLL_S
    look_until = give_up
    while True:
        trouble, cause = "", None
        try:
            listed = {o.key: o.size for o in store.list(step_prefix(generation, step))}
            look_until = min(look_until, time.monotonic() + seen_s)
            sizes = {key: size for key, size in listed.items() if key.startswith(mine)}
            parts |= _read_parts(store, sorted(wanted.keys() & sizes.keys() - parts.keys()))
            if len(parts) == writers or any(p.failure for p in parts.values()):
                return [parts[key] for key in sorted(parts)], sizes
            if (key := manifest_key(generation, step)) in listed:
                found = _read_back(store, key, None)
                if found is not None and found.attempt != attempt:
                    return Lost(winner_attempt=found.attempt)
        except ObjectStoreUnavailableError as e:
            trouble, cause = f"; {e}", e
        if time.monotonic() + pause_s > (give_up if trouble else look_until):
            late = sorted(w for key, w in wanted.items() if key not in parts)
            raise CommitError(
                f"step {step} of generation {generation}, attempt {attempt}: no part from writers {late} in time under {store.root} (do "
                f"all ranks see the same storage there?){trouble}"
            ) from cause
        time.sleep(pause_s)  # an object store has no watch: it can only be asked again
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _read_parts(store: ObjectStore, keys: Sequence[str]) -> dict[str, PartRecord]:
    """A thousand parts one after the other would be a thousand round trips."""

    def read(key: str) -> PartRecord:
        return decode(PartRecord, store.read(key), key=key)

    return dict(zip(keys, each_of(read, keys), strict=True))


def _with_table(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Store the pieces beside the manifest to be, where they are too many to stand in it."""
    if not needs_table(manifest):
        return manifest
    manifest, data = with_table(manifest)
    assert manifest.table is not None, "it was given one"
    create_or_recognise(store, manifest.table.key, data)
    return manifest


def _with_ledger(store: ObjectStore, manifest: Manifest, rows: tuple[LedgerRow, ...]) -> Manifest:
    """Store the ledger beside the manifest to be, chained to the one before. Where there are no rows, here or before, there is
    no ledger: a script without a loader leaves none."""
    before = step_before(store, manifest.generation, manifest.step)
    previous = None if before is None else _link_to(store, before)
    fresh = tuple(r for r in rows if before is None or r.step > before.step)
    if not fresh and previous is None:
        return manifest
    ledger = Ledger(generation=manifest.generation, step=manifest.step, previous=previous, rows=fresh)
    key, data = ledger_key(manifest.generation, manifest.step, manifest.attempt), encode(ledger)
    create_or_recognise(store, key, data)
    return _replaced(manifest, LedgerRef(key=key, size=len(data), checksum=xxhash.xxh3_64_hexdigest(data)))


def _replaced(manifest: Manifest, ledger: LedgerRef) -> Manifest:
    import msgspec

    return msgspec.structs.replace(manifest, ledger=ledger)


def step_before(store: ObjectStore, generation: int, step: int) -> StartRef | None:
    """The newest checkpoint before `step` on the lineage of `generation`. Reads as few records as it can.

    Raises: ObjectStore…Error, LineageError's causes as DamagedError or ObjectMissingError.
    """
    steps: dict[int, list[int]] = {}
    for m in list_manifests(store):
        steps.setdefault(m.generation, []).append(m.step)
    limit = step - 1
    while generation != 0:
        older = [s for s in steps.get(generation, ()) if s <= limit]
        if older:
            return StartRef(generation=generation, step=max(older))
        start = read_record(store, generation)[0].start
        generation, limit = start.generation, min(limit, start.step)
    return None


def _link_to(store: ObjectStore, before: StartRef) -> Previous | None:
    """What a ledger says of the checkpoint before its own; None where that has no ledger: the chain begins here.

    A damaged predecessor must not keep this checkpoint from being committed: the chain then has a gap, and says so.
    """
    key = manifest_key(before.generation, before.step)
    try:
        ledger = decode(Manifest, store.read(key), key=key).ledger
        recorded = ledger is not None
    except (CkptError, ObjectMissingError):
        ledger = None
        beside = store.list(step_prefix(before.generation, before.step))
        recorded = any(o.key.endswith("/ledger.json") for o in beside)
    return Previous(generation=before.generation, step=before.step, ledger=ledger) if recorded else None


# ---------------------------------------------------------------- the manifest, and after


def _create_manifest(store: ObjectStore, manifest: Manifest, give_up: float) -> Committed | Lost | GivenUp:
    key, data = manifest_key(manifest.generation, manifest.step), encode(stored_form(manifest))
    unknown: ObjectUnknownError | None = None
    while True:
        try:
            store.create(key, data)
            return Committed(manifest=manifest)
        except ObjectUnknownError as e:
            unknown = e
        except ObjectExistsError:
            pass
        except ObjectStoreUnavailableError as e:
            if unknown is not None:
                raise unknown from e
            return GivenUp(reason=str(e), cause=e)
        except ObjectStoreError as e:
            if isinstance(e, ObjectStoreDeniedError) or unknown is not None:
                raise
            return GivenUp(reason=str(e), cause=e)
        found = _read_back(store, key, unknown)
        if found is not None:
            mine = found.attempt == manifest.attempt
            return Committed(manifest=manifest) if mine else Lost(winner_attempt=found.attempt)
        if time.monotonic() > give_up:
            raise unknown or ObjectUnknownError(
                f"{store.root}: {key} is said to exist and cannot be read; whether it was committed is unknown"
            )
        time.sleep(FIRST_POLL_S)  # likewise


def _read_back(store: ObjectStore, key: str, unknown: ObjectUnknownError | None) -> Manifest | None:
    """The manifest that stands there; None where none does (yet)."""
    try:
        return decode(Manifest, store.read(key), key=key)
    except ObjectMissingError:
        return None
    except ObjectStoreError as e:
        raise (unknown or e) from e


def _look_for_higher_record(store: ObjectStore, done: Committed, give_up: float) -> Committed | Fenced:
    """Before the commit is acknowledged. Insists until the deadline: without an answer nothing may be acknowledged."""
    while True:
        try:
            highest = highest_record(store)
        except ObjectStoreUnavailableError:
            if time.monotonic() > give_up:
                raise
            time.sleep(LONGEST_POLL_S)  # likewise
            continue
        return Fenced(by=highest) if highest > done.manifest.generation else done

"""Deleting what retention lets go, and what was left behind. Torch-free.

`apply_retention` and `sweep_orphans` run beside a job, after its commits; `plan_gc` and `carry_out` are `surefoot ckpt gc`,
which first says what it would do. The decisions are pure (ckpt/keeping/retention.py, ckpt/keeping/orphans.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

import msgspec

from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.format.flags import flag_key, flags_among, flags_beside
from surefoot.ckpt.keeping.orphans import (
    Holdings,
    Orphan,
    abandoned,
    generations_over,
    orphans,
    sort_out,
    unnamed,
)
from surefoot.ckpt.keeping.retention import Retention, Verdict, held_of, judge, objects_of, of_one_writer
from surefoot.ckpt.manifest import (
    Ledger,
    LedgerRef,
    Manifest,
    ManifestRef,
    attempt_prefix,
    decode,
    manifest_refs,
    step_prefix,
)
from surefoot.ckpt.progress import Progress
from surefoot.ckpt.record import Record, lineage, list_records, read_records, require_recorded
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, Unfinished, each_of
from surefoot.failpoint import failpoint
from surefoot.history import operation

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- after a commit


def apply_retention(
    store: ObjectStore,
    retention: Retention,
    *,
    generation: int,
    known: MutableMapping[int, Record] | None = None,
) -> list[ManifestRef]:
    """Delete what the writer of `generation` left on its lineage and the rules let go; returns it. For the committer, between
    two commits. What another left there (a script, for a job; a job, for a script) is not counted and stays.

    A checkpoint whose manifest cannot be read stays, with all its data: what belongs to it is not known.

    Args:
        known: see `read_records`.

    Raises: ObjectStore…Error, LineageError. What was deleted stays deleted; the rest is found next time.
    """
    gone: list[ManifestRef] = []
    for verdict in judge_line(store, retention, generation, known):
        if verdict.keep:
            continue
        ref = verdict.ref
        with operation("delete", generation=ref.generation, step=ref.step):
            if _delete_checkpoint(store, ref):
                _log.info("step %d of generation %d is deleted: %s", ref.step, ref.generation, verdict.why)
                gone.append(ref)
    return gone


def judge_line(
    store: ObjectStore,
    retention: Retention,
    generation: int | None = None,
    known: MutableMapping[int, Record] | None = None,
) -> list[Verdict]:
    """What the rules say of each checkpoint on the lineage of `generation` that the same writer left, ascending; None: of each on
    the newest lineage, whoever wrote it. `known`: see `read_records`.

    Raises: ObjectStore…Error, LineageError.
    """
    keys = [o.key for o in store.list("gen-")]
    records, refs = read_records(store, known), manifest_refs(keys)
    if generation is None:
        require_recorded(records, refs)
    line = lineage(records, refs, generation)
    if generation is not None:
        line = of_one_writer(line, records, generation)
    times = _times(store, line) if retention.needs_times else None
    return judge(held_of(line, flags_among(keys), times), retention.rules())


def sweep_orphans(store: ObjectStore) -> list[Orphan]:
    """Delete what earlier generations left behind, now that a newer one has committed; returns it. Ledgers stay (`gc` knows
    which of them nobody needs). Their unfinished uploads are discarded as well.

    Raises: ObjectStore…Error.
    """
    seen = _survey(store)
    found = orphans(seen.holdings, seen.named, over_below=seen.over_below, ledgers=None)
    for orphan in found:
        a = orphan.attempt
        with operation("sweep", generation=a.generation, step=a.step, attempt=a.attempt):
            for key in orphan.keys:
                store.delete(key)
        _log.info(
            "attempt %s at step %d of generation %d is swept, %d bytes: %s",
            *(a.attempt, a.step, a.generation, orphan.nbytes, orphan.reason),
        )
    for upload in _unfinished(store, [g for g in seen.records if g < seen.over_below]):
        store.discard(upload)
        _log.info("what was never finished of %s is discarded: its generation is over", _in_words(upload))
    return found


def _delete_checkpoint(store: ObjectStore, ref: ManifestRef) -> bool:
    """The manifest first, then what it names. False where it is gone already, was exempted meanwhile, or cannot be read."""
    try:
        manifest = decode(Manifest, store.read(ref.key), key=ref.key)
    except ObjectMissingError:
        return False  # somebody else was faster
    except CkptError as e:
        _log.warning("step %d of generation %d cannot be deleted: %s", ref.step, ref.generation, e)
        return False
    stored = [o.key for o in store.list(step_prefix(ref.generation, ref.step))]
    if flag_key(ref.generation, ref.step, "kept") in stored:
        return False
    store.delete(ref.key)
    failpoint("retention.after_manifest")
    for key in (*flags_beside(ref.generation, ref.step, stored), *objects_of(manifest, stored)):
        store.delete(key)
    return True


def _times(store: ObjectStore, line: Iterable[ManifestRef]) -> dict[ManifestRef, float]:
    """When each was committed, as far as its manifest can be read and says so."""

    def time_of(ref: ManifestRef) -> float | None:
        try:
            at = decode(Manifest, store.read(ref.key), key=ref.key).facts.get("committed_at")
        except (CkptError, ObjectMissingError):
            return None
        return float(at) if isinstance(at, int | float) else None

    refs = list(line)
    found = zip(refs, each_of(time_of, refs), strict=True)
    return {ref: at for ref, at in found if at is not None}


# ---------------------------------------------------------------- gc


class Doomed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that gc would delete."""

    ref: ManifestRef
    why: str
    nbytes: int


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What gc would delete, and what it leaves alone."""

    root: str
    checkpoints: tuple[Doomed, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    stale_flags: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    """Uploads and temporary files of generations that are over, in words; with `untouched_since` those of `abandoned` ones too."""
    abandoned: tuple[Orphan, ...] = ()
    """What starts left that were followed by another, none of it created since `untouched_since`."""
    untouched_since: float | None = None
    """Seconds since 1970, by the store's clock; None: nothing is taken for abandoned."""
    foreign: tuple[str, ...] = ()
    """Keys that are none of ours; never touched."""
    foreign_nbytes: int = 0
    waiting: int = 0
    """Attempts that no manifest names and somebody may still be working on: they go once a later generation has committed. Those
    in `abandoned` are not counted."""
    waiting_nbytes: int = 0
    waiting_uploads: int = 0
    """As `unfinished`, of generations that are not over; their size is not known."""

    @property
    def nbytes(self) -> int:
        """What carrying it out frees, as far as it is known."""
        gone = (*self.orphans, *self.abandoned)
        return sum(c.nbytes for c in self.checkpoints) + sum(o.nbytes for o in gone)


def plan_gc(
    store: ObjectStore,
    retention: Retention | None,
    *,
    off_lineage: bool = False,
    abandoned_s: float | None = None,
) -> GcPlan:
    """Look, and say what could go. Deletes nothing.

    Args:
        retention: rules by which old checkpoints go as well; None: all checkpoints stay.
        off_lineage: checkpoints that do not count, of generations that are over, go as well.
        abandoned_s: what starts left that were followed by another goes as well, where nothing of it was created for so long. It
            must be longer than a save can take, and than a process can be suspended and go on: whoever is still at it would
            commit a manifest whose data is gone.

    Raises: ObjectStore…Error, LineageError, DamagedError (a record).
    """
    seen = _survey(store)
    doomed = [] if retention is None else _doomed_by(store, retention, seen.holdings)
    if off_lineage:
        doomed += _left_behind(store, seen.holdings, seen.over_below)
    ledgers = _ledger_chain(store)
    found = orphans(seen.holdings, seen.named, over_below=seen.over_below, ledgers=ledgers)
    since = None if abandoned_s is None else time.time() - abandoned_s
    left = [] if since is None else _abandoned(seen, since, ledgers)
    stale = [
        key
        for (g, s), keys in sorted(seen.holdings.beside.items())
        if (g, s) not in seen.named and g < seen.over_below
        for key in sorted(keys)
    ]
    gone = {o.attempt for o in (*found, *left)}
    waiting = [
        keys
        for ref, keys in seen.holdings.attempts.items()
        if unnamed(ref, seen.named)
        and ref not in gone
        and ref.generation >= seen.over_below
        and not all(key.endswith("/ledger.json") for key in keys)  # of a checkpoint that retention let go
    ]
    uploads = _unfinished(store, seen.records)
    ended = [u for u in uploads if _is_given_up(u, seen, since)]
    return GcPlan(
        root=store.root,
        checkpoints=tuple(doomed),
        orphans=tuple(found),
        stale_flags=tuple(stale),
        unfinished=tuple(_in_words(u) for u in ended),
        abandoned=tuple(left),
        untouched_since=since,
        foreign=tuple(sorted(seen.holdings.foreign)),
        foreign_nbytes=sum(seen.holdings.foreign.values()),
        waiting=len(waiting),
        waiting_nbytes=sum(sum(keys.values()) for keys in waiting),
        waiting_uploads=len(uploads) - len(ended),
    )


def carry_out(store: ObjectStore, plan: GcPlan, progress: Progress | None = None) -> int:
    """Delete what the plan names; returns how many things went. What became exempt meanwhile stays, and so does what somebody has
    gone on with.

    Raises: ObjectStore…Error; what was deleted stays deleted.
    """
    seen, since = _survey(store), plan.untouched_since
    uploads = [
        u
        for u in _unfinished(store, seen.records)
        if _in_words(u) in plan.unfinished and _is_given_up(u, seen, since)
    ]
    left: list[Callable[[], object]] = []
    if since is not None:
        left += [lambda o=o, t=since: _delete_abandoned(store, o, t) for o in plan.abandoned]
    todo: list[Callable[[], object]] = [
        *(lambda ref=c.ref: _delete_checkpoint(store, ref) for c in plan.checkpoints),
        *(lambda key=key: store.delete(key) for o in plan.orphans for key in o.keys),
        *left,
        *(lambda key=key: store.delete(key) for key in plan.stale_flags),
        *(lambda u=u: store.discard(u) for u in uploads),
    ]
    for done, act in enumerate(todo, start=1):
        act()
        if progress is not None:
            progress(done, len(todo))
    return len(todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """Everything there is, which attempt each manifest names, and below which generation all is over."""

    holdings: Holdings
    named: dict[tuple[int, int], str | None]
    """As `orphans` takes it. Of a step at which one attempt alone lies the manifest is not read: that attempt stays anyway."""
    over_below: int
    records: list[int]
    modified: dict[str, float]


def _survey(store: ObjectStore) -> _Survey:
    """The records are listed first: a generation that has one by then and commits before the second listing is over only for
    those below it, as it would have been anyway."""
    records = list_records(store)
    listed = store.list("")
    manifests = manifest_refs(o.key for o in listed)
    holdings = sort_out((o.key, o.size) for o in listed)
    return _Survey(
        holdings=holdings,
        named=_named(store, holdings, manifests),
        over_below=generations_over(manifests, records),
        records=records,
        modified={o.key: o.modified_at for o in listed},
    )


def _abandoned(seen: _Survey, since: float, ledgers: set[str] | None) -> list[Orphan]:
    return abandoned(
        seen.holdings,
        seen.named,
        over_below=seen.over_below,
        newest=max(seen.records, default=0),
        modified=seen.modified,
        before=since,
        ledgers=ledgers,
    )


def _delete_abandoned(store: ObjectStore, orphan: Orphan, since: float) -> bool:
    """Part records first: without them nobody can commit the attempt. False where it was committed or gone on with meanwhile."""
    a = orphan.attempt
    stored = store.list(step_prefix(a.generation, a.step))
    mine = [o for o in stored if o.key.startswith(attempt_prefix(a.generation, a.step, a.attempt))]
    if manifest_refs(o.key for o in stored) or any(o.modified_at >= since for o in mine):
        _log.warning(
            "attempt %s at step %d of generation %d stays: somebody has gone on with it",
            *(a.attempt, a.step, a.generation),
        )
        return False
    for key in sorted(orphan.keys, key=lambda key: (not key.endswith(".part.json"), key)):
        store.delete(key)
    return True


def _named(
    store: ObjectStore, holdings: Holdings, manifests: Iterable[ManifestRef]
) -> dict[tuple[int, int], str | None]:
    attempts = Counter((a.generation, a.step) for a in holdings.attempts)
    named: dict[tuple[int, int], str | None] = {(m.generation, m.step): None for m in manifests}
    in_doubt = [m for m in manifests if attempts[m.generation, m.step] > 1]
    found = each_of(lambda m: _attempt_of(store, m), in_doubt)
    return named | {(m.generation, m.step): a for m, a in zip(in_doubt, found, strict=True)}


def _attempt_of(store: ObjectStore, ref: ManifestRef) -> str | None:
    try:
        return decode(Manifest, store.read(ref.key), key=ref.key).attempt
    except (CkptError, ObjectMissingError):
        return None


def _unfinished(store: ObjectStore, generations: Iterable[int]) -> list[Unfinished]:
    """Uploads and temporary files of these generations."""
    folders = {f"gen-{g:04d}" for g in generations}
    return [u for u in store.unfinished("gen-") if u.key.partition("/")[0] in folders]


def _is_given_up(u: Unfinished, seen: _Survey, since: float | None) -> bool:
    """Its generation is over; or was followed by another, and nobody has touched it since then."""
    generation = int(u.key.partition("/")[0].removeprefix("gen-"))
    if generation < seen.over_below:
        return True
    return since is not None and generation < max(seen.records) and u.begun_at < since


def _in_words(u: Unfinished) -> str:
    return f"{u.key} ({u.token})"


def _doomed_by(store: ObjectStore, retention: Retention, holdings: Holdings) -> list[Doomed]:
    return [
        Doomed(ref=v.ref, why=v.why, nbytes=_step_nbytes(holdings, v.ref))
        for v in judge_line(store, retention)
        if not v.keep
    ]


def _left_behind(store: ObjectStore, holdings: Holdings, over_below: int) -> list[Doomed]:
    keys = [o.key for o in store.list("gen-")]
    refs, flags = manifest_refs(keys), flags_among(keys)
    records = read_records(store)
    require_recorded(records, refs)
    counting = set(lineage(records, refs))
    return [
        Doomed(ref=ref, why="off the lineage, and its generation is over", nbytes=_step_nbytes(holdings, ref))
        for ref in refs
        if ref not in counting
        and ref.generation < over_below
        and "kept" not in flags.get((ref.generation, ref.step), ())
    ]


def _step_nbytes(holdings: Holdings, ref: ManifestRef) -> int:
    prefix = step_prefix(ref.generation, ref.step)
    return sum(
        size
        for keys in holdings.attempts.values()
        for key, size in keys.items()
        if key.startswith(prefix) and not key.endswith("/ledger.json")
    )


def _ledger_chain(store: ObjectStore) -> set[str] | None:
    """The keys of all ledgers that any manifest leads to; None where some link cannot be read: then every ledger stays."""
    known: set[str] = set()
    for ref in manifest_refs(o.key for o in store.list("gen-")):
        try:
            at: LedgerRef | None = decode(Manifest, store.read(ref.key), key=ref.key).ledger
            while at is not None and at.key not in known:
                known.add(at.key)
                previous = decode(Ledger, store.read(at.key), key=at.key).previous
                at = previous.ledger if previous is not None else None
        except (CkptError, ObjectMissingError):
            return None
    return known

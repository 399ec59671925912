"""Loading on one's own: the newest readable checkpoint, by all ranks together. (torch)

All ranks try the same step, and each hears how it went for the others: where one finds damage, all go on to the step before,
and rank 0 sets the damaged one aside (ckpt/loading/aside.py, which also says what happens after repeated failed resumes).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CkptError, CkptUserError, DamagedError, ElsewhereError, StepMissingError
from surefoot.ckpt.format.flags import raise_flag
from surefoot.ckpt.live.filling import Fit
from surefoot.ckpt.loading.abandon import abandon
from surefoot.ckpt.loading.aside import (
    RESUME_TRIES,
    Choice,
    Resume,
    aside_among,
    choose,
    note_resume,
    resumes_among,
    set_aside,
    why_aside,
)
from surefoot.ckpt.loading.carrying import GroupError, UnagreedError
from surefoot.ckpt.loading.fetching import load_together, shared_manifest
from surefoot.ckpt.loading.reading import ADVICE
from surefoot.ckpt.loading.restore import restored_of
from surefoot.ckpt.loading.sharing import Party, party_of
from surefoot.ckpt.manifest import Manifest, ManifestRef, manifest_refs, step_prefix
from surefoot.ckpt.planning.agreeing import differing
from surefoot.ckpt.record import Record, left_by, lineage, read_records, require_recorded
from surefoot.ckpt.store import ObjectStore, ObjectStoreError

_log = logging.getLogger(__name__)

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0
WAIT_ROUND_S = 60.0
"""While rank 0 waits for a step the others wait for rank 0; it lets them know this often, well below a channel's timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded. `missing` and `left_over`: names that only the state has, and that only the checkpoint has, with where
    they are stored (strict=False). `passed_over`: newer steps, and why they were not taken."""

    generation: int
    step: int
    cursor: dict[str, Any]
    extra: dict[str, Any] | None
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What the save noted of itself: host, process, what it cost."""


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells the others: where it loads which step from, and the candidates (rank 0); or how its load went."""

    root: str = ""
    asked: int | None = None

    candidates: tuple[ManifestRef, ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()
    waiting: bool = False
    damage: str = ""
    failure: str = ""
    missing: bool = False
    """The failure is that there is no such step: whoever catches that catches it on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What lies under a root: all keys of checkpoints, all manifests, records by generation, and the manifests that count."""

    keys: Sequence[str]
    manifests: Sequence[ManifestRef]
    records: Mapping[int, Record]
    line: list[ManifestRef]


def _survey(store: ObjectStore) -> _Survey:
    keys = [o.key for o in store.list("gen-")]
    manifests, records = manifest_refs(keys), read_records(store)
    require_recorded(records, manifests)
    return _Survey(keys=keys, manifests=manifests, records=records, line=lineage(records, manifests))


def find_line(store: ObjectStore) -> list[ManifestRef]:
    """The lineage as of now, ascending. Raises: LineageError, FormatError, DamagedError, ObjectStore…Error."""
    return _survey(store).line


def load_agreed(
    store: ObjectStore,
    channel: Channel,
    state: Mapping[str, Any],
    *,
    step: int | None,
    strict: bool,
    skip: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
    resume_tries: int | None = RESUME_TRIES,
    wait_s: float = 0.0,
) -> Loaded | None:
    """All ranks load the same step: the one asked for, or the newest on the lineage that all of them can read.

    Returns None where `step` is None and there is nothing to load. Collective over the channel, and over `group`, whose ranks
    are the channel's, and which passes on what several of them need. Where a rank dies, hangs or leaves by an error on the way, the
    others raise, and nobody waits in `group` any more: it is of no use afterwards.

    Args:
        resume_tries: see ckpt/loading/aside.py; None: the newest step is taken however many starts have died of it.
        wait_s: how long to wait for `step` to be committed, if it is not yet.

    Raises:
        StepMissingError: the lineage does not hold `step`.
        DamagedError: `step` is damaged, or every step is.
        StateMismatchError: on all ranks, as those before. Others: on the rank it happened; ElsewhereError naming it on the others.
        ChannelError: another rank died, hangs, was interrupted, or did not come in time.
    """
    with channel.one_call():
        return _load_agreed(store, channel, state, step, strict, skip, group, resume_tries, wait_s)


def _load_agreed(
    store: ObjectStore,
    channel: Channel,
    state: Mapping[str, Any],
    step: int | None,
    strict: bool,
    skip: Sequence[str],
    group: dist.ProcessGroup | None,
    resume_tries: int | None,
    wait_s: float,
) -> Loaded | None:
    first = _agree_on_candidates(store, channel, step, resume_tries, wait_s)
    party = party_of(channel.rank, channel.world_size, channel.exchange, group)
    passed_over = list(first.passed_over)
    for ref in first.candidates:
        with channel.until_told(lambda: abandon(group)) if party.shares else nullcontext():
            manifest, fit, error = _try_load(store, party, state, ref, strict=strict, skip=skip)
        if isinstance(error, UnagreedError):
            raise channel.explained(error.cause) if isinstance(error, GroupError) else error.cause
        words = _tell_all(channel, _word_of(error))
        failed = [(r, w.failure) for r, w in enumerate(words) if w.failure]
        if failed:
            raise error or ElsewhereError(
                f"rank {failed[0][0]} could not load step {ref.step}: {failed[0][1]}"
            )
        damage = next((w.damage for w in words if w.damage), "")
        if not damage and manifest is not None:
            if channel.rank == 0 and strict and not skip:
                _flag_verified(store, ref)
            return _loaded(manifest, channel, fit, passed_over)
        passed_over.append((ref.step, damage))
        if channel.rank == 0 and not isinstance(error, StepMissingError):
            set_aside(store, ref, damage)
    if passed_over:
        listed = "; ".join(f"step {s}: {why.removesuffix(ADVICE)}" for s, why in passed_over)
        raise DamagedError(
            f"{store.root}: no checkpoint {'is readable' if step is None else 'of that step is readable'}: {listed} (`surefoot ckpt "
            f"verify {store.root} STEP` looks again at what was set aside, and clears the mark of what is sound)",
            key="",
        )
    if channel.rank == 0:
        _log.warning(
            "nothing was loaded: %s holds no checkpoint yet. If it should, look whether the address is right",
            store.root,
        )
    return None


def note_start(store: ObjectStore, channel: Channel, loaded: Loaded) -> Resume | None:
    """Leave a marker that this start resumes from what it loaded. For rank 0 of a start that will save; others get None."""
    if channel.rank != 0:
        return None
    key = ManifestRef(step=loaded.step, generation=loaded.generation, key="")
    return note_resume(store, key)


def _flag_verified(store: ObjectStore, ref: ManifestRef) -> None:
    """All of the checkpoint was read, and compared with its checksums."""
    try:
        raise_flag(store, ref, "verified", "by a load")
    except ObjectStoreError as e:
        _log.debug("step %d was verified, and cannot be marked so: %s", ref.step, e)


# ---------------------------------------------------------------- which step


def _agree_on_candidates(
    store: ObjectStore, channel: Channel, step: int | None, tries: int | None, wait_s: float
) -> _Word:
    """Rank 0 looks; newest first."""
    give_up = time.monotonic() + wait_s
    while True:
        error: Exception | None = None
        word = _Word()
        if channel.rank == 0:
            try:
                word = _look(store, step, tries, give_up)
            except (CkptError, ObjectStoreError) as e:
                error, word = e, _Word(failure=str(e), missing=isinstance(e, StepMissingError))
        words = _tell_all(channel, msgspec.structs.replace(word, root=store.root, asked=step))
        if roots := differing([w.root for w in words]):
            raise CkptUserError(
                f"ranks load from different roots ({roots}): give all the same, a folder or bucket that all of them see"
            )
        if steps := differing([w.asked for w in words]):
            raise CkptUserError(f"ranks ask for different steps ({steps}): all ranks load the same")
        first = words[0]
        if first.failure:
            raise error or _as_rank_0_failed(first)
        if not first.waiting:
            return first


def _as_rank_0_failed(word: _Word) -> Exception:
    """For the others."""
    if word.missing:
        return StepMissingError(word.failure)
    return ElsewhereError(f"rank 0 could not list the checkpoints: {word.failure}")


def _look(store: ObjectStore, step: int | None, tries: int | None, give_up: float) -> _Word:
    """What rank 0 finds; `waiting` after WAIT_ROUND_S without the step."""
    let_know = time.monotonic() + WAIT_ROUND_S
    pause_s = FIRST_POLL_S
    while True:
        found = _survey(store)
        if step is None:
            aside = {at: why_aside(store, *at) for at in aside_among(found.keys)}
            choice = choose(found.line, aside, resumes_among(found.keys), tries=tries)
            return _word_of_choice(choice)
        try:
            return _Word(candidates=(_only(found, step, store),))
        except StepMissingError:
            now = time.monotonic()
            if now + pause_s > give_up:
                raise
            if now + pause_s > let_know:
                return _Word(waiting=True)
        time.sleep(pause_s)  # an object store has no watch: it can only be asked again
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _word_of_choice(choice: Choice) -> _Word:
    return _Word(
        candidates=choice.candidates, passed_over=tuple((ref.step, why) for ref, why in choice.passed_over)
    )


def _only(found: _Survey, step: int, store: ObjectStore) -> ManifestRef:
    """The step that was asked for. Raises StepMissingError, saying what there is of it."""
    counting = [m for m in found.line if m.step == step]
    if counting:
        return counting[-1]
    left = [m for m in found.manifests if m.step == step]
    begun = [k for k in found.keys if f"/{step_prefix(1, step).partition('/')[2]}" in k]
    held = f"the newest that count are: {', '.join(str(m.step) for m in found.line[-8:]) or 'none'}"
    if left:
        why = f"{_why_left(left[-1], found.records)}; {held}. Load one of these; {_see(left[-1], store)}"
    elif begun:
        why = (
            f"step {step} is not committed, though a save of it was begun ({begun[0]}): it is under way (wait_s waits for it), or was given "
            f"up; {held}"
        )
    else:
        why = f"there is no committed step {step} on its lineage; {held}"
    raise StepMissingError(f"{store.root}: {why}")


def _why_left(ref: ManifestRef, records: Mapping[int, Record]) -> str:
    """Of a step that is committed and does not count: who has left it behind."""
    by = left_by(records, ref.generation)
    said = f"step {ref.step} is committed, by generation {ref.generation}, and does not count"
    if by is None:
        return said
    start = by.start
    origin = f"step {start.step} of generation {start.generation}" if start.generation else "nothing"
    return f"{said}: generation {by.generation} went on from {origin}, and so left it behind"


def _see(ref: ManifestRef, store: ObjectStore) -> str:
    return (
        f"`surefoot ckpt show {store.root} {ref.step} --generation {ref.generation}` shows what it holds, and `surefoot ckpt export` takes it "
        f"out, with the same option"
    )


# ---------------------------------------------------------------- one try


def _try_load(
    store: ObjectStore,
    party: Party,
    state: Mapping[str, Any],
    ref: ManifestRef,
    *,
    strict: bool,
    skip: Sequence[str],
) -> tuple[Manifest | None, Fit, Exception | None]:
    try:
        try:
            manifest = shared_manifest(store, party, ref.generation, ref.step)
        except (CkptError, ObjectStoreError):
            raise
        except Exception as e:  # of these the others may know nothing
            raise (GroupError if isinstance(e, RuntimeError) else UnagreedError)(e) from e
        return manifest, load_together(store, manifest, party, state, strict=strict, skip=skip), None
    except Exception as e:  # whatever it is, the others must hear of it before this rank raises
        return None, Fit(), e


def _word_of(error: Exception | None) -> _Word:
    if error is None:
        return _Word()
    if isinstance(error, DamagedError | StepMissingError):
        return _Word(damage=str(error))
    return _Word(failure=f"{type(error).__name__}: {error}")


def _tell_all(channel: Channel, word: _Word) -> list[_Word]:
    return [msgspec.json.decode(w, type=_Word) for w in channel.exchange(msgspec.json.encode(word))]


def _loaded(manifest: Manifest, channel: Channel, fit: Fit, passed_over: list[tuple[int, str]]) -> Loaded:
    restored = restored_of(manifest, channel.rank, channel.world_size)
    return Loaded(
        generation=restored.generation,
        step=restored.step,
        cursor=restored.cursor,
        extra=restored.extra,
        missing=fit.missing,
        left_over=fit.left_over,
        passed_over=tuple(passed_over),
        facts=manifest.facts,
    )

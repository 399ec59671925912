"""What loads leave beside a manifest, and which checkpoint a load takes because of it. Torch-free; `choose` is PURE.

::

    gen-0004/step-0000000120/aside.json             a load or `verify` found it damaged. Loads that name no step pass it over; it is not
                                                    deleted, and a load of that very step still tries it
                             resumes/<nonce>.json   a start resumed from it, and has neither committed a newer step nor ended
                                                    in peace: then it takes its marker away

**Repeated failed resumes.** A checkpoint may be whole and still be the reason why every start from it dies (a loss that
has become NaN, an optimizer state that blows up). The evidence is simple: each start that resumes leaves a marker beside the manifest.
Markers that are still there belong to starts that died before their first commit (or that are running: two jobs on one
root count for each other). Once the newest checkpoint has as many of them as allowed, the one before it is taken, and that
one until something newer is committed: never more than one step back for this reason, since a fault that is
not in the checkpoint would otherwise eat them all.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from surefoot.ckpt.format.flags import Flag, flag_key, flags_among, lower_flag, raise_flag
from surefoot.ckpt.manifest import ManifestRef, encode, step_prefix
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, ObjectStoreError

_log = logging.getLogger(__name__)

RESUME_TRIES = 3
"""Starts that may die after resuming from a checkpoint until the one before it is taken."""

_RESUME_KEY = re.compile(r"gen-(\d{4,})/step-(\d{10,})/resumes/[0-9a-f]+\.json")


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """A resume marker's content, for people. `at`: seconds since 1970."""

    format: int = 1
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class Resume:
    """This start's marker."""

    store: ObjectStore
    key: str

    def settle(self) -> None:
        """The start has got further, or ended in peace. Never raises: a marker too many does little harm."""
        try:
            self.store.delete(self.key)
        except ObjectStoreError as e:
            _log.warning("the resume marker %s/%s could not be deleted: %s", self.store.root, self.key, e)


def note_resume(store: ObjectStore, ref: ManifestRef) -> Resume | None:
    """Leave a marker; None where the store does not let us (then this start does not count)."""
    key = f"{step_prefix(ref.generation, ref.step)}resumes/{secrets.token_hex(8)}.json"
    word = Resumed(by=f"{socket.gethostname()}:{os.getpid()}", at=round(time.time(), 3))
    try:
        store.create(key, encode(word))
    except ObjectStoreError as e:
        _log.warning("this start leaves no resume marker: %s", e)
        return None
    return Resume(store, key)


def set_aside(store: ObjectStore, ref: ManifestRef, reason: str, *, finder: str = "an earlier load") -> bool:
    """Mark a damaged checkpoint, which then is no verified one any more. False where its manifest is gone: then nothing is damaged,
    retention has deleted it meanwhile. Never raises: a store that cannot be written to can still be loaded from.

    Args:
        finder: who has found the damage, for whoever is told later that the step is passed over.
    """
    try:
        raise_flag(store, ref, "aside", f"{reason} (found by {finder})")
        lower_flag(store, ref, "verified")
        if not any(o.key == ref.key for o in store.list(step_prefix(ref.generation, ref.step))):
            lower_flag(store, ref, "aside")
            return False
    except ObjectStoreError as e:
        _log.warning("step %d is damaged, and could not be set aside: %s", ref.step, e)
    return True


def why_aside(store: ObjectStore, generation: int, step: int) -> str:
    """What was wrong with a checkpoint that was set aside. Raises ObjectStore…Error."""
    try:
        return msgspec.json.decode(store.read(flag_key(generation, step, "aside")), type=Flag).about
    except (ObjectMissingError, msgspec.DecodeError):
        return "it says no more"


# ---------------------------------------------------------------- which one to take (PURE)


def ways_out(step: int) -> str:
    """What to do where a step is passed over because starts have died after it, and it was not to blame."""
    return f"`load(state, {step})` takes it all the same, a `Checkpointer` with `resume_tries=None` always takes the newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Checkpoints to try, the first first; and those passed over without a try, with the reason."""

    candidates: tuple[ManifestRef, ...]
    passed_over: tuple[tuple[ManifestRef, str], ...] = ()


def resumes_among(keys: Iterable[str]) -> dict[tuple[int, int], int]:
    """How many resume markers a listing shows, by (generation, step)."""
    found: dict[tuple[int, int], int] = {}
    for key in keys:
        if (m := _RESUME_KEY.fullmatch(key)) is not None:
            at = (int(m[1]), int(m[2]))
            found[at] = found.get(at, 0) + 1
    return found


def aside_among(keys: Iterable[str]) -> list[tuple[int, int]]:
    """Which checkpoints a listing shows as set aside, by (generation, step)."""
    return [at for at, kinds in flags_among(keys).items() if "aside" in kinds]


def choose(
    line: Sequence[ManifestRef],
    aside: Mapping[tuple[int, int], str],
    resumes: Mapping[tuple[int, int], int],
    *,
    tries: int | None,
) -> Choice:
    """What a load that names no step tries, of a lineage (ascending).

    Args:
        aside: what was set aside, and why.
        tries: how many starts may have died after resuming from the newest; None: any number.
    """
    sound = [m for m in reversed(line) if (m.generation, m.step) not in aside]
    passed = [
        (m, f"set aside: {aside[m.generation, m.step]}")
        for m in reversed(line)
        if (m.generation, m.step) in aside and (not sound or m > sound[0])
    ]
    if tries is not None and len(sound) > 1:
        newest = sound[0]
        died = resumes.get((newest.generation, newest.step), 0)
        if died >= tries:
            passed.append(
                (
                    newest,
                    f"{died} starts resumed from it, and none of them got any further; {ways_out(newest.step)}",
                )
            )
            sound = [*sound[1:], newest]
    return Choice(candidates=tuple(sound), passed_over=tuple(passed))

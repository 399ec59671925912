"""What lies under a root and belongs to nothing that counts, or ever will. PURE; ckpt/keeping/cleaning.py deletes it.

An *orphan* is an attempt that no manifest names and whose generation is over: a higher generation has *committed* a
checkpoint. A higher record alone is not enough. As long as the new generation is forming, a manifest of the old one may still
appear and win: the number is burnt then, and the next record starts from it (record.py). Once a higher generation has
committed something, nobody goes back there.

So nothing of the newest generation that has committed is ever an orphan, whatever its step: it may be in flight. That its
step was committed by another attempt does not make it one: whoever writes it has not heard of that yet.

What starts leave that die one after the other before any of them commits waits for the first that does. An operator may
name an age instead (`abandoned`): what is of a start that was followed by another, and older than a save can take, nobody
is working on. That is his word: no rule could tell a process that has been suspended for so long from one that is dead.

Only keys that Surefoot writes are looked at; everything else is *foreign*, counted, and left alone. A ledger outlives its
checkpoint (retention.py), so an orphaned one goes only if the chain of committed ledgers is known and does not name it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from surefoot.ckpt.manifest import ManifestRef

_ATTEMPT_KEY = re.compile(
    r"gen-(?P<generation>\d{4,})/step-(?P<step>\d{10,})/(?P<attempt>[A-Za-z0-9_-]{1,64})/"
    r"(?P<name>r\d{5,}-\d+\.safetensors|n\d{5,}\.part\.json|ledger\.json|[a-z]+\.parquet)"
)
_BESIDE_KEY = re.compile(
    r"gen-(?P<generation>\d{4,})/step-(?P<step>\d{10,})/((verified|kept|aside)\.json|resumes/[^/]+\.json)"
)
_OTHER_KEY = re.compile(r"generations/\d{4,}\.json|gen-\d{4,}/step-\d{10,}/manifest\.json")

OrphanReason = Literal[
    "its generation is over",
    "another start followed, and nobody has touched it since",
]


class AttemptRef(msgspec.Struct, frozen=True, kw_only=True, order=True):
    generation: int
    step: int
    attempt: str


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that can go: these keys of it."""

    attempt: AttemptRef
    reason: OrphanReason
    keys: tuple[str, ...]
    nbytes: int


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """A listing of a root, sorted out."""

    attempts: dict[AttemptRef, dict[str, int]]
    """Keys and sizes."""
    beside: dict[tuple[int, int], list[str]]
    """Flags (ckpt/format/flags.py), by generation and step."""
    foreign: dict[str, int]
    """What Surefoot did not write, or does not know."""


def sort_out(listed: Iterable[tuple[str, int]]) -> Holdings:
    """(key, size) of everything under a root, by what it belongs to. PURE."""
    attempts: dict[AttemptRef, dict[str, int]] = {}
    beside: dict[tuple[int, int], list[str]] = {}
    foreign: dict[str, int] = {}
    for key, size in listed:
        if (m := _ATTEMPT_KEY.fullmatch(key)) is not None:
            ref = AttemptRef(generation=int(m["generation"]), step=int(m["step"]), attempt=m["attempt"])
            attempts.setdefault(ref, {})[key] = size
        elif (m := _BESIDE_KEY.fullmatch(key)) is not None:
            beside.setdefault((int(m["generation"]), int(m["step"])), []).append(key)
        elif not _OTHER_KEY.fullmatch(key):
            foreign[key] = size
    return Holdings(attempts=attempts, beside=beside, foreign=foreign)


def generations_over(manifests: Iterable[ManifestRef], records: Collection[int]) -> int:
    """All generations below this one are over: the newest that has a record and has committed. PURE."""
    return max((m.generation for m in manifests if m.generation in records), default=0)


def unnamed(ref: AttemptRef, named: Mapping[tuple[int, int], str | None]) -> bool:
    """Is it certain that no manifest names this attempt? `named`: see `orphans`. PURE."""
    return named.get((ref.generation, ref.step), "") not in (None, ref.attempt)


def orphans(
    holdings: Holdings,
    named: Mapping[tuple[int, int], str | None],
    *,
    over_below: int,
    ledgers: Collection[str] | None,
) -> list[Orphan]:
    """What may be swept, ascending. PURE.

    Args:
        named: the attempt that each manifest names, by (generation, step); None where the manifest cannot be read: then
            everything of that step stays.
        over_below: see `generations_over`.
        ledgers: the keys of all ledgers that the committed chain names; None where it is not known.
    """
    found: list[Orphan] = []
    for ref, keys in sorted(holdings.attempts.items()):
        if ref.generation >= over_below or not unnamed(ref, named):
            continue
        reason: OrphanReason = "its generation is over"
        gone = [key for key in sorted(keys) if not _is_evidence(key, ledgers)]
        if gone:
            nbytes = sum(keys[key] for key in gone)
            found.append(Orphan(attempt=ref, reason=reason, keys=tuple(gone), nbytes=nbytes))
    return found


def abandoned(
    holdings: Holdings,
    named: Collection[tuple[int, int]],
    *,
    over_below: int,
    newest: int,
    modified: Mapping[str, float],
    before: float,
    ledgers: Collection[str] | None,
) -> list[Orphan]:
    """Attempts of generations that are not over, but followed by another; that no manifest names, nor any of their step; and of
    which nothing was created since `before`. Ascending. PURE.

    Args:
        newest: the newest generation that has a record; its attempts may be in flight.
        modified: when each key was created; `before` is by the same clock.
    """
    found: list[Orphan] = []
    for ref, keys in sorted(holdings.attempts.items()):
        if (ref.generation, ref.step) in named or not over_below <= ref.generation < newest:
            continue
        if max(modified[key] for key in keys) >= before:
            continue
        gone = tuple(key for key in sorted(keys) if not _is_evidence(key, ledgers))
        if gone:
            reason: OrphanReason = "another start followed, and nobody has touched it since"
            found.append(Orphan(attempt=ref, reason=reason, keys=gone, nbytes=sum(keys[key] for key in gone)))
    return found


def _is_evidence(key: str, ledgers: Collection[str] | None) -> bool:
    return key.endswith("/ledger.json") and (ledgers is None or key in ledgers)

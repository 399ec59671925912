"""A committed checkpoint as the source of a load: `ManifestSource`. (torch)

First all ranks tell each other what they want (`agree`), and each makes the same plan of it (ckpt/planning/readplan.py). Then each
does its part of it (`fill`; ckpt/loading/carrying.py), and all end alike: where one fails, all raise.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import (
    CkptError,
    CkptWorldError,
    DamagedError,
    ElsewhereError,
    StateMismatchError,
    StepMissingError,
)
from surefoot.ckpt.live.filling import Fit, load_into
from surefoot.ckpt.live.livestate import no_collection
from surefoot.ckpt.live.source import Want
from surefoot.ckpt.loading.carrying import Carrier, GroupError, StoppedError, UnagreedError
from surefoot.ckpt.loading.reading import ADVICE
from surefoot.ckpt.loading.restore import decode_manifest, is_whole, read_manifest_bytes, require_objects
from surefoot.ckpt.loading.sharing import Party
from surefoot.ckpt.manifest import Manifest, TensorMeta, manifest_key
from surefoot.ckpt.planning.readplan import FAR, NEARBY, ReadPlan, Wants, plan_reads, require_readable
from surefoot.ckpt.store import ObjectStore, ObjectStoreError
from surefoot.ckpt.storeline import ChannelError


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells the others: before the reading what it wants, after a failure what went wrong."""

    refusal: str = ""
    wants: str = ""
    on_device: bool = False
    machine: str = ""
    """Where its page cache is."""
    memory: str = ""
    """Where the objects lie that it can look at; '' for none."""
    damaged: str = ""
    """The key of a damaged object."""
    mismatch: bool = False
    """Its state and the checkpoint do not fit."""


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wants, and which stored names it has no use for."""

    boxes: dict[str, tuple[Box, ...]]
    unused: tuple[str, ...]


class _ManifestWord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank found: the manifest's bytes (rank 0), or why there is none that it can use."""

    data: bytes = b""
    missing: str = ""
    damaged: str = ""
    key: str = ""
    failure: str = ""


def shared_manifest(store: ObjectStore, party: Party, generation: int, step: int) -> Manifest:
    """One rank reads the manifest, all have it, and each decodes it for itself, at the same time. Collective.

    Raises: StepMissingError, DamagedError, FormatError, on all ranks; ObjectStore…Error on rank 0, ElsewhereError on others.
    """
    error: Exception | None = None
    word = _ManifestWord()
    if party.rank == 0:
        try:
            word = _ManifestWord(data=read_manifest_bytes(store, generation, step))
        except Exception as e:  # whatever it is, the others must hear of it before this rank raises
            error, word = e, _manifest_word(e)
    if party.world_size > 1:
        word = msgspec.msgpack.decode(party.from_first(msgspec.msgpack.encode(word)), type=_ManifestWord)
    _raise_manifest_word(word, error)
    manifest: Manifest | None = None
    try:
        manifest = decode_manifest(word.data, generation, step)
        if party.rank == 0:
            require_objects(store, manifest)
    except Exception as e:
        error = e
    if party.any(error is not None):
        told = party.exchange(msgspec.msgpack.encode(_manifest_word(error) if error else _ManifestWord()))
        words = [msgspec.msgpack.decode(data, type=_ManifestWord) for data in told]
        _raise_manifest_word(next(w for w in words if w != _ManifestWord()), error)
    assert manifest is not None, "whoever could not decode it has said so"
    return manifest


def _raise_manifest_word(word: _ManifestWord, mine: Exception | None) -> None:
    if mine is not None:
        raise mine
    if word.missing:
        raise StepMissingError(word.missing)
    if word.damaged:
        raise DamagedError(word.damaged, key=word.key)
    if word.failure:
        raise ElsewhereError(f"rank 0: {word.failure}")


def _manifest_word(error: Exception) -> _ManifestWord:
    match error:
        case StepMissingError():
            return _ManifestWord(missing=str(error))
        case DamagedError():
            return _ManifestWord(damaged=str(error), key=error.key)
        case _:
            return _ManifestWord(failure=f"{type(error).__name__}: {error}")


def load_together(
    store: ObjectStore,
    manifest: Manifest,
    party: Party,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    skip: Sequence[str] = (),
) -> Fit:
    """`load_into` from a manifest, by all ranks. Raises as `ManifestSource.agree` and `fill`, and as `load_into`."""
    source = ManifestSource(store, manifest, party)
    try:
        with no_collection():
            return load_into(state, source, strict=strict, skip=skip, rank=party.rank)
    except Exception as e:
        source.withdraw(e)
        raise


class ManifestSource:
    """A load's `Source`. One object serves one load. Collective: all ranks of `party` make the same calls, or `withdraw`."""

    def __init__(self, store: ObjectStore, manifest: Manifest, party: Party | None = None) -> None:
        self._store = store
        self._manifest = manifest
        self._party = party or Party(0, 1, lambda data: [data])
        self._plan: ReadPlan | None = None
        self._told = False

    @property
    def label(self) -> str:
        m = self._manifest
        return f"the checkpoint of step {m.step}, generation {m.generation}, in {self._store.root}"

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self._manifest.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._manifest.aliases

    @property
    def values(self) -> Mapping[str, Any]:
        return self._manifest.values

    def where(self, name: str) -> str:
        """The objects that hold a stored name; the manifest's key for a value, or a name that is not there."""
        stored = self.aliases.get(name, name)
        keys = [o.key for o in self._manifest.objects if any(p.name == stored for p in o.pieces)]
        if not keys:
            return manifest_key(self._manifest.generation, self._manifest.step)
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")

    # ---- before the reading

    def agree(self, wants: Sequence[Want], unused: Sequence[str], refusal: Exception | None) -> Sequence[str]:
        """Tell the other ranks what this one wants, which stored names it has no use for, and what it refuses with (None if it
        does not); returns the names that no rank has a use for.

        Raises:
            StateMismatchError, ElsewhereError: another rank refuses, and this one does not.
            DamagedError: the manifest contradicts itself.
        """
        wish = _Wish(boxes=_boxes_of(wants), unused=tuple(unused))
        encoded = msgspec.msgpack.encode(wish)
        damage: DamagedError | None = None
        try:
            require_readable(self._manifest)
        except DamagedError as e:
            damage = e
        word = _Word(
            wants=xxhash.xxh3_128_hexdigest(encoded),
            machine=machine(),
            memory=f"{machine()} {sight}" if (sight := self._store.sight()) else "",
            on_device=bool(wants) and all(v.is_cuda for w in wants for v in w.leaf.views),
        )
        words = self._tell_all(_refusal(refusal) if refusal else _failure(damage) if damage else word)
        if refusal:
            return unused
        _raise_first(words, damage)
        self._party.settle(on_device=all(w.on_device for w in words))
        wishes = self._wishes(wish, encoded, [w.wants for w in words])
        self._make_plan(wish, wishes, alike([w.machine for w in words]), alike([w.memory for w in words]))
        of_all = [set(w.unused) for _, w in wishes]
        # An imported entry that says no more than the step of the checkpoint is nothing that a state lacks.
        told = self._manifest.facts.get("step_entry")
        return sorted(name for name in of_all[0].intersection(*of_all[1:]) if name != told)

    def withdraw(self, error: Exception) -> None:
        """This rank does not take part, because of `error`, which came before `agree`: the others wait for its word."""
        if not self._told:
            self._tell_all(_refusal(error))

    def _tell_all(self, word: _Word) -> list[_Word]:
        self._told = True
        return [msgspec.json.decode(w, type=_Word) for w in self._party.exchange(msgspec.json.encode(word))]

    def _wishes(self, mine: _Wish, encoded: bytes, hashes: Sequence[str]) -> list[tuple[int, _Wish]]:
        """Every wish, with the ranks that have it. Where all have the same nobody needs to say more than its hash."""
        if len(set(hashes)) == 1:
            return [((1 << len(hashes)) - 1, mine)]
        first = hashes.index(hashes[self._party.rank]) == self._party.rank
        told = self._party.exchange(zlib.compress(encoded, 1) if first else b"")
        return [
            (
                sum(1 << r for r, h in enumerate(hashes) if h == hashes[rank]),
                msgspec.msgpack.decode(zlib.decompress(data), type=_Wish),
            )
            for rank, data in enumerate(told)
            if data
        ]

    def _make_plan(
        self,
        mine: _Wish,
        wishes: Sequence[tuple[int, _Wish]],
        neighbours: Sequence[int],
        onlookers: Sequence[int],
    ) -> None:
        party = self._party
        nearby = getattr(self._store, "nearby", False)
        pace = NEARBY if nearby else FAR
        if party.shares:
            told: list[tuple[int, Wants]] = [(ranks, wish.boxes) for ranks, wish in wishes]
            self._plan = plan_reads(
                self._manifest,
                told,
                rank=party.rank,
                world_size=party.world_size,
                pace=pace,
                neighbours=neighbours if nearby else (),
                onlookers=onlookers,
            )
        else:
            self._plan = plan_reads(self._manifest, [(1, mine.boxes)], rank=0, world_size=1, pace=pace)

    # ---- the reading

    def fill(self, wants: Sequence[Want]) -> None:
        """Read, verify, pass on, and copy into the live tensors, which hold a mixture where this fails. All ranks end alike.

        Raises:
            DamagedError: naming the object; the same on all ranks, with the rank that found it.
            ElsewhereError: something else went wrong on another rank.
            ObjectStore…Error and others, on the rank where it happened.
        """
        if self._plan is None:
            self.agree(wants, (), None)
        assert self._plan is not None, "agree made it"
        error: Exception | None = None
        try:
            Carrier(self._store, self._plan, self._party, wants).run()
        except UnagreedError:
            raise
        except Exception as e:
            error = e
        if self._party.world_size > 1:
            self._end_alike(error)
        elif error is not None:
            raise error

    def _end_alike(self, error: Exception | None) -> None:
        try:
            if not self._party.any(error is not None):
                return
        except ChannelError:
            raise
        except Exception as e:
            raise (GroupError if isinstance(e, RuntimeError) else UnagreedError)(e) from e
        try:
            _raise_first(self._tell_all(_failure(error)), error)
        except DamagedError as e:
            self._confirm(e)
            raise
        raise AssertionError("a load stopped, and no rank says why") from error

    def _confirm(self, found: DamagedError) -> None:
        """Rank 0 looks for itself. What one rank alone does not see, for want of a mount or by a memory that fails, is that machine's
        trouble; taken for damage it would condemn sound checkpoints, one after the other. Collective.

        Raises CkptWorldError on all ranks: rank 0 finds the object whole, or cannot look.
        """
        word = _Word()
        if self._party.rank == 0:
            said = str(found).removesuffix(ADVICE)
            try:
                if is_whole(self._store, self._manifest, found.key):
                    word = _Word(
                        refusal=f"{said}; but rank 0, on {socket.gethostname()}, finds it whole, so nothing is set aside. Look at that "
                        f"rank's machine: is {self._store.root} mounted there, and the same storage?"
                    )
            except ObjectStoreError as e:
                word = _Word(refusal=f"{said}; and rank 0 could not look for itself: {e}")
        if refusal := self._tell_all(word)[0].refusal:
            raise CkptWorldError(refusal) from found


def _raise_first(words: Sequence[_Word], mine: Exception | None) -> None:
    """Raise what all ranks together make of their words; `mine` is behind this rank's own.

    Damage, if nobody failed in another way, and the same on all; otherwise this rank's own error, or where it has none one
    that names the first rank that has.
    """
    failed = [(r, w) for r, w in enumerate(words) if w.refusal]
    if not failed:
        return
    others = [(r, w) for r, w in failed if not w.damaged]
    rank, word = (others or failed)[0]
    if not others:
        raise DamagedError(
            f"rank {rank}: {word.refusal}" if len(words) > 1 else word.refusal, key=word.damaged
        ) from mine
    if mine is not None and not isinstance(mine, DamagedError | StoppedError):
        raise mine
    elsewhere = StateMismatchError if word.mismatch else ElsewhereError
    raise elsewhere(f"rank {rank}: {word.refusal}") from mine


def _refusal(error: Exception) -> _Word:
    """What is said of an error from before the reading."""
    if isinstance(error, StateMismatchError):
        return _Word(refusal=str(error), mismatch=True)
    return _Word(refusal=f"{type(error).__name__}: {error}")


def _failure(error: Exception | None) -> _Word:
    match error:
        case None | StoppedError():
            return _Word()
        case DamagedError():
            return _Word(refusal=str(error), damaged=error.key or "?")
        case CkptError() | ObjectStoreError():
            return _Word(refusal=str(error))
        case _:
            return _Word(refusal=f"{type(error).__name__}: {error}")


def _boxes_of(wants: Sequence[Want]) -> dict[str, tuple[Box, ...]]:
    found: dict[str, set[Box]] = {}
    for want in wants:
        found.setdefault(want.stored, set()).update(h.box for h in want.leaf.held if 0 not in h.box.extent)
    return {name: tuple(sorted(boxes)) for name, boxes in sorted(found.items())}


def machine() -> str:
    """Names this machine, as long as it runs: processes in several containers on it have one page cache in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}:{os.getpid()}"


def alike(names: Sequence[str]) -> list[int]:
    """The ranks (bits) that have the same name, where several have it; '' is none. PURE."""
    found: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name:
            found[name] = found.get(name, 0) | 1 << rank
    return [ranks for ranks in found.values() if ranks.bit_count() > 1]

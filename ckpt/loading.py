"""Loading on one's own: the newest readable checkpoint, by all ranks together; one tensor; the list of steps. (torch)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CkptError, CkptWorldError, DamagedError, StepMissingError
from surefoot.ckpt.manifest import Manifest, ManifestRef
from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.restore import ManifestSource, read_manifest, restored_of
from surefoot.ckpt.state import Want, dtype_of, leaf_of, load_into
from surefoot.ckpt.store import ObjectStore, ObjectStoreError, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded. `missing`: names the checkpoint does not have (strict=False). `passed_over`: newer steps that were
    damaged, and how."""

    generation: int
    step: int
    cursor: dict[str, Any]
    extra: dict[str, Any] | None
    missing: tuple[str, ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells the others: candidates (rank 0), or how its load went."""

    candidates: tuple[ManifestRef, ...] = ()
    damage: str = ""
    failure: str = ""


def find_line(store: ObjectStore) -> list[ManifestRef]:
    """The lineage as of now, ascending. Raises: LineageError, FormatError, DamagedError, ObjectStore…Error."""
    return lineage(read_records(store), list_manifests(store))


def load_agreed(
    store: ObjectStore, channel: Channel, state: Mapping[str, Any], *, step: int | None, strict: bool
) -> Loaded | None:
    """All ranks load the same step: the one asked for, or the newest on the lineage that all of them can read.

    Returns None where `step` is None and there is nothing to load. Collective over the channel.

    Raises:
        StepMissingError: the lineage does not hold `step`.
        DamagedError: `step` is damaged, or every step is.
        StateMismatchError and others: on the rank it happened; CkptError naming that rank on the others.
    """
    candidates = _agree_on_candidates(store, channel, step)
    passed_over: list[tuple[int, str]] = []
    for ref in candidates:
        manifest, missing, error = _try_load(store, state, ref, strict=strict)
        words = _tell_all(channel, _word_of(error))
        failed = [(r, w.failure) for r, w in enumerate(words) if w.failure]
        if failed:
            raise error or CkptWorldError(
                f"rank {failed[0][0]} could not load step {ref.step}: {failed[0][1]}"
            )
        damaged = [(r, w.damage) for r, w in enumerate(words) if w.damage]
        if not damaged and manifest is not None:
            return _loaded(manifest, channel, missing, passed_over)
        passed_over.append((ref.step, f"rank {damaged[0][0]}: {damaged[0][1]}"))
    if passed_over:
        listed = "; ".join(f"step {s}: {why}" for s, why in passed_over)
        raise DamagedError(
            f"{store.root}: no checkpoint {'is readable' if step is None else 'of that step is readable'}: {listed}",
            key="",
        )
    return None


def _agree_on_candidates(store: ObjectStore, channel: Channel, step: int | None) -> Sequence[ManifestRef]:
    """Rank 0 looks; newest first."""
    error: Exception | None = None
    word = _Word()
    if channel.rank == 0:
        try:
            line = find_line(store)
            word = _Word(candidates=tuple(reversed(_only(line, step, store))))
        except (CkptError, ObjectStoreError) as e:
            error, word = e, _Word(failure=str(e))
    first = _tell_all(channel, word)[0]
    if first.failure:
        raise error or CkptWorldError(f"rank 0 could not list the checkpoints: {first.failure}")
    return first.candidates


def _only(line: list[ManifestRef], step: int | None, store: ObjectStore) -> list[ManifestRef]:
    if step is None:
        return line
    found = [m for m in line if m.step == step]
    if not found:
        held = ", ".join(str(m.step) for m in line[-8:]) or "none"
        raise StepMissingError(
            f"{store.root} has no committed step {step} on its lineage; the newest are: {held}"
        )
    return found[-1:]


def _try_load(
    store: ObjectStore, state: Mapping[str, Any], ref: ManifestRef, *, strict: bool
) -> tuple[Manifest | None, list[str], Exception | None]:
    try:
        manifest = read_manifest(store, ref.generation, ref.step)
        return manifest, load_into(state, ManifestSource(store, manifest), strict=strict), None
    except Exception as e:  # whatever it is, the others must hear of it before this rank raises
        return None, [], e


def _word_of(error: Exception | None) -> _Word:
    if error is None:
        return _Word()
    if isinstance(error, DamagedError | StepMissingError):
        return _Word(damage=str(error))
    return _Word(failure=f"{type(error).__name__}: {error}")


def _tell_all(channel: Channel, word: _Word) -> list[_Word]:
    return [msgspec.json.decode(w, type=_Word) for w in channel.exchange(msgspec.json.encode(word))]


def _loaded(
    manifest: Manifest, channel: Channel, missing: list[str], passed_over: list[tuple[int, str]]
) -> Loaded:
    restored = restored_of(manifest, channel.rank, channel.world_size)
    return Loaded(
        generation=restored.generation,
        step=restored.step,
        cursor=restored.cursor,
        extra=restored.extra,
        missing=tuple(missing),
        passed_over=tuple(passed_over),
    )


def read(root: str, step: int, name: str) -> torch.Tensor:
    """One whole tensor of a committed step, in host memory. Needs no process group.

    Raises: StepMissingError (no such step, or no such name in it), DamagedError, ObjectStore…Error.
    """
    store = open_store(root)
    ref = _only(find_line(store), step, store)[0]
    manifest = read_manifest(store, ref.generation, ref.step)
    stored = manifest.aliases.get(name, name)
    meta = manifest.tensors.get(stored)
    if meta is None:
        near = [n for n in manifest.tensors if n.endswith(name.rpartition(".")[2])][:5]
        raise StepMissingError(
            f"step {step} in {store.root} has no tensor {name}; similar names: {', '.join(near) or 'none'}"
        )
    tensor = torch.empty(meta.shape, dtype=dtype_of(meta.dtype))
    with torch.no_grad():
        ManifestSource(store, manifest).fill([Want(leaf=leaf_of(name, tensor), stored=stored)])
    return tensor

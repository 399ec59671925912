"""What a root holds, told from the object store alone: list and show. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from surefoot.ckpt.errors import CkptError, StepMissingError
from surefoot.ckpt.format.flags import flags_among
from surefoot.ckpt.loading.aside import RESUME_TRIES, aside_among, choose, resumes_among
from surefoot.ckpt.loading.restore import read_manifest
from surefoot.ckpt.manifest import Manifest, ManifestRef, manifest_refs
from surefoot.ckpt.planning.plan import ITEMSIZES
from surefoot.ckpt.record import (
    RECORDS,
    Record,
    lineage,
    list_manifests,
    on_lineage,
    read_records,
    require_recorded,
)
from surefoot.ckpt.store import ObjectStore, Root, open_store

GENERATION_OPTION = "--generation"


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """One manifest, as `ckpt ls` lists it. `problem` stands instead of the rest where it cannot be read."""

    step: int
    generation: int
    counts: bool
    """It is on the lineage."""
    newest: bool = False
    """Of those that count."""
    loads: bool = False
    """A load without a step tries it first: the newest, unless that was set aside, or too many starts have died after it. (That many
    are `RESUME_TRIES`; a `Checkpointer` may have another number.)"""
    flags: tuple[str, ...] = ()
    """``verified``: every byte was compared; ``kept``: exempt from retention; ``aside``: found damaged, passed over."""
    resumes: int = 0
    """Starts that resumed from it and have neither committed nor ended in peace: they died, or are running."""
    age_s: float | None = None
    """Since the commit; None where the manifest does not say."""
    attempt: str = ""
    world_size: int = 0
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0
    reason: str = ""
    """Why its generation exists."""
    facts: dict[str, Any] = {}
    problem: str = ""


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, as `ckpt show` lists it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: int
    tied_to: str = ""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in detail."""

    step: int
    generation: int
    counts: bool
    attempt: str
    world_size: int
    nbytes: int
    tensors: tuple[TensorRow, ...]
    values: dict[str, Any]
    cursor: dict[str, Any] | None
    facts: dict[str, Any]
    objects: tuple[str, ...]
    record: Record | None


def list_checkpoints(store: ObjectStore) -> list[CheckpointRow]:
    """Every manifest, on the lineage or not, ascending by step.

    Raises: LineageError, FormatError or DamagedError (of a record), ObjectStore…Error.
    """
    records = read_records(store)
    keys = [o.key for o in store.list("gen-")]
    refs, flags = manifest_refs(keys), flags_among(keys)
    line, resumes = lineage(records, refs), resumes_among(keys)
    aside = dict.fromkeys(aside_among(keys), "")
    first = choose(line, aside, resumes, tries=RESUME_TRIES).candidates[:1]
    now = time.time()
    rows: list[CheckpointRow] = []
    for ref in refs:
        at = ref.generation, ref.step
        row = msgspec.structs.replace(
            _row(store, ref, records, now),
            counts=ref in line,
            newest=ref in line[-1:],
            loads=ref in first,
            flags=tuple(sorted(flags.get(at, ()))),
            resumes=resumes.get(at, 0),
        )
        rows.append(row)
    return rows


def _row(store: ObjectStore, ref: ManifestRef, records: Mapping[int, Record], now: float) -> CheckpointRow:
    reason = records[ref.generation].reason if ref.generation in records else "no record"
    row = CheckpointRow(step=ref.step, generation=ref.generation, counts=False, reason=reason)
    try:
        m = read_manifest(store, ref.generation, ref.step)
    except CkptError as e:
        return msgspec.structs.replace(row, problem=str(e))
    at = m.facts.get("committed_at")
    return msgspec.structs.replace(
        row,
        attempt=m.attempt,
        world_size=m.world_size,
        tensors=len(m.tensors),
        objects=len(m.objects),
        nbytes=m.nbytes,
        age_s=max(0.0, now - at) if isinstance(at, int | float) else None,
        facts=m.facts,
    )


def steps(root: Root) -> list[int]:
    """The steps that count, ascending; also those that were set aside as damaged, which only a load that names them tries. Raises as
    `list_checkpoints`."""
    store = open_store(root)
    refs = list_manifests(store)
    records = read_records(store)
    require_recorded(records, refs)
    return sorted({m.step for m in lineage(records, refs)})


def require_begun(store: ObjectStore) -> None:
    """Raises StepMissingError where no job has ever begun under the root: it was probably mistyped. Raises ObjectStore…Error."""
    path = unquote(urlsplit(store.root).path) if store.root.startswith("file://") else None
    if path is not None and not os.path.isdir(path):
        what = "this is a file" if os.path.exists(path) else "there is no such folder"
    elif any(True for _ in store.list(RECORDS)) or list_manifests(store):
        return
    else:
        what = "no job has ever begun there"
    raise StepMissingError(
        f"{store.root} is no root of checkpoints: {what}. Is the address right? It is the one that the job saves to"
    )


def find(
    store: ObjectStore, step: int | None, generation: int | None = None, *, option: str = GENERATION_OPTION
) -> tuple[Manifest, bool]:
    """The manifest that is meant, and whether it counts. All tools, and the calls of `surefoot.ckpt` that read one checkpoint
    without a process group, mean the same by these two.

    Args:
        step: None: the newest.
        generation: None: among those on the lineage. A number: among what this generation committed, whether it counts or not.
        option: what the caller calls `generation` on the command line, for the message.

    Raises: StepMissingError, and as `read_manifest`.
    """
    ref, counts = find_ref(store, step, generation, option=option)
    return read_manifest(store, ref.generation, ref.step), counts


def find_ref(
    store: ObjectStore, step: int | None, generation: int | None = None, *, option: str = GENERATION_OPTION
) -> tuple[ManifestRef, bool]:
    """As `find`, without reading the manifest."""
    refs = list_manifests(store)
    records = read_records(store)
    if generation is None:
        require_recorded(records, refs)
        found = [m for m in lineage(records, refs) if step is None or m.step == step]
    else:
        found = [m for m in refs if m.generation == generation and step in (None, m.step)]
    if not records and not refs:
        require_begun(store)
    if not found:
        among = (
            lineage(records, refs) if generation is None else [m for m in refs if m.generation == generation]
        )
        raise StepMissingError(_nothing_there(store, among, refs, step, generation, option))
    ref = found[-1]
    return ref, on_lineage(records, max(records, default=0), ref.generation, ref.step)


def _nothing_there(
    store: ObjectStore,
    among: list[ManifestRef],
    refs: list[ManifestRef],
    step: int | None,
    generation: int | None,
    option: str,
) -> str:
    """`among`: where it was looked for; `refs`: all there are."""
    what = "no checkpoint" if step is None else f"no step {step}"
    where = "on the lineage" if generation is None else f"of generation {generation}"
    off = [m.generation for m in refs if m.step == step]
    if generation is None and off:
        those = f"generation {off[0]}" if len(off) == 1 else f"generations {', '.join(map(str, off))}"
        hint = (
            f"off it there is one of {those}: {option} {off[-1]} takes it (in Python: generation={off[-1]})"
        )
    elif generation is None and refs and not among:
        hint = "all that there are lie off it (`surefoot ckpt ls`)"
    else:
        held = ", ".join(str(m.step) for m in among[-8:]) or "none"
        hint = f"the newest there are: {held} (`surefoot ckpt ls`)"
    return f"{store.root} has {what} {where}; {hint}"


def show(store: ObjectStore, step: int | None, generation: int | None = None) -> Shown:
    """One checkpoint in detail. Raises as `find`."""
    m, counts = find(store, step, generation)
    return Shown(
        step=m.step,
        generation=m.generation,
        counts=counts,
        attempt=m.attempt,
        world_size=m.world_size,
        nbytes=m.nbytes,
        tensors=tuple(tensor_rows(m)),
        values=m.values,
        cursor=m.cursor,
        facts=m.facts,
        objects=tuple(o.key for o in m.objects),
        record=read_records(store).get(m.generation),
    )


def tensor_rows(m: Manifest) -> list[TensorRow]:
    """Every tensor under each of its names, by name. PURE."""
    pieces: dict[str, int] = {}
    for o in m.objects:
        for p in o.pieces:
            pieces[p.name] = pieces.get(p.name, 0) + 1
    rows: list[TensorRow] = []
    for name, target in sorted(({name: name for name in m.tensors} | m.aliases).items()):
        if (meta := m.tensors.get(target)) is None:
            continue
        nbytes = ITEMSIZES.get(meta.dtype, 0)
        for n in meta.shape:
            nbytes *= n
        rows.append(
            TensorRow(
                name=name,
                dtype=meta.dtype,
                shape=meta.shape,
                nbytes=nbytes,
                pieces=pieces.get(target, 0),
                tied_to=target if target != name else "",
            )
        )
    return rows


def stored_name(m: Manifest, name: str) -> str:
    """The name under which a tensor is stored. Raises StepMissingError naming those that are like it."""
    target = m.aliases.get(name, name)
    if target in m.tensors:
        return target
    import difflib

    near = difflib.get_close_matches(name, [*m.tensors, *m.aliases], n=4, cutoff=0.4)
    near += [n for n in m.tensors if name in n and n not in near][:4]
    raise StepMissingError(
        f"step {m.step} has no tensor {name!r}; similar names: {', '.join(near) or 'none'}"
    )

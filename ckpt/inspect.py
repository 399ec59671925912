"""What a root holds, told from the object store alone: list, show, verify. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptError, DamagedError, StepMissingError
from surefoot.ckpt.manifest import DataObject, Manifest, ManifestRef
from surefoot.ckpt.merge import require_inside
from surefoot.ckpt.plan import ITEMSIZES, prove_coverage
from surefoot.ckpt.record import Record, lineage, list_manifests, on_lineage, read_records
from surefoot.ckpt.restore import BATCH_NBYTES, read_blocks, read_ledger, read_manifest
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, open_store


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """One manifest, as `ckpt ls` lists it. `problem` stands instead of the rest where it cannot be read."""

    step: int
    generation: int
    counts: bool
    """It is on the lineage."""
    newest: bool = False
    """A load without a step takes it."""
    attempt: str = ""
    world_size: int = 0
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0
    reason: str = ""
    """Why its generation exists."""
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found. Sound if and only if `problems` is empty."""

    step: int
    generation: int
    root: str
    objects: int = 0
    nbytes: int = 0
    """Bytes read and compared with their checksums."""
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def list_checkpoints(store: ObjectStore) -> list[CheckpointRow]:
    """Every manifest, on the lineage or not, ascending by step.

    Raises: LineageError, FormatError or DamagedError (of a record), ObjectStore…Error.
    """
    records = read_records(store)
    refs = list_manifests(store)
    line = lineage(records, refs)
    return [_row(store, ref, records, ref in line, bool(line) and ref == line[-1]) for ref in refs]


def _row(
    store: ObjectStore, ref: ManifestRef, records: dict[int, Record], counts: bool, newest: bool
) -> CheckpointRow:
    reason = records[ref.generation].reason if ref.generation in records else "no record"
    try:
        m = read_manifest(store, ref.generation, ref.step)
    except CkptError as e:
        return CheckpointRow(
            step=ref.step,
            generation=ref.generation,
            counts=counts,
            newest=newest,
            reason=reason,
            problem=str(e),
        )
    return CheckpointRow(
        step=m.step,
        generation=m.generation,
        counts=counts,
        newest=newest,
        attempt=m.attempt,
        world_size=m.world_size,
        tensors=len(m.tensors),
        objects=len(m.objects),
        nbytes=m.nbytes,
        reason=reason,
    )


def steps(root: str) -> list[int]:
    """The steps that can be loaded, ascending. Raises as `list_checkpoints`."""
    store = open_store(root)
    return sorted({m.step for m in lineage(read_records(store), list_manifests(store))})


def find(store: ObjectStore, step: int | None, generation: int | None = None) -> tuple[Manifest, bool]:
    """The manifest of `step` (None: the newest) and whether it counts. `generation` finds those off the lineage as well.

    Raises: StepMissingError, and as `read_manifest`.
    """
    records = read_records(store)
    refs = list_manifests(store)
    if generation is None:
        found = [m for m in lineage(records, refs) if step is None or m.step == step]
    else:
        found = [m for m in refs if m.generation == generation and step in (None, m.step)]
    if not found:
        what = "no checkpoint" if step is None else f"no step {step}"
        where = "on the lineage" if generation is None else f"of generation {generation}"
        raise StepMissingError(f"{store.root} has {what} {where}; `ckpt ls` lists what it has")
    ref = found[-1]
    head = max(records, default=0)
    return read_manifest(store, ref.generation, ref.step), on_lineage(records, head, ref.generation, ref.step)


def show(store: ObjectStore, step: int | None, generation: int | None = None) -> Shown:
    """One checkpoint in detail. Raises as `find`."""
    m, counts = find(store, step, generation)
    pieces: dict[str, int] = {}
    for o in m.objects:
        for p in o.pieces:
            pieces[p.name] = pieces.get(p.name, 0) + 1
    stored = {name: name for name in m.tensors} | m.aliases
    rows = [
        TensorRow(
            name=name,
            dtype=(meta := m.tensors[target]).dtype,
            shape=meta.shape,
            nbytes=Box(meta.shape, meta.shape).numel * ITEMSIZES.get(meta.dtype, 0),
            pieces=pieces.get(target, 0),
            tied_to=target if target != name else "",
        )
        for name, target in sorted(stored.items())
        if target in m.tensors
    ]
    return Shown(
        step=m.step,
        generation=m.generation,
        counts=counts,
        attempt=m.attempt,
        world_size=m.world_size,
        nbytes=m.nbytes,
        tensors=tuple(rows),
        values=m.values,
        cursor=m.cursor,
        facts=m.facts,
        objects=tuple(o.key for o in m.objects),
        record=read_records(store).get(m.generation),
    )


def verify(root: str, step: int | None = None) -> Report:
    """Read a whole step (None: the newest) and compare every byte with its checksum.

    Raises StepMissingError where there is no such step, ObjectStore…Error where the object store cannot be asked.
    """
    return verify_step(open_store(root), step)


def verify_step(store: ObjectStore, step: int | None, generation: int | None = None) -> Report:
    """As `verify`; `generation` finds checkpoints off the lineage as well."""
    try:
        manifest, _ = find(store, step, generation)
    except StepMissingError:
        raise
    except CkptError as e:
        return Report(step=step or 0, generation=generation or 0, root=store.root, problems=(str(e),))
    problems = list(_structure_problems(store, manifest))
    checked = sound = 0
    for o in manifest.objects:
        try:
            checked += _verify_object(store, o)
            sound += 1
        except DamagedError as e:
            problems.append(str(e))
    return Report(
        step=manifest.step,
        generation=manifest.generation,
        root=store.root,
        objects=sound,
        nbytes=checked,
        problems=tuple(problems),
    )


def _structure_problems(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    """Coverage and ledger."""
    where = f"step {manifest.step} of generation {manifest.generation}"
    try:
        require_inside(manifest.objects, manifest.tensors, where)
        pieces = ((p.name, Box(p.offset, p.extent)) for o in manifest.objects for p in o.pieces)
        prove_coverage(manifest.tensors, pieces)
    except CkptError as e:
        yield str(e)
    try:
        read_ledger(store, manifest)
    except (CkptError, ObjectMissingError) as e:
        yield str(e)


def _verify_object(store: ObjectStore, source: DataObject) -> int:
    blocks = -(-source.data_nbytes // source.block_nbytes)
    at_once = max(1, BATCH_NBYTES // source.block_nbytes)
    if len(source.checksums) != blocks:
        raise DamagedError(
            f"{source.key} has {blocks} blocks and {len(source.checksums)} checksums", key=source.key
        )
    try:
        header = store.read(source.key, 0, source.data_start)
    except ObjectMissingError as e:
        raise DamagedError(f"{source.key} is missing", key=source.key) from e
    if xxhash.xxh3_64_hexdigest(header) != source.header_checksum:
        raise DamagedError(
            f"{source.key}: its safetensors header does not match its checksum", key=source.key
        )
    return sum(
        len(read_blocks(store, source, first, min(first + at_once, blocks)))
        for first in range(0, blocks, at_once)
    )

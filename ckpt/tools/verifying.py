"""Verify: read a whole checkpoint and compare every byte with its checksum. Torch-free.

Damage in one block does not end the reading: all of the object is compared, and what lies in the blocks that differ is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptError, DamagedError, StepMissingError
from surefoot.ckpt.format.flags import lower_flag, raise_flag
from surefoot.ckpt.loading.aside import set_aside
from surefoot.ckpt.loading.restore import read_ledger, read_manifest
from surefoot.ckpt.manifest import DataObject, Manifest, ManifestRef, attempt_prefix
from surefoot.ckpt.planning.plan import coalesce, nbytes_of
from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, ObjectStoreDeniedError, Root, open_store
from surefoot.ckpt.tools.inspect import find_ref

READ_NBYTES = 32 * 2**20
"""Read and compared at once."""
NAMED_MAX = 4
"""Tensors named in a sentence; `Damage.tensors` has all."""

FINDER = "`ckpt verify`"
"""Who sets a step aside here."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of an object that is not what was written."""

    key: str
    what: str
    at: int
    """Its first byte in the object."""
    nbytes: int
    tensors: tuple[str, ...] = ()
    """Those that lie in it, wholly or in part."""

    def __str__(self) -> str:
        more = len(self.tensors) - NAMED_MAX
        names = ", ".join(self.tensors[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"{self.key} {self.what}" + (f"; in it lie {names}" if names else "")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found. Sound if and only if `problems` is empty."""

    step: int
    generation: int
    root: str
    objects: int = 0
    """Data objects that the manifest names."""
    nbytes: int = 0
    """Bytes of them that were read and compared with their checksums, whether they agreed or not."""
    total_nbytes: int = 0
    """Bytes that there should be."""
    problems: tuple[str, ...] = ()
    """In words; what is said in `damage` as well."""
    damage: tuple[Damage, ...] = ()
    noted: bool = False
    """``verified.json`` stands beside the manifest: retention then keeps the newest of those."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def damaged_nbytes(self) -> int:
        return sum(d.nbytes for d in self.damage)


def verify(root: Root, step: int | None = None, *, generation: int | None = None) -> Report:
    """Read a whole step (None: the newest) and compare every byte with its checksum. What was found is noted beside its manifest,
    where this process may write: a sound one as verified, a damaged one is set aside, as by a load that meets it.

    Args:
        generation: look among what this one committed, on the lineage or not.

    Raises StepMissingError where there is no such step, ObjectStore…Error where the object store cannot be asked.
    """
    return verify_step(open_store(root), step, generation)


def verify_step(
    store: ObjectStore, step: int | None, generation: int | None = None, *, progress: Progress | None = None
) -> Report:
    """As `verify`."""
    ref, _ = find_ref(store, step, generation)
    report = Report(step=ref.step, generation=ref.generation, root=store.root)
    try:
        manifest = read_manifest(store, ref.generation, ref.step)
    except StepMissingError:
        raise
    except CkptError as e:
        if isinstance(e, DamagedError):
            set_aside(store, ref, str(e), finder=FINDER)
        return msgspec.structs.replace(report, problems=(str(e),))
    problems = list(_ledger_problems(store, manifest))
    damage: list[Damage] = []
    compared = 0
    tell = stepwise(progress, manifest.nbytes)
    listed = store.list(attempt_prefix(manifest.generation, manifest.step, manifest.attempt))
    sizes = {o.key: o.size for o in listed}
    for o in manifest.objects:
        for found in _compare(store, manifest, o, sizes.get(o.key)):
            if isinstance(found, Damage):
                damage.append(found)
            else:
                compared += found
                tell(found)
    if damage and not set_aside(store, ref, str(damage[0]), finder=FINDER):
        raise StepMissingError(
            f"step {ref.step} of generation {ref.generation} was deleted while it was verified"
        )
    return msgspec.structs.replace(
        report,
        objects=len(manifest.objects),
        nbytes=compared,
        total_nbytes=manifest.nbytes,
        problems=(*problems, *map(str, damage)),
        damage=tuple(damage),
        noted=not problems and not damage and _note_sound(store, ref),
    )


def _note_sound(store: ObjectStore, ref: ManifestRef) -> bool:
    """Also of one that was set aside: somebody has brought back what was missing."""
    try:
        lower_flag(store, ref, "aside")
        raise_flag(store, ref, "verified", "ckpt verify")
    except ObjectStoreDeniedError:
        return False  # who may only read can verify all the same
    return True


def _ledger_problems(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    try:
        read_ledger(store, manifest)
    except (CkptError, ObjectMissingError) as e:
        yield str(e)


def _compare(
    store: ObjectStore, manifest: Manifest, source: DataObject, size: int | None
) -> Iterator[int | Damage]:
    """How many bytes were compared, batch by batch, and what is wrong. `size`: of the object as it is listed; None: it is not."""
    try:
        if size is None:
            raise ObjectMissingError(source.key)
        if size != source.size:
            yield _wrong_size(manifest, source, size)
        header = store.read(source.key, 0, source.data_start)
        if xxhash.xxh3_64_hexdigest(header) != source.header_checksum:
            what = "does not begin with the safetensors header that it had"
            yield Damage(key=source.key, what=what, at=0, nbytes=source.data_start)
        yield from _compare_blocks(store, manifest, source, _whole_blocks(source, size))
    except ObjectMissingError:
        names = _tensors_in(manifest, source, 0, source.data_nbytes)
        yield Damage(key=source.key, what="is missing", at=0, nbytes=source.size, tensors=names)


def _whole_blocks(source: DataObject, size: int) -> int:
    """How many of its blocks an object of `size` bytes has from end to end."""
    if size >= source.size:
        return len(source.checksums)
    return max(0, size - source.data_start) // source.block_nbytes


def _wrong_size(manifest: Manifest, source: DataObject, size: int) -> Damage:
    """Of what is cut off the rest of its block counts as lost as well: no checksum covers it."""
    lost_from = _whole_blocks(source, size) * source.block_nbytes
    return Damage(
        key=source.key,
        what=f"has {size} bytes instead of {source.size}",
        at=min(source.data_start + lost_from, size),
        nbytes=max(0, source.data_nbytes - lost_from),
        tensors=_tensors_in(manifest, source, lost_from, source.data_nbytes),
    )


def _compare_blocks(
    store: ObjectStore, manifest: Manifest, source: DataObject, count: int
) -> Iterator[int | Damage]:
    """The first `count` blocks. A block that differs is read once more: it may have been the way, and not the store."""
    bad: list[int] = []
    at_once = max(1, READ_NBYTES // source.block_nbytes)
    for first in range(0, count, at_once):
        stop = min(first + at_once, count)
        for b, found in zip(range(first, stop), _sums(store, source, first, stop), strict=True):
            if found != source.checksums[b] and next(_sums(store, source, b, b + 1)) != source.checksums[b]:
                bad.append(b)
        yield min(stop * source.block_nbytes, source.data_nbytes) - first * source.block_nbytes
    for first, stop in coalesce(bad, count_max=max(1, len(bad))):
        begin, end = first * source.block_nbytes, min(stop * source.block_nbytes, source.data_nbytes)
        which, differ = (
            (f"block {first}", "differs")
            if stop - first == 1
            else (f"blocks {first} to {stop - 1}", "differ")
        )
        at = source.data_start + begin
        yield Damage(
            key=source.key,
            what=f"is damaged: {which} (bytes {at} to {source.data_start + end - 1}) {differ} from what was written",
            at=at,
            nbytes=end - begin,
            tensors=_tensors_in(manifest, source, begin, end),
        )


def _sums(store: ObjectStore, source: DataObject, first: int, stop: int) -> Iterator[str]:
    """xxh3-64 of blocks first .. stop - 1 as they lie there now."""
    size = source.block_nbytes
    begin, end = first * size, min(stop * size, source.data_nbytes)
    data = memoryview(store.read(source.key, source.data_start + begin, end - begin))
    for at in range(0, end - begin, size):
        yield xxhash.xxh3_64_hexdigest(data[at : at + size])


def _tensors_in(manifest: Manifest, source: DataObject, begin: int, end: int) -> tuple[str, ...]:
    """Names of what lies in bytes begin .. end - 1 of an object's data section, as it lies there."""

    def names() -> Iterable[str]:
        for p in sorted(source.pieces, key=lambda p: p.at):
            if p.at < end and begin < p.at + nbytes_of(manifest.tensors[p.name], Box(p.offset, p.extent)):
                yield p.name

    return tuple(dict.fromkeys(names()))

"""Verify: read a whole checkpoint and compare every byte with its checksum. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import xxhash

from surefoot.ckpt.errors import CkptError, DamagedError, StepMissingError
from surefoot.ckpt.format.flags import lower_flag, raise_flag
from surefoot.ckpt.loading.aside import set_aside
from surefoot.ckpt.loading.reading import read_blocks
from surefoot.ckpt.loading.restore import read_ledger, read_manifest
from surefoot.ckpt.manifest import DataObject, Manifest, ManifestRef
from surefoot.ckpt.progress import Progress
from surefoot.ckpt.store import ObjectMissingError, ObjectStore, ObjectStoreDeniedError, Root, open_store
from surefoot.ckpt.tools.inspect import find_ref

READ_NBYTES = 32 * 2**20
"""Read and compared at once."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found. Sound if and only if `problems` is empty."""

    step: int
    generation: int
    root: str
    objects: int = 0
    nbytes: int = 0
    """Bytes read and compared with their checksums."""
    problems: tuple[str, ...] = ()
    noted: bool = False
    """``verified.json`` stands beside the manifest: retention then keeps the newest of those."""

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(root: Root, step: int | None = None) -> Report:
    """Read a whole step (None: the newest) and compare every byte with its checksum. What was found is noted beside its manifest,
    where this process may write: a sound one as verified, a damaged one is set aside, as by a load that meets it.

    Raises StepMissingError where there is no such step, ObjectStore…Error where the object store cannot be asked.
    """
    return verify_step(open_store(root), step)


def verify_step(
    store: ObjectStore, step: int | None, generation: int | None = None, *, progress: Progress | None = None
) -> Report:
    """As `verify`; `generation` finds checkpoints off the lineage as well."""
    ref, _ = find_ref(store, step, generation)
    report = Report(step=ref.step, generation=ref.generation, root=store.root)
    try:
        manifest = read_manifest(store, ref.generation, ref.step)
    except StepMissingError:
        raise
    except CkptError as e:
        if isinstance(e, DamagedError):
            set_aside(store, ref, str(e))
        return msgspec.structs.replace(report, problems=(str(e),))
    problems = list(_ledger_problems(store, manifest))
    damage: list[str] = []
    checked = sound = 0
    for o in manifest.objects:
        begun = checked
        try:
            for nbytes in _verify_object(store, o):
                checked += nbytes
                if progress is not None:
                    progress(checked, manifest.nbytes)
            sound += 1
        except DamagedError as e:
            checked = begun
            damage.append(str(e))
    if damage and not set_aside(store, ref, damage[0]):
        raise StepMissingError(
            f"step {ref.step} of generation {ref.generation} was deleted while it was verified"
        )
    return msgspec.structs.replace(
        report,
        objects=sound,
        nbytes=checked,
        problems=(*problems, *damage),
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


def _verify_object(store: ObjectStore, source: DataObject) -> Iterator[int]:
    """The bytes compared, batch by batch. Raises DamagedError."""
    blocks = -(-source.data_nbytes // source.block_nbytes)
    at_once = max(1, READ_NBYTES // source.block_nbytes)
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
    for first in range(0, blocks, at_once):
        yield len(read_blocks(store, source, first, min(first + at_once, blocks)))

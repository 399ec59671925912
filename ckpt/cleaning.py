"""Deleting what retention lets go. Torch-free."""

from __future__ import annotations

from surefoot.ckpt.manifest import Manifest, ManifestRef, attempt_prefix, decode
from surefoot.ckpt.record import lineage, list_manifests, read_records
from surefoot.ckpt.retention import Retention, deletable, objects_of
from surefoot.ckpt.store import ObjectMissingError, ObjectStore
from surefoot.failpoint import failpoint
from surefoot.history import operation


def apply_retention(store: ObjectStore, retention: Retention, *, generation: int) -> list[ManifestRef]:
    """Delete what the lineage of `generation` lets go; returns it. For the committer, between two commits.

    Raises: ObjectStore…Error, LineageError, DamagedError. What was deleted stays deleted; the rest is found next time.
    """
    line = lineage(read_records(store), list_manifests(store), generation)
    gone: list[ManifestRef] = []
    for ref in deletable(line, retention):
        with operation("delete", generation=ref.generation, step=ref.step):
            _delete(store, ref)
        gone.append(ref)
    return gone


def _delete(store: ObjectStore, ref: ManifestRef) -> None:
    try:
        manifest = decode(Manifest, store.read(ref.key), key=ref.key)
    except ObjectMissingError:
        return  # somebody else was faster
    prefix = attempt_prefix(manifest.generation, manifest.step, manifest.attempt)
    keys = objects_of(manifest, [o.key for o in store.list(prefix)])
    store.delete(ref.key)
    failpoint("retention.after_manifest")
    for key in keys:
        store.delete(key)

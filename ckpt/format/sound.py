"""What manifests and part records say, checked before anything is believed, read or allocated. PURE.

A manifest is somebody's word. Sound means: every object lies under the manifest's own attempt; sizes, blocks and checksums of an
object agree with each other; its pieces fill its data section to the last byte, none twice; and the pieces of a tensor make up all
of it. Then the bytes of all data sections are those of all distinct elements, and no number in the manifest can be larger than the
objects it names are said to be. `require_listed` holds that against what the object store lists.

Time and memory are bounded by the manifest's own length: shapes are multiplied as whole numbers, never allocated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from surefoot.ckpt.errors import CkptError, CommitError, DamagedError
from surefoot.ckpt.manifest import (
    DataObject,
    Manifest,
    TensorMeta,
    attempt_prefix,
    ledger_key,
    manifest_key,
)
from surefoot.ckpt.planning.coverage import BoxColumns, columns_of, prove_columns
from surefoot.ckpt.planning.plan import ITEMSIZES

DIMS_MAX = 64
"""torch's own limit."""
TENSOR_NBYTES_MAX = 2**60
BLOCK_NBYTES_MAX = 2**30
"""A reader takes at least one block into memory."""

_OBJECT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.safetensors")


def require_sound(manifest: Manifest) -> None:
    """Raises DamagedError, naming the manifest and what is wrong in it."""
    key = manifest_key(manifest.generation, manifest.step)
    try:
        prefix = attempt_prefix(manifest.generation, manifest.step, manifest.attempt)
        require_sound_contents(manifest.tensors, manifest.objects, prefix)
        _require_aliases(manifest)
        ledger = manifest.ledger
        if ledger is not None and ledger.key != ledger_key(
            manifest.generation, manifest.step, manifest.attempt
        ):
            raise CommitError(f"its ledger {ledger.key!r} lies elsewhere than under {prefix}")
    except (CkptError, ValueError) as e:
        raise DamagedError(f"{key} is damaged: {e}; load an older step", key=key) from e


def require_listed(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Every object is there in full.

    Args:
        sizes: what the object store lists under the attempt, in bytes by key.

    Raises DamagedError naming the object.
    """
    for o in manifest.objects:
        if sizes.get(o.key) != o.size:
            found = f"has {sizes[o.key]} bytes" if o.key in sizes else "is missing"
            raise DamagedError(
                f"{o.key} should have {o.size} bytes and {found}; load an older step", key=o.key
            )


def require_sound_contents(
    tensors: Mapping[str, TensorMeta], objects: Iterable[DataObject], prefix: str
) -> None:
    """Tensors and the objects that hold them.

    Args:
        prefix: where all objects must lie.

    Raises:
        CommitError: an object or a piece contradicts itself.
        CoverageError: some element is stored never or twice.
    """
    for name, meta in tensors.items():
        _require_possible(name, meta)
    given = list(objects)
    keys: set[str] = set()
    for o in given:
        if o.key in keys:
            raise CommitError(f"{o.key!r} is listed twice")
        keys.add(o.key)
        _require_object(o, prefix)
        if unknown := next((p.name for p in o.pieces if p.name not in tensors), None):
            raise CommitError(f"{o.key} holds a piece of {unknown!r}, a tensor nobody describes")
    columns = columns_of(tensors, ((p.name, p) for o in given for p in o.pieces))
    prove_columns(tensors, columns)
    _require_filled(given, tensors, columns)
    _require_all_bytes(tensors, given)


def _require_possible(name: str, meta: TensorMeta) -> None:
    if meta.dtype not in ITEMSIZES:
        raise CommitError(f"{name!r} is of type {meta.dtype!r}, which this version does not know")
    if len(meta.shape) > DIMS_MAX or min(meta.shape, default=0) < 0:
        raise CommitError(f"{name!r} has the impossible shape {list(meta.shape[:DIMS_MAX])}")
    if nbytes_of_tensor(meta) > TENSOR_NBYTES_MAX:
        raise CommitError(f"{name!r} of shape {list(meta.shape)} has more than {TENSOR_NBYTES_MAX} bytes")


def nbytes_of_tensor(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * ITEMSIZES[meta.dtype]


def _require_object(o: DataObject, prefix: str) -> None:
    if not o.key.startswith(prefix) or not _OBJECT_NAME.fullmatch(o.key, len(prefix)):
        raise CommitError(f"the object {o.key!r} is no data object under {prefix}")
    if min(o.data_start, o.data_nbytes) < 0 or o.data_start + o.data_nbytes != o.size:
        raise CommitError(
            f"{o.key}: {o.data_start} bytes before the data and {o.data_nbytes} bytes of data make no object of {o.size}"
        )
    if not 1 <= o.block_nbytes <= BLOCK_NBYTES_MAX:
        raise CommitError(
            f"{o.key} has blocks of {o.block_nbytes} bytes; 1 to {BLOCK_NBYTES_MAX} are possible"
        )
    blocks = -(-o.data_nbytes // o.block_nbytes)
    if len(o.checksums) != blocks:
        raise CommitError(f"{o.key} has {blocks} blocks and {len(o.checksums)} checksums")


def _require_filled(
    objects: Sequence[DataObject], tensors: Mapping[str, TensorMeta], columns: Sequence[BoxColumns]
) -> None:
    """The pieces of each object follow each other from its data's first byte to the last. They are covered: so none of them is
    larger than its tensor."""
    count = np.array([len(o.pieces) for o in objects], np.int64)
    itemsize = np.array([ITEMSIZES[meta.dtype] for meta in tensors.values()], np.int64)
    nbytes = np.zeros(count.sum(), np.int64)
    for c in columns:
        nbytes[c.which] = c.extent.prod(axis=1) * itemsize[c.tensor]
    at = np.array([p.at for o in objects for p in o.pieces], np.int64)
    whose = np.repeat(np.arange(len(objects)), count)
    order = np.lexsort((at, whose))
    at, end, whose = at[order], (at + nbytes)[order], whose[order]
    begins = np.append(0, end[:-1])
    begins[np.append(True, whose[1:] != whose[:-1])] = 0
    reached = np.zeros(len(objects), np.int64)
    reached[whose] = end  # the last of each object stays
    wrong = reached != [o.data_nbytes for o in objects]
    wrong[whose[at != begins]] = True
    if wrong.any():
        raise _ill_filled(objects[int(np.argmax(wrong))], tensors)


def _ill_filled(o: DataObject, tensors: Mapping[str, TensorMeta]) -> CommitError:
    end = 0
    last = ""
    for p in sorted(o.pieces, key=lambda p: p.at):
        if p.at != end:
            between = f"of both {last!r} and {p.name!r}" if p.at < end else f"before {p.name!r} of no piece"
            return CommitError(
                f"{o.key}: bytes {min(p.at, end)} to {max(p.at, end)} of its data are {between}"
            )
        end = p.at + math.prod(p.extent) * ITEMSIZES[tensors[p.name].dtype]
        last = p.name
    return CommitError(f"{o.key}: its pieces end at byte {end}, and its data at byte {o.data_nbytes}")


def _require_all_bytes(tensors: Mapping[str, TensorMeta], objects: Iterable[DataObject]) -> None:
    """What is stored is as much as all distinct elements take: implied by the rest, and so a check on the checks."""
    stored = sum(o.data_nbytes for o in objects)
    distinct = sum(nbytes_of_tensor(meta) for meta in tensors.values())
    if stored != distinct:
        raise CommitError(f"{stored} bytes of data are stored, and all distinct elements take {distinct}")


def _require_aliases(manifest: Manifest) -> None:
    for name, target in manifest.aliases.items():
        if target not in manifest.tensors or name in manifest.tensors:
            raise CommitError(f"{name!r} is tied to {target!r}, which is no other tensor of this checkpoint")

"""Sealed images to the object store: data objects, then the part record. Torch-free; runs beside the training.

The bytes an image marks as written become the data section of a safetensors object, copied out of the slot and checked
against the sealed checksums *as copied*: a slot that was overwritten meanwhile cannot get into the store unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box, intersect
from surefoot.ckpt.errors import CommitError
from surefoot.ckpt.image import ImageInfo, check_blocks, data_view, read_image
from surefoot.ckpt.manifest import (
    DataObject,
    PartRecord,
    Piece,
    RankPart,
    TensorMeta,
    encode,
    object_key,
    part_key,
)
from surefoot.ckpt.plan import nbytes_of
from surefoot.ckpt.store import ObjectExistsError, ObjectMissingError, ObjectStore, ObjectUnknownError
from surefoot.failpoint import failpoint
from surefoot.history import operation

Progress = Callable[[int, int], None]
"""Told bytes uploaded and bytes in all."""

HEADER_ALIGN_NBYTES = 64

_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""What the safetensors format has words for. Other types are stored as bytes there; the manifest knows better."""


def safetensors_header(
    pieces: Sequence[Piece], tensors: dict[str, TensorMeta], about: dict[str, str]
) -> bytes:
    """The beginning of a safetensors file up to its data: length, JSON, padding to a multiple of 64.

    A piece that is a whole tensor has the tensor's name, others have their box behind it: ``name[0:4,0:2]``.
    """
    entries: dict[str, Any] = {"__metadata__": about}
    for p in pieces:
        meta, box = tensors[p.name], Box(p.offset, p.extent)
        nbytes = nbytes_of(meta, box)
        known = _SAFETENSORS_DTYPES.get(meta.dtype)
        entries[p.name if p.extent == meta.shape else f"{p.name}{box}"] = {
            "dtype": known or "U8",
            "shape": list(p.extent) if known else [nbytes],
            "data_offsets": [p.at, p.at + nbytes],
        }
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-(8 + len(encoded)) % HEADER_ALIGN_NBYTES)
    return len(encoded).to_bytes(8, "little") + encoded


def upload_images(
    store: ObjectStore,
    images: Sequence[memoryview],
    *,
    generation: int,
    step: int,
    attempt: str,
    writer: int,
    deadline_s: float,
    progress: Progress | None = None,
) -> None:
    """Store what these images (of ranks of one node) contribute to the attempt, and say so in the part record.

    Repeating it with the same images is harmless. No reference to the images is kept.

    Raises:
        ImageError: an image is not sealed, was overwritten meanwhile, or is corrupt.
        CommitError: it is of another generation or step, or time is up between two objects.
        ObjectStore…Error: the object store.
    """
    give_up = time.monotonic() + deadline_s
    infos = [_own_image(image, generation, step) for image in images]
    total = sum(info.meta.structure.written_nbytes for info in infos)
    done = 0
    ranks: list[RankPart] = []
    with operation("upload", generation=generation, step=step, attempt=attempt, writer=writer, nbytes=total):
        for info, image in zip(infos, images, strict=True):
            if time.monotonic() > give_up:
                raise CommitError(
                    f"step {step} of generation {generation}: {done} of {total} bytes are uploaded after {deadline_s} s; given up"
                )
            ranks.append(_upload_rank(store, info, image, attempt))
            done += info.meta.structure.written_nbytes
            if progress is not None:
                progress(done, total)
            failpoint("upload.after_object")
        part = PartRecord(
            generation=generation, step=step, attempt=attempt, writer=writer, ranks=tuple(ranks)
        )
        failpoint("ckpt.before_part")
        create_or_recognise(store, part_key(generation, step, attempt, writer), encode(part))
        failpoint("ckpt.after_part")


def report_failure(
    store: ObjectStore, *, generation: int, step: int, attempt: str, writer: int, reason: str
) -> None:
    """Tell the committer that this writer's part will not come. Where a part of this writer exists it stands.

    Raises: ObjectStore…Error.
    """
    part = PartRecord(generation=generation, step=step, attempt=attempt, writer=writer, failure=reason)
    try:
        store.create(part_key(generation, step, attempt, writer), encode(part))
    except ObjectExistsError:
        pass  # it succeeded after all, or said so before


def create_or_recognise(store: ObjectStore, key: str, data: bytes | bytearray) -> None:
    """Create an object of this attempt; one that stands there with the same bytes is an earlier try's.

    Raises:
        CommitError: other bytes stand there, though the attempt's nonce is ours.
        ObjectStore…Error.
    """
    try:
        store.create(key, data)
    except (ObjectExistsError, ObjectUnknownError) as e:
        try:
            found = store.read(key)
        except ObjectMissingError:
            raise e from None
        if found != data:
            raise CommitError(
                f"{key} stands in {store.root} with other content: two writers use one attempt"
            ) from e


def _own_image(image: memoryview, generation: int, step: int) -> ImageInfo:
    info = read_image(image)
    if (info.generation, info.step) != (generation, step):
        raise CommitError(
            f"the slot of rank {info.rank} holds step {info.step} of generation {info.generation} by now, not step {step} of "
            f"generation {generation}"
        )
    return info


def _upload_rank(store: ObjectStore, info: ImageInfo, image: memoryview, attempt: str) -> RankPart:
    meta, s = info.meta, info.meta.structure
    data: DataObject | None = None
    with image.cast("B") as view, data_view(view, s) as section:
        if s.written_nbytes:
            data = _upload_object(store, info, section, attempt)
        replicas = {
            f"{b.name}{b.box}": _hash_of_box(section, s.tensors[b.name], b.name, b.box, info)
            for b in s.shared
        }
    return RankPart(
        rank=info.rank,
        world_size=info.world_size,
        tensors=s.tensors,
        aliases=s.aliases,
        replicas=replicas,
        values=meta.values,
        cursor=meta.cursor,
        ledger=meta.ledger,
        extra=meta.extra,
        data=data,
    )


def _upload_object(store: ObjectStore, info: ImageInfo, section: memoryview, attempt: str) -> DataObject:
    s = info.meta.structure
    about = {
        "format": "surefoot",
        "generation": str(info.generation),
        "step": str(info.step),
        "rank": str(info.rank),
        "world_size": str(info.world_size),
    }
    header = safetensors_header(s.written, s.tensors, about)
    body = bytearray(len(header) + s.written_nbytes)
    body[: len(header)] = header
    body[len(header) :] = section[: s.written_nbytes]
    with memoryview(body) as copied, copied[len(header) :] as copy:
        check_blocks(copy, info.meta.written_sums, info)
    key = object_key(info.generation, info.step, attempt, info.rank)
    create_or_recognise(store, key, body)
    return DataObject(
        key=key,
        size=len(body),
        data_start=len(header),
        data_nbytes=s.written_nbytes,
        block_nbytes=s.block_nbytes,
        checksums=info.meta.written_sums,
        header_checksum=xxhash.xxh3_64_hexdigest(header),
        pieces=s.written,
    )


def _hash_of_box(section: memoryview, meta: TensorMeta, name: str, box: Box, info: ImageInfo) -> str:
    """xxh3-64 of all elements of a box in row-major order, whichever pieces it was cut into.

    The cuts run along one dimension and keep rows together, so the pieces in order of their offsets are the whole.
    """
    s = info.meta.structure
    digest = xxhash.xxh3_64()
    pieces = (p for p in (*s.written, *s.kept) if p.name == name)
    for p in sorted(pieces, key=lambda p: p.offset):
        part = Box(p.offset, p.extent)
        if intersect(part, box) == part:
            digest.update(section[p.at : p.at + nbytes_of(meta, part)])
    return digest.hexdigest()

"""What ranks contribute to an attempt, to the object store: data objects, then the part record. Torch-free.

The bytes a rank writes become the data section of a safetensors object. They come from a snapshot image in a slot (an agent's
server: `upload_images`), from the staging buffer (ckpt/saving/uploader.py) or from live memory (ckpt/live.py), and are hashed on the
way. An image's checksums were taken when it was sealed: they are compared, and its seal is read again when the object store
has all bytes and shows none yet. The seal goes before the first byte is overwritten, so what was stored is what was sealed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from surefoot.ckpt.boxes import Box, intersect
from surefoot.ckpt.errors import CommitError, ImageError
from surefoot.ckpt.format.image import (
    ImageInfo,
    ImageMeta,
    ImageStructure,
    SharedBox,
    data_view,
    read_image,
)
from surefoot.ckpt.format.stformat import DTYPES, StTensor, encode_header
from surefoot.ckpt.manifest import (
    PAGE_NBYTES,
    DataObject,
    LedgerRow,
    PartRecord,
    Piece,
    RankPart,
    TensorMeta,
    encode,
    object_key,
    part_key,
)
from surefoot.ckpt.objects.stream import Chunks, Streaming, create_or_recognise, stream_object
from surefoot.ckpt.planning.plan import nbytes_of
from surefoot.ckpt.planning.replicas import label
from surefoot.ckpt.saving.jobs import UploadMsg
from surefoot.ckpt.store import ObjectExistsError, ObjectStore, until
from surefoot.failpoint import failpoint
from surefoot.history import operation

Progress = Callable[[int, int], None]
"""Told bytes uploaded and bytes in all."""

_TOO_NEW = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64"})
"""Types that safetensors 0.5 does not know. They, and what the format has no word for, are stored as bytes there; the manifest
knows better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which attempt something is uploaded for."""

    generation: int
    step: int
    attempt: str


def safetensors_header(
    pieces: Sequence[Piece], tensors: Mapping[str, TensorMeta], about: dict[str, str]
) -> bytes:
    """The beginning of a safetensors file up to its data: length, JSON, padding to whole pages.

    A piece that is a whole tensor has the tensor's name, others have their box behind it: ``name[0:4,0:2]``; and ``(piece)``, as
    often as it takes, where a whole tensor of the file is called just that.
    """
    wholes = {p.name for p in pieces if p.extent == tensors[p.name].shape}
    entries: list[StTensor] = []
    for p in pieces:
        meta, box = tensors[p.name], Box(p.offset, p.extent)
        nbytes = nbytes_of(meta, box)
        known = meta.dtype in DTYPES and meta.dtype not in _TOO_NEW
        entries.append(
            StTensor(
                name=p.name if p.extent == meta.shape else _name_beside(wholes, label(p.name, box)),
                dtype=meta.dtype if known else "uint8",
                shape=p.extent if known else (nbytes,),
                begin=p.at,
                end=p.at + nbytes,
            )
        )
    return encode_header(entries, about)


def _name_beside(wholes: Collection[str], name: str) -> str:
    while name in wholes:
        name += "(piece)"
    return name


# ---------------------------------------------------------------- one rank


def store_object(
    store: ObjectStore,
    place: Attempt,
    structure: ImageStructure,
    chunks: Chunks,
    *,
    rank: int,
    world_size: int,
    deadline_s: float,
    keep_going: Callable[[], None],
    expected: Sequence[str] | None = None,
    before_finish: Callable[[], None] | None = None,
) -> DataObject | None:
    """Store what a rank writes; `chunks` gives the first `structure.written_nbytes` bytes of its data. None where it writes
    nothing. Raises: see `stream_object`."""
    if not structure.written_nbytes:
        return None
    about = {
        "format": "surefoot",
        "generation": str(place.generation),
        "step": str(place.step),
        "rank": str(rank),
        "world_size": str(world_size),
    }
    header = safetensors_header(structure.written, structure.tensors, about)
    what = Streaming(
        key=object_key(place.generation, place.step, place.attempt, rank),
        header=header,
        data_nbytes=structure.written_nbytes,
        block_nbytes=structure.block_nbytes,
        deadline_s=deadline_s,
    )
    checksums = stream_object(
        store, what, chunks, keep_going=keep_going, expected=expected, before_finish=before_finish
    )
    return DataObject(
        key=what.key,
        size=what.size,
        data_start=len(header),
        data_nbytes=structure.written_nbytes,
        block_nbytes=structure.block_nbytes,
        checksums=checksums,
        header_checksum=xxhash.xxh3_64_hexdigest(header),
        pieces=structure.written,
    )


def store_job(
    store: ObjectStore,
    job: UploadMsg,
    structure: ImageStructure,
    chunks: Chunks,
    *,
    hashes: Callable[[], dict[str, str]],
    require_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Store all that one rank contributes, and say so: its data, then its part record.

    Args:
        hashes: of what other ranks hold as well, by label; asked for when the data are stored.
        require_wanted: called for every chunk; raises to give up.

    Raises: CommitError (time is up), ObjectStore…Error; see `stream_object`.
    """
    place = Attempt(generation=job.generation, step=job.step, attempt=job.attempt)
    give_up = time.monotonic() + job.deadline_s
    store = until(store, give_up)

    def keep_going() -> None:
        require_wanted()
        if time.monotonic() > give_up:
            key = object_key(place.generation, place.step, place.attempt, job.rank)
            raise CommitError(
                f"step {job.step}: {key} is not stored in {store.root} within {job.deadline_s:g} s; given up"
            )

    failpoint("upload.before_objects")
    data = store_object(
        store,
        place,
        structure,
        chunks,
        rank=job.rank,
        world_size=job.world_size,
        deadline_s=job.deadline_s,
        keep_going=keep_going,
    )
    failpoint("upload.after_object")
    replicas = hashes()
    keep_going()
    part = _rank_part(job, structure, data, replicas, rank=job.rank, world_size=job.world_size)
    store_part(store, place, job.rank, [part])


def _rank_part(
    told: UploadMsg | ImageMeta,
    structure: ImageStructure,
    data: DataObject | None,
    replicas: dict[str, str],
    *,
    rank: int,
    world_size: int,
    ledger: tuple[LedgerRow, ...] = (),
) -> RankPart:
    return RankPart(
        rank=rank,
        world_size=world_size,
        tensors=structure.tensors,
        aliases=structure.aliases,
        replicas=replicas,
        values=told.values,
        cursor=told.cursor,
        ledger=ledger,
        extra=told.extra,
        data=data,
    )


def store_part(store: ObjectStore, place: Attempt, writer: int, ranks: Iterable[RankPart]) -> None:
    """Say what this writer stored: from now on the committer counts it. Raises: CommitError, ObjectStore…Error."""
    part = PartRecord(
        generation=place.generation,
        step=place.step,
        attempt=place.attempt,
        writer=writer,
        ranks=tuple(ranks),
    )
    failpoint("ckpt.before_part")
    create_or_recognise(store, part_key(place.generation, place.step, place.attempt, writer), encode(part))
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


def hashes_of(section: memoryview, structure: ImageStructure) -> dict[str, str]:
    """xxh3-64 of each shared box in row-major order, by its label, out of a data section that holds all pieces.

    Pieces of one box are contiguous in it and follow each other in order of their offsets, whoever writes them.
    """
    pieces: dict[str, list[Piece]] = {}
    for p in sorted((*structure.written, *structure.kept), key=lambda p: p.offset):
        pieces.setdefault(p.name, []).append(p)
    return {
        label(s.name, s.box): _hash_of(section, s, structure.tensors[s.name], pieces)
        for s in structure.shared
    }


def _hash_of(section: memoryview, s: SharedBox, meta: TensorMeta, pieces: Mapping[str, list[Piece]]) -> str:
    digest = xxhash.xxh3_64()
    for p in pieces.get(s.name, ()):
        part = Box(p.offset, p.extent)
        if intersect(part, s.box) == part:
            digest.update(section[p.at : p.at + nbytes_of(meta, part)])
    return digest.hexdigest()


# ---------------------------------------------------------------- images in slots


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

    Repeating it with the same images is harmless. No reference to the images is kept, and nothing is copied.

    Raises:
        ImageError: an image is not sealed, was overwritten meanwhile, or is corrupt.
        CommitError: it is of another generation or step, or time is up.
        ObjectStore…Error: the object store.
    """
    place = Attempt(generation=generation, step=step, attempt=attempt)
    give_up = time.monotonic() + deadline_s
    store = until(store, give_up)
    infos = [_own_image(image, place) for image in images]
    total = sum(info.meta.structure.written_nbytes for info in infos)
    done = 0
    ranks: list[RankPart] = []

    def keep_going() -> None:
        if time.monotonic() > give_up:
            raise CommitError(
                f"step {step} of generation {generation}: {done} of {total} bytes are uploaded after {deadline_s} s; given up"
            )

    with operation("upload", generation=generation, step=step, attempt=attempt, writer=writer, nbytes=total):
        for info, image in zip(infos, images, strict=True):
            keep_going()
            with image.cast("B") as view:
                ranks.append(_store_image(store, place, info, view, keep_going, give_up - time.monotonic()))
            done += info.meta.structure.written_nbytes
            if progress is not None:
                progress(done, total)
            failpoint("upload.after_object")
        store_part(store, place, writer, ranks)


def _own_image(image: memoryview, place: Attempt) -> ImageInfo:
    info = read_image(image)
    if (info.generation, info.step) != (place.generation, place.step):
        raise CommitError(
            f"the slot of rank {info.rank} holds step {info.step} of generation {info.generation} by now, not step {place.step} of "
            f"generation {place.generation}"
        )
    return info


def _store_image(
    store: ObjectStore,
    place: Attempt,
    info: ImageInfo,
    view: memoryview,
    keep_going: Callable[[], None],
    deadline_s: float,
) -> RankPart:
    meta, s = info.meta, info.meta.structure
    seal = bytes(view[:PAGE_NBYTES])

    def require_sealed() -> None:
        if bytes(view[:PAGE_NBYTES]) != seal:
            raise ImageError("unsealed", f"rank {info.rank}'s slot was overwritten while it was uploaded")

    with data_view(view, s) as section, section[: s.written_nbytes] as written:
        try:
            data = store_object(
                store,
                place,
                s,
                lambda _: (written,),
                rank=info.rank,
                world_size=info.world_size,
                deadline_s=deadline_s,
                keep_going=keep_going,
                expected=meta.written_sums,
                before_finish=require_sealed,
            )
        except ImageError:
            require_sealed()  # which of the two it was
            raise
        replicas = hashes_of(section, s)
        require_sealed()
    return _rank_part(meta, s, data, replicas, rank=info.rank, world_size=info.world_size, ledger=meta.ledger)

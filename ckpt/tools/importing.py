"""Import: tensors from elsewhere become a committed checkpoint. Torch-free.

A `Foreign` says what there is and hands out the bytes box by box, in the order in which they are written, a box in chunks; so
whatever the size, memory is a few chunks. It becomes one data object, one part and one manifest, under a generation of its own that continues
from the newest step of the root, exactly as a save of one rank does.

Safetensors files are opened by ckpt/tools/stfiles.py, torch DCP folders by ckpt/tools/dcp/.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from surefoot.ckpt.boxes import Box
from surefoot.ckpt.errors import CkptUserError, DamagedError
from surefoot.ckpt.format.image import ImageStructure
from surefoot.ckpt.format.names import refusal
from surefoot.ckpt.manifest import Manifest, Piece, TensorMeta
from surefoot.ckpt.objects.stream import Chunks
from surefoot.ckpt.planning.plan import nbytes_of, place
from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.record import StartRef, lineage, list_manifests, read_records
from surefoot.ckpt.saving.commit import Committed, commit, error_of_outcome
from surefoot.ckpt.saving.generation import open_generation
from surefoot.ckpt.saving.jobs import UploadMsg
from surefoot.ckpt.saving.upload import store_job
from surefoot.ckpt.store import ObjectStore
from surefoot.ckpt.tools.words import local_folder

DEADLINE_S = 24 * 3600.0
"""For the whole upload. Nobody else waits for it, and Ctrl-C ends it."""
COMMIT_S = 60.0


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the source that is not imported: why, and how to keep it."""

    name: str
    tensors: int
    nbytes: int
    why: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What is to be imported. `pieces` make up every tensor; `read(name, box)` gives the bytes of one, row-major, chunk
    after chunk. `values` are encoded as ckpt/format/values.py does."""

    label: str
    tensors: Mapping[str, TensorMeta]
    pieces: Sequence[tuple[str, Box]]
    read: Callable[[str, Box], Iterable[memoryview | bytes]]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cursor: dict[str, Any] | None = None
    step: int | None = None
    """The step it says it is."""
    step_entry: str | None = None
    """The name of the value or tensor that says so, where it is one of them."""
    left_out: Sequence[LeftOut] = ()
    """What there is besides, and cannot be taken over. The checkpoint's facts name it."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(self.tensors[name], box) for name, box in self.pieces)


def require_names(named: Iterable[tuple[str, object]], *, own: bool = False) -> None:
    """Raises CkptUserError for what no save would have stored: a name that it refuses, and one that stands for two.

    Args:
        named: each name of the source, and where it stands, for the message.
        own: an export of ours, which names what is one rank's.
    """
    places: dict[str, object] = {}
    for name, where in named:
        if why := refusal(name, "" if own else name):
            raise CkptUserError(f"{where}: {why}")
        if name in places:
            raise CkptUserError(
                f"{where}: {name} is the name of something in {places[name]} already; rename one of them"
            )
        places[name] = where


def detect(source: str | os.PathLike[str]) -> str:
    """``dcp`` or ``safetensors``, by what lies there. Raises CkptUserError for a URL that is no local folder."""
    folder = local_folder(source)
    return "dcp" if (folder / ".metadata").is_file() else "safetensors"


def write_foreign(
    store: ObjectStore, foreign: Foreign, *, step: int | None = None, progress: Progress | None = None
) -> Manifest:
    """Commit it as `step` (None: the one it names; 0 in an empty root).

    Raises: CkptUserError (the root is as far as that already, or no step is known), DamagedError (the source), CommitError,
        FencedError, StaleStartError, ObjectStore…Error.
    """
    seen = frozenset(list_manifests(store))
    line = lineage(read_records(store), seen)
    step = _step_for(store, foreign, step, line[-1].step if line else None)
    start = StartRef(generation=line[-1].generation, step=line[-1].step) if line else StartRef()
    created_by = f"import:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
    generation = open_generation(store, start, seen=seen, created_by=created_by)
    job = UploadMsg(
        generation=generation,
        step=step,
        attempt=secrets.token_hex(8),
        rank=0,
        world_size=1,
        deadline_s=DEADLINE_S,
        values=dict(foreign.values),
        cursor=foreign.cursor,
        extra=None,
        replicas={},
    )
    structure = _structure(foreign)
    store_job(store, job, structure, _chunks(foreign, structure, progress), hashes=dict)
    return _committed(store, job, _facts(foreign, step))


def _step_for(store: ObjectStore, foreign: Foreign, step: int | None, newest: int | None) -> int:
    step = foreign.step if step is None else step
    if step is None:
        if newest is not None:
            raise CkptUserError(
                f"{store.root} holds step {newest}: say as which step to import {foreign.label} (--step, above {newest})"
            )
        return 0
    if newest is not None and step <= newest:
        raise CkptUserError(
            f"{store.root} is at step {newest} already: import {foreign.label} as a step above it (--step), or into another root"
        )
    return step


def _structure(foreign: Foreign) -> ImageStructure:
    """Of the one rank that writes all of it."""
    placed, nbytes = place(foreign.tensors, foreign.pieces)
    return ImageStructure(
        tensors=dict(foreign.tensors),
        aliases=dict(foreign.aliases),
        written=tuple(Piece(name=p.name, offset=p.box.offset, extent=p.box.extent, at=p.at) for p in placed),
        kept=(),
        shared=(),
        written_nbytes=nbytes,
        kept_start=nbytes,
        data_nbytes=nbytes,
    )


def _chunks(foreign: Foreign, structure: ImageStructure, progress: Progress | None) -> Chunks:
    """The bytes in the order in which they are written; of no more than one piece at a time."""
    tell = stepwise(progress, structure.written_nbytes)

    def chunks(drain: Callable[[], None]) -> Iterator[memoryview]:
        for piece in structure.written:
            box, taken = Box(piece.offset, piece.extent), 0
            for read in foreign.read(piece.name, box):
                data = memoryview(read).cast("B")
                yield data
                taken += len(data)
                tell(len(data))
            if taken != nbytes_of(foreign.tensors[piece.name], box):
                raise DamagedError(f"{foreign.label}: {piece.name} {box} has {taken} bytes", key=piece.name)
            drain()

    return chunks


def _facts(foreign: Foreign, step: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "imported_from": foreign.label,
    }
    if foreign.step_entry is not None and foreign.step == step:
        facts["step_entry"] = foreign.step_entry
    if foreign.left_out:
        facts["left_out"] = [part.name for part in foreign.left_out]
    return facts


def _committed(store: ObjectStore, job: UploadMsg, facts: Mapping[str, Any]) -> Manifest:
    outcome = commit(
        store,
        generation=job.generation,
        step=job.step,
        attempt=job.attempt,
        writers=1,
        deadline_s=COMMIT_S,
        facts=facts,
    )
    if isinstance(outcome, Committed):
        return outcome.manifest
    raise error_of_outcome(outcome, generation=job.generation, step=job.step)

"""Import: tensors from elsewhere become a committed checkpoint. Torch-free.

A `Foreign` says what there is and hands out the bytes box by box, in the order in which they are written, a box in chunks; so
whatever the size, memory is a few chunks. It becomes one data object, one part and one manifest, under a generation of its own that continues
from the newest step of the root, exactly as a save does.

Safetensors files (a file, or a folder with or without a Hugging Face index) are read here, torch DCP folders in ckpt/tools/dcp/.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from surefoot.ckpt.boxes import Box, whole
from surefoot.ckpt.errors import CkptUserError, CommitError, DamagedError, FencedError
from surefoot.ckpt.format.stformat import StTensor, decode_header, header_nbytes
from surefoot.ckpt.manifest import (
    BLOCK_NBYTES,
    DataObject,
    Manifest,
    PartRecord,
    Piece,
    RankPart,
    TensorMeta,
    encode,
    object_key,
    part_key,
)
from surefoot.ckpt.objects.stream import create_or_recognise
from surefoot.ckpt.planning.plan import nbytes_of, place
from surefoot.ckpt.progress import Progress, stepwise
from surefoot.ckpt.record import RECORDS, StartRef, lineage, list_manifests, read_records
from surefoot.ckpt.saving.commit import Committed, Fenced, GivenUp, Lost, commit
from surefoot.ckpt.saving.generation import open_generation
from surefoot.ckpt.saving.upload import safetensors_header
from surefoot.ckpt.store import ObjectStore
from surefoot.ckpt.tools.exporting import INDEX, local_folder
from surefoot.ckpt.tools.words import local

PUT_NBYTES = 4 * 2**20
DEADLINE_S = 24 * 3600.0
"""For the whole upload. Nobody else waits for it, and Ctrl-C ends it."""


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


# ---------------------------------------------------------------- to the object store


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
    attempt = secrets.token_hex(8)
    data = _upload(store, foreign, generation, step, attempt, progress) if foreign.pieces else None
    rank = RankPart(
        rank=0,
        world_size=1,
        tensors=dict(foreign.tensors),
        aliases=dict(foreign.aliases),
        values=dict(foreign.values),
        cursor=foreign.cursor,
        data=data,
    )
    part = PartRecord(generation=generation, step=step, attempt=attempt, writer=0, ranks=(rank,))
    create_or_recognise(store, part_key(generation, step, attempt, 0), encode(part))
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "imported_from": foreign.label,
    }
    if foreign.step_entry is not None and foreign.step == step:
        facts["step_entry"] = foreign.step_entry
    if foreign.left_out:
        facts["left_out"] = [part.name for part in foreign.left_out]
    outcome = commit(
        store, generation=generation, step=step, attempt=attempt, writers=1, deadline_s=60.0, facts=facts
    )
    match outcome:
        case Committed(manifest=manifest):
            return manifest
        case Fenced(by=by):
            raise FencedError(generation=generation, step=step, by=by)
        case Lost(winner_attempt=winner):
            raise CommitError(f"step {step} of generation {generation} was committed by attempt {winner}")
        case GivenUp(reason=reason):
            raise CommitError(reason)


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


def _upload(
    store: ObjectStore,
    foreign: Foreign,
    generation: int,
    step: int,
    attempt: str,
    progress: Progress | None,
) -> DataObject:
    """One data object, streamed."""
    placed, nbytes = place(foreign.tensors, foreign.pieces)
    pieces = tuple(Piece(name=p.name, offset=p.box.offset, extent=p.box.extent, at=p.at) for p in placed)
    about = {"format": "surefoot", "generation": str(generation), "step": str(step), "rank": "0"}
    header = safetensors_header(pieces, dict(foreign.tensors), {**about, "world_size": "1"})
    key = object_key(generation, step, attempt, 0)
    sums = _BlockSums()
    upload = store.upload(key, len(header) + nbytes, deadline_s=DEADLINE_S)
    try:
        upload.put(memoryview(header))
        tell = stepwise(progress, nbytes)
        for name, box in ((p.name, p.box) for p in placed):
            taken = 0
            for read in foreign.read(name, box):
                data = memoryview(read).cast("B")
                taken += len(data)
                for a in range(0, len(data), PUT_NBYTES):
                    chunk = data[a : a + PUT_NBYTES]
                    sums.update(chunk)
                    upload.put(chunk)
                    tell(len(chunk))
            if taken != nbytes_of(foreign.tensors[name], box):
                raise DamagedError(f"{foreign.label}: {name} {box} has {taken} bytes", key=name)
            upload.drain()
        upload.finish()
    except BaseException:
        upload.abort()
        raise
    return DataObject(
        key=key,
        size=len(header) + nbytes,
        data_start=len(header),
        data_nbytes=nbytes,
        block_nbytes=BLOCK_NBYTES,
        checksums=sums.end(),
        header_checksum=xxhash.xxh3_64_hexdigest(header),
        pieces=pieces,
    )


class _BlockSums:
    """xxh3-64 of each block of a stream."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._digest = xxhash.xxh3_64()
        self._left = BLOCK_NBYTES

    def update(self, data: memoryview) -> None:
        while data:
            part = data[: self._left]
            self._digest.update(part)
            self._left -= len(part)
            data = data[len(part) :]
            if not self._left:
                self._next()

    def _next(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest.reset()
        self._left = BLOCK_NBYTES

    def end(self) -> tuple[str, ...]:
        if self._left < BLOCK_NBYTES:
            self._next()
        return tuple(self._done)


# ---------------------------------------------------------------- safetensors


def open_safetensors(source: str | os.PathLike[str], *, prefix: str = "model.") -> Foreign:
    """A safetensors file, or a folder of them; `prefix` is put before each name.

    Raises: CkptUserError (no such files, or none that can be read; two tensors with one name; a second name of two tensors),
        DamagedError (a file is none, or is cut off).
    """
    folder = local_folder(source)
    found: dict[str, tuple[_StFile, StTensor]] = {}
    said: list[dict[str, str]] = []
    with local("read", str(folder)):
        for path in _files_of(folder):
            file, tensors, about = _open_file(path)
            said.append(about)
            for t in tensors:
                if t.name in found:
                    raise CkptUserError(f"{folder}: {t.name} stands in two files, the second is {path.name}")
                found[t.name] = file, t

    def read(name: str, box: Box) -> Iterator[bytes]:
        file, t = found[name.removeprefix(prefix)]
        return file.chunks(t.begin, t.end)

    metas = {prefix + n: TensorMeta(dtype=t.dtype, shape=t.shape) for n, (_, t) in found.items()}
    ties = _ties(said, found, folder)
    return Foreign(
        label=str(folder),
        tensors=metas,
        pieces=[(n, whole(m.shape)) for n, m in metas.items() if 0 not in m.shape],
        read=read,
        aliases={prefix + second: prefix + kept for second, kept in ties.items()},
    )


def _ties(said: Iterable[Mapping[str, str]], tensors: Collection[str], folder: Path) -> dict[str, str]:
    """Second names to the tensors that they are names of, from the metadata of all files.

    ``second name: kept name`` is how `safetensors.torch.save_model`, `huggingface_hub` and our export write ties, among whatever
    else the metadata say. So a value that is no tensor's name says nothing, and nor do the words that stand there by convention
    (`_may_tie`). A second name may lead to another. What has data of its own is tied to nothing.

    Raises CkptUserError: a name leads to two tensors.
    """
    seconds: dict[str, dict[str, None]] = {}
    for about in said:
        if about.get("format") != "surefoot":  # a data object: generation, step and ranks
            for second, kept in about.items():
                if second not in tensors and _may_tie(second, kept):
                    seconds.setdefault(kept, {})[second] = None
    ties: dict[str, str] = {}
    for kept in tensors:
        leading_here = [kept]
        while leading_here:
            for second in seconds.get(leading_here.pop(), ()):
                if second not in ties:
                    ties[second] = kept
                    leading_here.append(second)
                elif ties[second] != kept:
                    raise CkptUserError(
                        f"{folder}: by the metadata of its files {second} is another name of {ties[second]} and of {kept}: files of "
                        f"different models? Import each into a root of its own, or mend their metadata"
                    )
    return ties


def _may_tie(second: str, kept: str) -> bool:
    """Whether this pair can be meant as a tie: ``format: pt`` never is, nor is a number of something (``epoch: 3``); lists of
    parameters have numbers for names, but then all of them are."""
    return second != "format" and (second.isdecimal() or not kept.isdecimal())


def _files_of(folder: Path) -> list[Path]:
    if folder.is_file():
        _require_no_pickle(folder)
        return [folder]
    if not folder.is_dir():
        raise CkptUserError(f"{folder}: there is no such file or folder")
    if (index := folder / INDEX).is_file():
        return [folder / name for name in _indexed(index)]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if (folder / RECORDS).is_dir():
        raise CkptUserError(
            f"{folder} is a root of Surefoot's own checkpoints: it is loaded from as it is (ckpt.load), or copied as a folder; there is "
            f"nothing to import"
        )
    pickles = (p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt") and p.is_file())
    for path in sorted(pickles):
        _require_no_pickle(path)
    raise CkptUserError(f"{folder} holds no *.safetensors")


_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""How files of torch.save begin, and pickles of protocol 2 and above. A safetensors file may begin like these: with the length of its
header, a number of 8 bytes, of which the upper are 0; but then comes a brace."""


def _require_no_pickle(path: Path) -> None:
    """Raises CkptUserError for what torch.save or pickle wrote, by its first bytes: nothing of it is opened."""
    with open(path, "rb") as f:
        head = f.read(9)
    ours = head[4:] == b"\0\0\0\0{"
    pickled = head[:1] == _PICKLE and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and not ours
    if head[:4] == _ZIP or pickled:
        what = "a zip with a pickle in it, as torch.save writes" if head[:4] == _ZIP else "a pickle"
        raise CkptUserError(
            f"{path} is {what}: it is not opened, since loading it can run anything; have it converted to safetensors by somebody who "
            f"trusts it"
        )


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises DamagedError."""
    try:
        weights = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weights.values()))
        if not all(
            isinstance(n, str) and n == os.path.basename(n) and n not in ("", ".", "..") for n in names
        ):
            raise ValueError(f"its files must lie beside it, and it names {names[:3]}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise DamagedError(f"{index} is no index: {e}", key=index.name) from e
    if missing := [n for n in names if not (index.parent / n).is_file()]:
        raise DamagedError(f"{index} names {missing[0]}, which is not there", key=missing[0])
    return names


@dataclass(frozen=True, slots=True)
class _StFile:
    """A safetensors file whose header was read. It is not mapped: who cuts it off meanwhile would kill us (SIGBUS)."""

    path: Path
    data_start: int
    seen: tuple[int, ...]

    def chunks(self, begin: int, end: int) -> Iterator[bytes]:
        """These bytes of the data section. Raises: DamagedError (it is not the file any more that it was), CkptUserError (it
        cannot be opened)."""
        with local("read", str(self.path)), open_regular(self.path) as f:
            at, stop = self.data_start + begin, self.data_start + end
            while at < stop and (data := os.pread(f.fileno(), min(PUT_NBYTES, stop - at), at)):
                yield data
                at += len(data)
            if at < stop or _version(f) != self.seen:
                raise DamagedError(
                    f"{self.path} was changed while it was read: import it again when nobody writes to it",
                    key=self.path.name,
                )


def _open_file(path: Path) -> tuple[_StFile, list[StTensor], dict[str, str]]:
    """The file, its tensors, and the metadata; no data are read yet."""
    with open_regular(path) as f:
        seen = _version(f)
        size = os.fstat(f.fileno()).st_size
        length = header_nbytes(f.read(8), size, key=str(path))
        tensors, about = decode_header(f.read(length), size - 8 - length, key=str(path))
    return _StFile(path, 8 + length, seen), tensors, about


def _version(f: BinaryIO) -> tuple[int, ...]:
    s = os.fstat(f.fileno())
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def open_regular(path: Path) -> BinaryIO:
    """Raises: CkptUserError (a folder, or a pipe, which might never end), OSError."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise CkptUserError(f"{path} is {what} and no file: move it away, or name what is to be imported")
    return open(path, "rb")


def detect(source: str | os.PathLike[str]) -> str:
    """``dcp`` or ``safetensors``, by what lies there. Raises CkptUserError for a URL that is no local folder."""
    folder = local_folder(source)
    return "dcp" if (folder / ".metadata").is_file() else "safetensors"

"""What Surefoot's checkpoints are measured against: plain writers and readers, torch DCP, boto3's transfer manager.

Each is given its best simple form: the bytes lie in memory already, buffers are warm, and the fastest of several counts.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed as dist
from boto3.s3.transfer import TransferConfig
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

CHUNK_NBYTES = 8 * 2**20


def views_of(parts: Sequence[torch.Tensor]) -> list[memoryview]:
    """The memory of contiguous tensors, as bytes."""
    arrays: list[Any] = [t.contiguous().numpy() for t in parts]
    return [memoryview(array).cast("B") for array in arrays]


def chunks(views: Sequence[memoryview]) -> list[tuple[int, memoryview]]:
    """The same memory in chunks of at most CHUNK_NBYTES, each with its place in the file."""
    found: list[tuple[int, memoryview]] = []
    at = 0
    for view in views:
        starts = range(0, len(view), CHUNK_NBYTES)
        found += [(at + begin, view[begin : begin + CHUNK_NBYTES]) for begin in starts]
        at += len(view)
    return found


# ---------------------------------------------------------------- plain writers, with fsync


def write_plain(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    for _, chunk in chunks(views):
        os.write(fd, chunk)
    os.fsync(fd)
    os.close(fd)


def write_mmap(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    nbytes = sum(map(len, views))
    os.truncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as mapped:
        for at, chunk in chunks(views):
            mapped[at : at + len(chunk)] = chunk
        mapped.flush()
    os.fsync(fd)
    os.close(fd)


def write_pwrite2(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    _in_two_threads(lambda at, chunk: os.pwrite(fd, chunk, at), chunks(views))
    os.fsync(fd)
    os.close(fd)


WRITERS = {"raw_write_s": write_plain, "raw_mmap_s": write_mmap, "raw_pwrite2_s": write_pwrite2}


# ---------------------------------------------------------------- plain readers, into warm memory


def read_plain(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY)
    for at, chunk in chunks(views):
        os.preadv(fd, [chunk], at)
    os.close(fd)


def read_mmap(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as whole:
        for at, chunk in chunks(views):
            chunk[:] = whole[at : at + len(chunk)]
    os.close(fd)


def read_pread2(path: Path, views: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY)
    _in_two_threads(lambda at, chunk: os.preadv(fd, [chunk], at), chunks(views))
    os.close(fd)


READERS = {"raw_read_s": read_plain, "raw_mmap_read_s": read_mmap, "raw_pread2_s": read_pread2}


def _in_two_threads(act: Any, todo: Sequence[tuple[int, memoryview]]) -> None:
    def work(mine: Sequence[tuple[int, memoryview]]) -> None:
        for at, chunk in mine:
            act(at, chunk)

    other = threading.Thread(target=work, args=(todo[1::2],))
    other.start()
    work(todo[::2])
    other.join()


# ---------------------------------------------------------------- torch DCP


def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    """What DCP's users hand it: both state_dicts under names that do not depend on the layout."""
    model, optim = get_state_dict(state["model"], state["optim"])
    return {"model": model, "optim": optim}


class Dcp:
    """torch.distributed.checkpoint as its tutorials use it, with a group of its own for what it does in the background."""

    def __init__(self) -> None:
        # It also keeps a save in a thread from getting its collectives between two of the training's.
        self._background: Any = dist.new_group(backend="gloo")

    def save(self, state: dict[str, Any], to: str) -> None:
        save(_gathered(state), storage_writer=_writer(to))

    def async_save(self, state: dict[str, Any], to: str, *, process: bool) -> Future[Any]:
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        done = async_save(
            _gathered(state),
            storage_writer=_writer(to),
            process_group=self._background,
            async_checkpointer_type=kind,
        )
        return done if isinstance(done, Future) else done.upload_completion

    def load(self, state: dict[str, Any], source: str) -> None:
        gathered = _gathered(state)
        load(gathered, storage_reader=_reader(source))
        set_state_dict(
            state["model"],
            state["optim"],
            model_state_dict=gathered["model"],
            optim_state_dict=gathered["optim"],
        )


def _writer(to: str) -> Any:
    return FsspecWriter(to) if to.startswith("s3://") else FileSystemWriter(to)


def _reader(source: str) -> Any:
    return FsspecReader(source) if source.startswith("s3://") else FileSystemReader(source)


# ---------------------------------------------------------------- boto3


class _Memory(io.RawIOBase):
    """A file object over tensors' memory: boto3 gets bytes that lie ready, and writes into warm ones."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._starts = [0]
        for view in views:
            self._starts.append(self._starts[-1] + len(view))
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._starts[-1])[whence]
        return self._at

    def _spans(self, nbytes: int) -> list[memoryview]:
        """The memory of the next `nbytes`, and go past it."""
        end = min(self._at + nbytes, self._starts[-1])
        found = []
        for view, start in zip(self._views, self._starts[:-1], strict=True):
            if start < end and start + len(view) > self._at:
                found.append(view[max(0, self._at - start) : end - start])
        self._at = max(self._at, end)
        return found

    def readinto(self, into: Any) -> int:
        done = 0
        for span in self._spans(len(into)):
            into[done : done + len(span)] = span
            done += len(span)
        return done

    def read(self, size: int = -1, /) -> bytes:
        return b"".join(self._spans(self._starts[-1] if size < 0 else size))

    def write(self, data: Any) -> int:
        done = 0
        for span in self._spans(len(data)):
            span[:] = data[done : done + len(span)]
            done += len(span)
        return done


class Boto3:
    """boto3's managed transfers with their defaults, but for the part size."""

    def __init__(self, part_nbytes: int) -> None:
        self._client = boto3.client("s3")
        self._config = TransferConfig(multipart_threshold=part_nbytes, multipart_chunksize=part_nbytes)

    def put(self, bucket: str, key: str, views: Sequence[memoryview]) -> None:
        self._client.upload_fileobj(_Memory(views), bucket, key, Config=self._config)

    def get(self, bucket: str, key: str, views: Sequence[memoryview]) -> None:
        self._client.download_fileobj(bucket, key, _Memory(views), Config=self._config)

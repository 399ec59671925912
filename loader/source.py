"""The one door to pyarrow and fsspec: the Parquet files behind a `Source`, read by row group.

Opening a source lists its files and reads their footers; what is kept of them is a few numbers per row group. Payload is read
when asked for: the column's bytes of one row group, or a large row group as a stream of slices. On a remote file that is one
ranged request for the footer and one per row group (a large row group: one per piece).

Processes: nothing here starts a thread at import, and reading local files starts none (pyarrow reads with
``use_threads=False`` and without pre-buffering). The filesystem of a remote URL is created by `ParquetSource.open`, in the
process that uses it, outside fsspec's cache of instances: no process inherits a live one through a fork. fsspec's own event
loop thread begins with the first remote URL.

Errors: trouble on the way to the data and bad data are told apart, see `surefoot.loader.errors`. Remote bytes are fetched
before pyarrow sees them, so what fails while decoding is the data's fault.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute  # the first cast would import it, 0.02 s in each process: this way it is there before a fork
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from surefoot.failpoint import failpoint
from surefoot.loader.errors import (
    ChangedFileError,
    ColumnMissingError,
    ColumnTypeError,
    DamagedFileError,
    DuplicateFileError,
    MixtureError,
    NotParquetError,
    SourceDeniedError,
    SourceMissingError,
    SourceUnreachableError,
    TruncatedFileError,
)
from surefoot.loader.mixture import Source
from surefoot.loader.order import Int64Array, Layout

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""Read from the end of a file at once: holds the footers of usual files (Parquet's own writers take 64 KiB as well)."""
PIECE_BYTES = 8 << 20
"""A column chunk above this is read in pieces of this size and decoded as a stream."""
FOOTERS_KEPT = 32
"""Parsed footers kept per source; the rest is read again when needed."""
CALL_DEADLINE_S = 60.0
"""The most one call to a remote filesystem may take, its own retries included (s3fs retries for minutes otherwise)."""

S3_OPTIONS: dict[str, Any] = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20}}


@dataclass(frozen=True, slots=True, eq=False)
class TextBlock:
    """Decoded rows of one block: row i is ``data[offsets[i] : offsets[i + 1]]``; `null` marks rows without a value, if any."""

    offsets: Int64Array
    data: npt.NDArray[np.uint8]
    null: npt.NDArray[np.bool_] | None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tokens(self, row: int) -> npt.NDArray[np.uint8]:
        """The bytes of a row; a view, valid as long as it is held."""
        return self.data[self.offsets[row] : self.offsets[row + 1]]

    def is_null(self, row: int) -> bool:
        """Whether the row holds no value."""
        return self.null is not None and bool(self.null[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file as it was found: `path` is a URL where it is not on this machine, `name` its last part."""

    name: str
    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    metadata: pq.FileMetaData
    signature: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileShape:
    """What the loader keeps of a footer: rows and sizes of the row groups, and a digest over both and the name."""

    rows: Int64Array
    chunk_bytes: Int64Array
    digest: bytes


class ParquetSource:
    """The files of one source, open for reading. Use it in the process that opened it, in one thread."""

    def __init__(
        self, source: Source, files: _Files, entries: list[FileEntry], shapes: list[_FileShape]
    ) -> None:
        """Called by `open`, which reads what this only stores."""
        self.source = source
        self.entries = entries
        self._files = files
        self._footers: OrderedDict[int, _Footer] = OrderedDict()
        self.digests = [shape.digest for shape in shapes]
        counts = [len(shape.rows) for shape in shapes]
        self._group_rows = np.concatenate([shape.rows for shape in shapes])
        self._group_file = np.repeat(np.arange(len(shapes)), counts)
        self._group_in_file = np.concatenate([np.arange(count) for count in counts])
        self._group_first_row = np.concatenate([np.cumsum(shape.rows) - shape.rows for shape in shapes])
        self.file_rows = [int(shape.rows.sum()) for shape in shapes]
        self.layout = Layout(
            group_rows=self._group_rows,
            block_rows=source.block_rows,
            window_blocks=source.window_blocks
            or window_blocks(
                self._group_rows,
                np.concatenate([shape.chunk_bytes for shape in shapes]),
                block_rows=source.block_rows,
                window_bytes=source.window_bytes,
            ),
        )

    @classmethod
    def open(cls, source: Source) -> ParquetSource:
        """List the files and read their footers.

        Raises:
            MixtureError: no filesystem for the URL.
            SourceError: see `surefoot.loader.errors`.
        """
        files = _Files(source)
        entries = files.list()
        shapes = [_shape(source, entry, files.metadata(entry)) for entry in entries]
        return cls(source, files, entries, shapes)

    def place(self, group: int, row: int) -> tuple[FileEntry, int]:
        """The file, and the row in it (from 0), of a row of a row group."""
        return self.entries[self._group_file[group]], int(self._group_first_row[group]) + row

    def is_streamed(self, group: int) -> bool:
        """Whether the row group has more rows than a block and comes in slices."""
        return bool(self._group_rows[group] > self.source.block_rows)

    def read_group(self, group: int) -> TextBlock:
        """Decode a whole row group. Raises: SourceError."""
        with self._parquet(group) as (file, in_file):
            table = file.read_row_group(in_file, columns=[self.source.column], use_threads=False)
            block = _text_block(table.column(0))
        self._check_rows(group, len(block))
        return block

    def stream_group(self, group: int) -> Iterator[TextBlock]:
        """Decode a row group slice by slice: each `block_rows` rows, the last one what is left. Raises: SourceError."""
        want = self.source.block_rows
        held: list[pa.RecordBatch] = []
        rows = total = 0
        with self._parquet(group) as (file, in_file):
            for batch in file.iter_batches(
                batch_size=want, row_groups=[in_file], columns=[self.source.column], use_threads=False
            ):
                held.append(batch)
                rows += len(batch)
                total += len(batch)
                while rows >= want:
                    column = pa.Table.from_batches(held).column(0)
                    yield _text_block(column.slice(0, want))
                    rows -= want
                    held = pa.Table.from_batches(held).slice(want).to_batches()
            if rows:
                yield _text_block(pa.Table.from_batches(held).column(0))
        self._check_rows(group, total)

    def close(self) -> None:
        """Drop what is held; reading again is an error of the caller's."""
        self._footers.clear()
        self._files.close()

    def _check_rows(self, group: int, rows: int) -> None:
        if rows != self._group_rows[group]:
            entry = self.entries[self._group_file[group]]
            raise DamagedFileError(
                f"{entry.path}: row group {int(self._group_in_file[group])} holds {rows} rows and its footer says "
                f"{int(self._group_rows[group])}",
                source=self.source.name,
                path=entry.path,
            )

    @contextmanager
    def _parquet(self, group: int) -> Generator[tuple[pq.ParquetFile, int]]:
        failpoint("loader.before_read")
        index, in_file = int(self._group_file[group]), int(self._group_in_file[group])
        entry = self.entries[index]
        metadata = self._metadata(index)
        chunk = _column_chunk(metadata, in_file, self.source.column)
        large = chunk[1] > PIECE_BYTES
        with (
            self._files.reading(entry, None if large else chunk) as opened,
            decoding(self.source.name, entry.path),
            pq.ParquetFile(
                opened,
                metadata=metadata,
                pre_buffer=False,
                buffer_size=PIECE_BYTES if large else 0,
                page_checksum_verification=True,
            ) as file,
        ):
            yield file, in_file

    def _metadata(self, index: int) -> pq.FileMetaData:
        entry = self.entries[index]
        signature = self._files.signature(entry)
        kept = self._footers.get(index)
        if kept is None or kept.signature != signature:
            metadata = self._files.metadata(entry)
            if _shape(self.source, entry, metadata).digest != self.digests[index]:
                raise ChangedFileError(
                    f"{entry.path} is no longer the file it was when the source was opened; put it back, or start a new run",
                    source=self.source.name,
                    path=entry.path,
                )
            kept = self._footers[index] = _Footer(metadata=metadata, signature=signature)
        self._footers.move_to_end(index)
        while len(self._footers) > FOOTERS_KEPT:
            self._footers.popitem(last=False)
        return kept.metadata


def window_blocks(
    group_rows: Int64Array, chunk_bytes: Int64Array, *, block_rows: int, window_bytes: int
) -> int:
    """W: how many blocks of the largest size fit `window_bytes`; at least 1. A pure function of the footers."""
    share = np.minimum(1.0, block_rows / np.maximum(group_rows, 1))
    largest = int((chunk_bytes * share).max(initial=1.0))
    return max(1, window_bytes // max(1, largest))


def _shape(source: Source, entry: FileEntry, metadata: pq.FileMetaData) -> _FileShape:
    leaf = _check_column(source, entry, metadata)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = np.array([group.num_rows for group in groups], np.int64)
    sizes = np.array([group.column(leaf).total_uncompressed_size for group in groups], np.int64)
    stored = np.array([group.column(leaf).total_compressed_size for group in groups], np.int64)
    digest = hashlib.blake2b(digest_size=8)
    for part in (entry.name.encode(), rows.tobytes(), sizes.tobytes(), stored.tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return _FileShape(rows=rows, chunk_bytes=sizes, digest=digest.digest())


def _check_column(source: Source, entry: FileEntry, metadata: pq.FileMetaData) -> int:
    """The number of the column among the leaves. Raises: ColumnMissingError, ColumnTypeError."""
    with decoding(source.name, entry.path):
        schema = metadata.schema.to_arrow_schema()
    at = schema.get_field_index(source.column)
    if at < 0:
        raise ColumnMissingError(
            f"{entry.path} has no column {source.column!r}; its columns are {', '.join(map(repr, schema.names))};"
            " name the one with the text: Source(…, column=…)",
            source=source.name,
            path=entry.path,
        )
    kind = schema.field(at).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(
        is_kind(plain)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    ):
        raise ColumnTypeError(
            f"{entry.path}: column {source.column!r} is of type {kind}; text or bytes are needed (string, binary)",
            source=source.name,
            path=entry.path,
        )
    return _leaf(metadata, source.column)


def _leaf(metadata: pq.FileMetaData, column: str) -> int:
    return next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)


def _column_chunk(metadata: pq.FileMetaData, group: int, column: str) -> tuple[int, int]:
    """First byte and length of the column in the row group."""
    chunk = metadata.row_group(group).column(_leaf(metadata, column))
    first = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None:
        first = min(first, chunk.dictionary_page_offset)
    return first, chunk.total_compressed_size


def _text_block(column: pa.ChunkedArray) -> TextBlock:
    array = column.combine_chunks()
    if isinstance(
        array, pa.ChunkedArray
    ):  # pyarrow leaves several chunks where one would overflow its offsets
        array = pa.concat_arrays([chunk.cast(pa.large_binary()) for chunk in array.chunks])
    array = array.cast(pa.large_binary())
    if not len(array):
        return TextBlock(np.zeros(1, np.int64), np.zeros(0, np.uint8), None)
    _, offsets, data = array.buffers()
    first = array.offset
    return TextBlock(
        np.frombuffer(offsets, np.int64)[first : first + len(array) + 1],
        np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8),
        np.asarray(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None,
    )


# --- files ------------------------------------------------------------------------------------------------------------


class _Files:
    """Lists and reads the files of one source, on this machine or behind fsspec."""

    def __init__(self, source: Source) -> None:
        self._source = source
        try:
            protocol = get_protocol(source.url)
            options = S3_OPTIONS if protocol in ("s3", "s3a") else {}
            fs, path = url_to_fs(source.url, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ValueError, ImportError) as e:
            raise MixtureError(
                f"source {source.name!r}: no filesystem for the URL {source.url!r}: {e}"
            ) from e
        self._fs: Any = fs
        self._path: str = path
        self._local = isinstance(fs, LocalFileSystem)

    def list(self) -> list[FileEntry]:
        """All files of the source, sorted by path."""
        url = self._source.url
        with access(self._source.name, url):
            found = self._call("glob", self._path, detail=True) if _is_pattern(self._path) else self._plain()
        entries = sorted(
            (
                FileEntry(
                    name=PurePosixPath(info["name"]).name,
                    path=info["name"] if self._local else self._fs.unstrip_protocol(info["name"]),
                    size=int(info["size"]),
                )
                for info in found.values()
                if info["type"] == "file"
            ),
            key=lambda entry: entry.path,
        )
        if not entries:
            raise SourceMissingError(
                f"no file matches {url!r}; check the pattern, and that the data was prepared",
                source=self._source.name,
                path=url,
            )
        names: dict[str, str] = {}
        for entry in entries:
            if entry.name in names:
                raise DuplicateFileError(
                    f"{names[entry.name]} and {entry.path} have the same file name, and sample ids carry only that; rename "
                    f"one of them, or make two sources",
                    source=self._source.name,
                    path=entry.path,
                )
            names[entry.name] = entry.path
        return entries

    def _plain(self) -> dict[str, Any]:
        info = self._call("info", self._path)
        if info["type"] != "directory":
            return {info["name"]: info}
        return self._call("glob", self._path.rstrip("/") + "/*.parquet", detail=True)

    def signature(self, entry: FileEntry) -> tuple[int, ...]:
        """Differs when a local file was replaced. Remote objects are not asked again: their size is the signature."""
        if not self._local:
            return (entry.size,)
        with access(self._source.name, entry.path):
            found = os.stat(entry.path)
        return (found.st_size, found.st_mtime_ns, found.st_ino)

    def metadata(self, entry: FileEntry) -> pq.FileMetaData:
        """Read and parse a footer.

        Raises:
            NotParquetError, TruncatedFileError, DamagedFileError, DataAccessError.
        """
        size = self.signature(entry)[0]
        tail = self.read(entry.path, max(0, size - TAIL_BYTES), size)
        name, path = self._source.name, entry.path
        if tail[-4:] != MAGIC or size < 12:
            head = tail[:4] if size <= TAIL_BYTES else self.read(path, 0, 4)
            if head == MAGIC:
                raise TruncatedFileError(
                    f"{path} begins as a Parquet file, but its footer is missing: it was cut off after {size:,} bytes; "
                    f"write it again",
                    source=name,
                    path=path,
                )
            raise NotParquetError(
                f"{path} is not a Parquet file (it begins with {head!r}); convert it, or narrow the pattern",
                source=name,
                path=path,
            )
        footer = int.from_bytes(tail[-8:-4], "little") + 8
        if footer + 4 > size:
            raise DamagedFileError(
                f"{path}: its footer claims {footer:,} bytes of a file of {size:,}; write it again",
                source=name,
                path=path,
            )
        if footer > len(tail):
            tail = self.read(path, size - footer, size)
        with decoding(name, path):
            return pq.read_metadata(pa.BufferReader(MAGIC + tail[-footer:]))

    def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes start .. end - 1."""
        with access(self._source.name, path):
            data = self._read_local(path, start, end) if self._local else self._read_remote(path, start, end)
        if len(data) != end - start:
            raise ChangedFileError(
                f"{path} gave {len(data):,} bytes from byte {start:,} on, and {end - start:,} should be there: it changes while it "
                f"is read; leave it alone, and start again",
                source=self._source.name,
                path=path,
            )
        return data

    def _read_local(self, path: str, start: int, end: int) -> bytes:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), end - start, start)

    def _read_remote(self, path: str, start: int, end: int) -> bytes:
        return self._call("cat_file", path, start=start, end=end)

    @contextmanager
    def reading(self, entry: FileEntry, chunk: tuple[int, int] | None) -> Generator[Any]:
        """What pyarrow can read from. `chunk` (first byte, length) is what will be needed; None: unknown or large."""
        if self._local:
            with access(self._source.name, entry.path):
                file = pa.OSFile(entry.path, "rb")
            with file:
                yield file
            return
        ranges = _Ranges(lambda start, end: self.read(entry.path, start, end), entry.size)
        if chunk is not None:
            ranges.fetch(chunk[0], sum(chunk))
        yield pa.PythonFile(ranges, "r")

    def close(self) -> None:
        self._fs = None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call, within the deadline where the filesystem can be given one."""
        if self._fs.async_impl:
            kwargs["timeout"] = CALL_DEADLINE_S
        return getattr(self._fs, method)(*args, **kwargs)


class _Ranges(io.RawIOBase):
    """A file of which one range at a time is held; other reads fetch what they ask for."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._start = 0
        self._held = b""
        self._at = 0

    def fetch(self, start: int, end: int) -> None:
        """Hold bytes start .. end - 1, instead of what was held."""
        self._start, self._held = start, self._fetch(start, min(end, self._size))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        if not self._start <= self._at <= end <= self._start + len(self._held):
            self.fetch(self._at, end)
        data = self._held[self._at - self._start : end - self._start]
        self._at += len(data)
        return data


def _is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


# --- whose fault ------------------------------------------------------------------------------------------------------

_REMOTE_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs", "asyncio")
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
)


@contextmanager
def access(source: str, path: str) -> Generator[None]:
    """Turn what a filesystem raises into a `DataAccessError`; errors of our own pass."""
    try:
        yield
    except FileNotFoundError as e:
        raise SourceMissingError(
            f"{path} is not there; check the URL, and that the data was prepared", source=source, path=path
        ) from e
    except PermissionError as e:
        raise SourceDeniedError(
            f"no permission to read {path} ({e}); check the keys, and what they may read",
            source=source,
            path=path,
        ) from e
    except OSError as e:
        raise _unreachable(source, path, e) from e
    except Exception as e:
        if type(e).__name__ in _NO_CREDENTIALS:
            raise SourceDeniedError(
                f"no keys to read {path} with ({e}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                source=source,
                path=path,
            ) from e
        if type(e).__module__.split(".")[0] in _REMOTE_LIBRARIES:
            raise _unreachable(source, path, e) from e
        raise


def _unreachable(source: str, path: str, e: Exception) -> SourceUnreachableError:
    return SourceUnreachableError(
        f"{path} cannot be reached ({type(e).__name__}: {e}); this says nothing about the data: check network and endpoint, "
        f"then try again",
        source=source,
        path=path,
    )


@contextmanager
def decoding(source: str, path: str) -> Generator[None]:
    """Turn what pyarrow raises about the content into a `DamagedFileError`, and what the disk raises into a `DataAccessError`."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as e:
        if isinstance(e, OSError) and e.errno is not None:  # the operating system's word, not the decoder's
            raise _unreachable(source, path, e) from e
        raise DamagedFileError(
            f"{path} is damaged ({e}); write it again, or take it out of the source", source=source, path=path
        ) from e

"""Everything the loader refuses, and why.

Three roots below `LoaderError`. `LoaderUsageError`: the caller's to mend (a mixture, a packing, a cursor that does not fit).
`SourceError`: what was found where the data should be; its leaves tell apart data that is bad (`BadDataError`: no retry
helps, and it stands in the data) from trouble on the way to it (`DataAccessError`), which is never taken for bad data. What
is neither is a bug of ours and surfaces as it is.
"""

from __future__ import annotations


class LoaderError(Exception):
    """Root of the loader's own errors. The message says what, where, and what to do."""


# --- the caller's mistake ---------------------------------------------------------------------------------------------


class LoaderUsageError(LoaderError, ValueError):
    """The caller asked for something that cannot be."""


class MixtureError(LoaderUsageError):
    """A source or a mixture makes no sense: an empty or double name, a weight below zero, nothing to draw from."""


class PackError(LoaderUsageError):
    """The packing makes no sense, or does not fit the number of ranks."""


class LoaderClosedError(LoaderUsageError):
    """The loader was closed and then asked for a batch."""


class CursorError(LoaderUsageError):
    """Base: a cursor that cannot be resumed from."""


class CursorFormatError(CursorError):
    """Not a cursor, a damaged one, or one of a later version of the loader."""


class CursorMismatchError(CursorError):
    """The cursor belongs to other data or other settings.

    Attributes:
        differences: one line each: what the cursor knows, and what is there now.
    """

    def __init__(self, differences: tuple[str, ...]) -> None:
        self.differences = differences
        super().__init__(
            "the cursor belongs to other data or settings, and resuming would skip or repeat samples: "
            + "; ".join(differences)
            + ". Restore what the cursor was taken with, or start a new run"
        )


# --- what was found where the data should be --------------------------------------------------------------------------


class SourceError(LoaderError):
    """Base: a source cannot be read. `source` names it; `path` is the file or pattern."""

    def __init__(self, message: str, *, source: str, path: str) -> None:
        self.source = source
        self.path = path
        super().__init__(f"source {source!r}: {message}")


class DataAccessError(SourceError):
    """Base: trouble on the way to the data. Says nothing about the data itself."""


class SourceMissingError(DataAccessError):
    """No file is there (any more), or none matches the pattern."""


class SourceDeniedError(DataAccessError):
    """No permission, wrong keys, or no keys: the operator's to mend, no retry helps."""


class SourceUnreachableError(DataAccessError):
    """No answer, or an answer that is no answer. Worth a retry."""


class BadDataError(SourceError):
    """Base: the data is there and is bad."""


class DuplicateFileError(BadDataError):
    """Two files of one source have the same name; a sample's id could not tell them apart."""


class NotParquetError(BadDataError):
    """The file is something else."""


class TruncatedFileError(BadDataError):
    """The file begins as Parquet but its end, where the footer should be, is missing."""


class DamagedFileError(BadDataError):
    """The file is Parquet, and a footer, a page or a checksum in it is wrong."""


class ChangedFileError(BadDataError):
    """The file is no longer what it was when this loader opened the source."""


class ColumnMissingError(BadDataError):
    """The file has no column of that name."""


class ColumnTypeError(BadDataError):
    """The column holds neither text nor bytes."""


class BadSampleError(BadDataError):
    """Base: one row is bad. `sample_id` names it."""

    def __init__(self, message: str, *, sample_id: str, source: str, path: str) -> None:
        self.sample_id = sample_id
        super().__init__(message, source=source, path=path)


class SampleMissingError(BadSampleError):
    """The row holds null instead of text."""


class SampleTooLongError(BadSampleError):
    """The sample has more tokens than a sequence holds."""

    def __init__(self, *, sample_id: str, tokens: int, seq_len: int, source: str, path: str) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        super().__init__(
            f"sample {sample_id} has {tokens} tokens and a sequence holds {seq_len}; samples are kept whole: "
            f"cut it when preparing the data, or take a larger seq_len",
            sample_id=sample_id,
            source=source,
            path=path,
        )

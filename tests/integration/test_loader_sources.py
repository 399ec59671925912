"""What the loader makes of the files it finds: on disk, behind fsspec, on a real S3 server; good ones and bad ones."""

import os
import random
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from surefoot.loader import (
    BadDataError,
    DataAccessError,
    LoaderError,
    Mixture,
    Pack,
    Source,
    plan,
)
from surefoot.loader import source as source_module
from surefoot.loader.errors import (
    ChangedFileError,
    ColumnMissingError,
    ColumnTypeError,
    DamagedFileError,
    DuplicateFileError,
    MixtureError,
    NotParquetError,
    SampleMissingError,
    SourceDeniedError,
    SourceMissingError,
    SourceUnreachableError,
    TruncatedFileError,
)
from surefoot.loader.reader import SampleReader
from surefoot.loader.source import ParquetSource, window_blocks

PACK = Pack(seq_len=64, step_tokens=512)


def write(path: Path, texts: Any, group_rows: int = 10, column: str = "text", **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=group_rows, **options
    )
    return path


def texts(rows: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [f"{row} " + "y" * rng.randint(0, 40) for row in range(rows)]


def ids(url: str | Path, steps: int = 5, **options: Any) -> list[tuple[str, ...]]:
    mix = Mixture([Source("s", str(url), **options)], seed=3)
    return [step.sample_ids for step in plan(mix, PACK, steps)]


# --- what counts as the files of a source -----------------------------------------------------------------------------


def test_a_folder_a_pattern_and_a_file_url_name_the_same_files(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.parquet", texts(40))
    (tmp_path / "notes.txt").write_text("not data")
    expected = ids(tmp_path)
    assert (
        ids(tmp_path / "*.parquet") == ids(f"file://{tmp_path}/*.parquet") == ids(f"{tmp_path}/") == expected
    )
    assert {sample_id.split(":")[2] for step in expected for sample_id in step} == {
        "a.parquet",
        "b.parquet",
        "c.parquet",
    }


def test_two_files_of_the_same_name_are_refused(tmp_path):
    write(tmp_path / "x/part-0.parquet", texts(5))
    write(tmp_path / "y/part-0.parquet", texts(5))
    with pytest.raises(
        DuplicateFileError, match=r"x/part-0.parquet and .*y/part-0.parquet have the same file name"
    ):
        ids(tmp_path / "*/*.parquet")


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column_reads_the_same(tmp_path, kind):
    write(tmp_path / "plain/p.parquet", texts(30))
    write(tmp_path / "other/p.parquet", pa.array(texts(30)).cast(kind))
    assert ids(tmp_path / "other") == ids(tmp_path / "plain")


def test_a_row_group_read_in_slices_holds_the_same_rows(tmp_path):
    path = write(tmp_path / "p.parquet", texts(100), group_rows=100)
    opened = ParquetSource.open(Source("s", str(path), block_rows=30))
    whole = opened.read_group(0)
    slices = list(opened.stream_group(0))
    assert [len(block) for block in slices] == [30, 30, 30, 10]
    rows = [block.tokens(row).tobytes() for block in slices for row in range(len(block))]
    assert (
        rows == [whole.tokens(row).tobytes() for row in range(100)] == [text.encode() for text in texts(100)]
    )
    opened.close()


@pytest.mark.parametrize("block_rows", [7, 100])
def test_samples_can_be_asked_for_in_any_order(tmp_path, block_rows):
    write(tmp_path / "p.parquet", texts(60), group_rows=30)

    def reader():
        return SampleReader(
            ParquetSource.open(Source("s", str(tmp_path), block_rows=block_rows, window_blocks=2)), seed=1
        )

    forward, anyhow = reader(), reader()
    expected = [(sample.id, sample.data.tobytes()) for sample in map(forward.sample, range(150))]
    numbers = list(range(150)) * 2
    random.Random(1).shuffle(numbers)
    for number in numbers:
        sample = anyhow.sample(number)
        assert (sample.id, sample.data.tobytes()) == expected[number]


def test_a_large_row_group_is_read_in_bounded_memory(tmp_path):
    """As in LDR-29, scaled: 64 MB in one row group."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(32, 127, 8192, np.uint8).tobytes() for _ in range(8192)]
    path = write(tmp_path / "p.parquet", rows, group_rows=8192, use_dictionary=False)
    rows.clear()
    opened = ParquetSource.open(Source("s", str(path), block_rows=64))
    before, peak, count = pa.total_allocated_bytes(), 0, 0
    for block in opened.stream_group(0):
        peak = max(peak, pa.total_allocated_bytes() - before)
        count += len(block)
    assert count == 8192
    assert peak < 20 << 20


def test_the_window_follows_from_the_memory_it_may_take():
    rows, sizes = np.array([100, 1000, 0]), np.array([1000, 50_000, 0])
    assert window_blocks(rows, sizes, block_rows=1000, window_bytes=500_000) == 10
    assert window_blocks(rows, sizes, block_rows=100, window_bytes=500_000) == 100
    assert window_blocks(rows, sizes, block_rows=1000, window_bytes=1) == 1


# --- bad data ---------------------------------------------------------------------------------------------------------


def refused(error: type[LoaderError], url: str | Path, *says: str, **options: Any) -> LoaderError:
    with pytest.raises(error) as e:
        ids(url, **options)
    for part in says:
        assert part in str(e.value)
    return e.value


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write(tmp_path / "a.parquet", texts(5), column="body")
    e = refused(ColumnMissingError, tmp_path, "source 's'", "a.parquet has no column 'text'", "'id', 'body'")
    assert isinstance(e, BadDataError)


def test_a_column_of_another_type_is_refused_even_if_only_one_file_has_it(tmp_path):
    write(tmp_path / "a.parquet", texts(5))
    write(tmp_path / "b.parquet", list(range(5)))
    refused(ColumnTypeError, tmp_path, "b.parquet: column 'text' is of type int64; text or bytes are needed")


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("text\nhello\nworld\n")
    refused(NotParquetError, tmp_path, "a.parquet is not a Parquet file (it begins with b'text')")
    (tmp_path / "a.parquet").write_bytes(b"")
    refused(NotParquetError, tmp_path, "is not a Parquet file")


def test_a_truncated_file_is_told_from_a_foreign_one(tmp_path):
    path = write(tmp_path / "a.parquet", texts(50))
    path.write_bytes(path.read_bytes()[:-9])
    refused(TruncatedFileError, tmp_path, "begins as a Parquet file, but its footer is missing")


def test_a_damaged_footer_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", texts(50))
    whole = bytearray(path.read_bytes())
    whole[-60:-20] = b"\xff" * 40
    path.write_bytes(whole)
    refused(DamagedFileError, tmp_path, "a.parquet is damaged")
    whole[-8:-4] = (10**9).to_bytes(4, "little")
    path.write_bytes(whole)
    refused(DamagedFileError, tmp_path, "its footer claims 1,000,000,008 bytes")


def test_a_page_with_a_wrong_checksum_is_refused(tmp_path):
    path = write(
        tmp_path / "a.parquet", texts(50), write_page_checksum=True, use_dictionary=False, compression="none"
    )
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"33 y") + 1] = ord("z")  # a byte of a row, not of the page's header
    path.write_bytes(whole)
    refused(DamagedFileError, tmp_path, "a.parquet is damaged", "CRC")


def test_a_null_row_is_named(tmp_path):
    write(tmp_path / "a.parquet", ["a", None, "b"])
    e = refused(SampleMissingError, tmp_path, "sample s:0:a.parquet:1 is null")
    assert isinstance(e, SampleMissingError)
    assert e.sample_id == "s:0:a.parquet:1"


def test_a_file_that_changes_under_a_running_loader_is_noticed(tmp_path):
    path = write(tmp_path / "a.parquet", texts(50))
    opened = ParquetSource.open(Source("s", str(tmp_path)))
    assert len(opened.read_group(0)) == 10
    same = path.read_bytes()
    path.unlink()
    path.write_bytes(same)
    assert len(opened.read_group(1)) == 10, "the same content again is no change"
    write(path, texts(50, seed=2))
    with pytest.raises(ChangedFileError, match="no longer the file it was"):
        opened.read_group(2)
    path.unlink()
    with pytest.raises(SourceMissingError, match=r"a.parquet is not there"):
        opened.read_group(2)


# --- trouble on the way to it -----------------------------------------------------------------------------------------


def test_files_that_are_not_there(tmp_path):
    e = refused(SourceMissingError, tmp_path / "*.parquet", "no file matches", "check the pattern")
    assert isinstance(e, DataAccessError)
    refused(SourceMissingError, tmp_path, "no file matches")
    refused(SourceMissingError, tmp_path / "a.parquet", "a.parquet is not there")


def test_a_url_without_a_filesystem_is_refused():
    refused(
        MixtureError, "nope://bucket/x", "source 's': no filesystem for the URL 'nope://bucket/x'", "nope"
    )


class Remote(MemoryFileSystem):
    """Files that are not on this machine: counts the ranges that are read, and fails when told to."""

    protocol = "remote"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    ranges: ClassVar[list[tuple[str, int, int]]] = []
    fails: ClassVar[dict[str, Exception]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("remote://").strip("/")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        self._maybe_fail("read")
        Remote.ranges.append((path, start, end))
        return super().cat_file(path, start, end)

    def glob(self, path: str, **kwargs: Any) -> Any:
        self._maybe_fail("list")
        return super().glob(path, **kwargs)

    def _maybe_fail(self, what: str) -> None:
        if what in Remote.fails:
            raise Remote.fails[what]


@pytest.fixture
def remote(tmp_path):
    """Four files of 10 row groups, here and under ``remote://data``; yields (folder, URL)."""
    fsspec.register_implementation("remote", Remote, clobber=True)
    Remote.store.clear()
    Remote.ranges.clear()
    Remote.fails.clear()
    for name in "abcd":
        path = write(tmp_path / f"{name}.parquet", texts(100, seed=ord(name)))
        Remote.store[f"/data/{path.name}"] = fsspec.implementations.memory.MemoryFile(
            Remote(), f"/data/{path.name}", path.read_bytes()
        )
    return tmp_path, "remote://data/*.parquet"


def test_remote_files_give_the_same_samples(remote):
    folder, url = remote
    assert ids(url, steps=30) == ids(folder, steps=30)
    assert ids(url, steps=30, block_rows=4) == ids(folder, steps=30, block_rows=4)


def test_only_footers_and_needed_row_groups_are_fetched(remote):
    """As in LDR-09: one request for each footer, then one for each row group that is opened, and none twice."""
    _, url = remote
    Remote.ranges.clear()
    opened = ParquetSource.open(Source("s", url))
    assert len(Remote.ranges) == 4
    Remote.ranges.clear()
    opened.read_group(17)
    footers = [r for r in Remote.ranges if r[1] == 0]
    groups = [r for r in Remote.ranges if r[1] != 0]
    assert (len(footers), len(groups)) == (1, 1)
    opened.read_group(18)
    assert len(Remote.ranges) == 3, "a footer just read is kept"


def test_a_large_remote_row_group_is_fetched_in_pieces(tmp_path, remote, monkeypatch):
    folder, _ = remote
    rng = np.random.default_rng(1)
    rows = [rng.integers(32, 127, 1000, np.uint8).tobytes() for _ in range(500)]
    path = write(
        folder / "big/big.parquet",
        rows,
        group_rows=500,
        use_dictionary=False,
        data_page_size=20_000,
        write_batch_size=5,
    )
    Remote.store["/data/big.parquet"] = fsspec.implementations.memory.MemoryFile(
        Remote(), "/data/big.parquet", path.read_bytes()
    )
    monkeypatch.setattr(source_module, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(source_module, "TAIL_BYTES", 1000)
    opened = ParquetSource.open(Source("s", "remote://data/big.parquet", block_rows=50))
    Remote.ranges.clear()
    read = [block.tokens(row).tobytes() for block in opened.stream_group(0) for row in range(len(block))]
    assert read == rows
    assert max(end - start for _, start, end in Remote.ranges) <= 75_000, "a piece and a page"
    assert sum(end - start for _, start, end in Remote.ranges) < 1.1 * path.stat().st_size


@pytest.mark.parametrize("what", ["list", "read"])
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (PermissionError("Access Denied"), SourceDeniedError, "no permission to read"),
        (OSError(113, "No route to host"), SourceUnreachableError, "says nothing about the data"),
        (TimeoutError("timed out"), SourceUnreachableError, "cannot be reached"),
        (ConnectionResetError("reset"), SourceUnreachableError, "cannot be reached"),
        (FileNotFoundError("gone"), SourceMissingError, "is not there"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_trouble_with_network_or_permissions_is_never_taken_for_bad_data(remote, what, fault, error, says):
    _, url = remote
    Remote.fails[what] = fault
    e = refused(error, url, "source 's'", says)
    assert isinstance(e, DataAccessError)
    assert not isinstance(e, BadDataError)


def test_trouble_while_decoding_is_trouble_all_the_same(remote):
    _, url = remote
    opened = ParquetSource.open(Source("s", url))
    opened.read_group(0)
    Remote.fails["read"] = ConnectionResetError("reset")
    with pytest.raises(SourceUnreachableError):
        opened.read_group(1)


# --- a real S3 server -------------------------------------------------------------------------------------------------


@pytest.fixture
def s3_data(s3_url, tmp_path):
    """Two files on the S3 server and here; returns (URL, folder)."""
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    for name in "ab":
        path = write(tmp_path / f"{name}.parquet", texts(200, seed=ord(name)))
        fs.pipe_file(f"{s3_url}/{path.name}", path.read_bytes())
    return s3_url, tmp_path


@pytest.mark.s3
@pytest.mark.slow
def test_s3_gives_the_same_samples(s3_data):
    url, folder = s3_data
    assert ids(f"{url}/*.parquet", steps=20) == ids(url, steps=20) == ids(folder, steps=20)


@pytest.mark.s3
@pytest.mark.slow
def test_s3_trouble_is_told_apart(s3_data, monkeypatch):
    url, _ = s3_data
    refused(SourceMissingError, f"{url}/*.pq", "no file matches")
    refused(SourceMissingError, "s3://no-such-bucket/a.parquet", "is not there")
    refused(SourceMissingError, "s3://no-such-bucket/*.parquet")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused(SourceDeniedError, f"{url}/*.parquet", "no permission to read", "check the keys")
    refused(SourceDeniedError, f"{url}/a.parquet", "no permission to read")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    refused(SourceUnreachableError, f"{url}/*.parquet", "cannot be reached", "check network and endpoint")


def test_reading_local_files_starts_no_thread(tmp_path):
    write(tmp_path / "a.parquet", texts(50))
    before = len(os.listdir("/proc/self/task"))
    ids(tmp_path, steps=5)
    assert len(os.listdir("/proc/self/task")) == before

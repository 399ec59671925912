"""Real text that every machine with Python has, as Parquet: ``prepare(folder)``.

Two sources. ``code``: the standard library's Python sources. ``prose``: its docstrings (read with `ast`, nothing is imported),
pydoc's topics, and the licence texts of Python and of the packages installed beside it. The text is cut into rows of at most
256 bytes and written as a few shards of several row groups each::

    folder/code/code-00000.parquet …    folder/prose/prose-00000.parquet …    folder/prepared.json

Columns: ``text``, ``file`` (where it is from), ``line`` (its first line there, from 1). For one environment the rows are always
the same. A folder that is ready is used as it is; it appears in one rename, so a half-written one is never seen.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FORMAT = 1
"""Rises when the same environment would give other files."""
ROW_BYTES_MAX = 256
SHARDS = 4
ROW_GROUP_ROWS = 1000
MARKER = "prepared.json"

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idlelib",
        "lib2to3",  # and its broken test files
        "pydoc_data",  # is prose
        "site-packages",
        "test",  # larger than all the rest
        "tests",
    }
)
LICENCE_WORDS = ("license", "licence", "copying", "notice")

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of all is done (0 to 1)."""


class PrepareError(Exception):
    """The text cannot be prepared; the message says what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text, whole: where it is from, and the line there that it begins at."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the Parquet files."""

    text: str
    file: str
    line: int


def prepare(folder: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Make sure that `folder` holds the text, and return it as an absolute path. Takes a few seconds the first time.

    Raises:
        PrepareError: the folder holds something else or cannot be written, or this Python comes without its sources.
    """
    target = Path(os.path.abspath(folder))
    fingerprint = {"format": FORMAT, "python": platform.python_version()}
    if is_prepared(target, fingerprint):
        return target
    _check_target(target)
    report = progress or _no_report
    rows = _collect(report)
    report("writing", 0.9)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
            build = Path(beside) / "new"
            _write_all(build, rows, fingerprint)
            _move_in(build, target, fingerprint)
    except OSError as e:
        raise _cannot_write(target, e) from e
    report("ready", 1.0)
    return target


def is_prepared(folder: Path, fingerprint: dict[str, Any]) -> bool:
    """Whether the folder holds all files, with the sizes its marker gives, for this fingerprint."""
    marker = _marker(folder)
    if marker is None or marker.get("fingerprint") != fingerprint:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in marker["files"].items()
    )


def cut(text: str, limit: int = ROW_BYTES_MAX) -> Iterator[tuple[int, str]]:
    """Cut text into rows of at most `limit` bytes: behind a line's end where there is one, else between two characters.

    Rows of nothing but white space are left out.

    Args:
        limit: 4 or more, what the longest character takes.

    Yields:
        The line (from 0) that the row begins in, and the row.
    """
    if limit < 4:
        raise ValueError(f"a row of {limit} bytes cannot hold every character; 4 is the least")
    data = text.encode("utf-8", "replace")
    start = line = 0
    while start < len(data):
        end = min(start + limit, len(data))
        if end < len(data):
            newline = data.rfind(b"\n", start, end)
            if newline >= 0:
                end = newline + 1
            else:
                while data[end] & 0xC0 == 0x80:  # within a character
                    end -= 1
        row = data[start:end]
        if row.strip():
            yield line, row.decode()
        line += row.count(b"\n")
        start = end


def code_texts(stdlib: Path) -> Iterator[Text]:
    """The sources of the standard library, sorted by path. What Python itself cannot decode is left out."""
    for path in _python_files(stdlib):
        text = _read_source(path)
        if text is not None:
            yield Text(path.relative_to(stdlib).as_posix(), 1, text)


def docstrings(source: Text) -> Iterator[Text]:
    """The docstrings in a source: of the module, then of its classes and functions, outer ones first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old sources
            tree = ast.parse(source.text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Text(source.file, node.body[0].lineno, text)


def topic_texts() -> Iterator[Text]:
    """What ``help()`` says of the language."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield Text(f"pydoc_data/topics/{name}", 1, text)


def licence_texts(stdlib: Path, packages: list[Path]) -> Iterator[Text]:
    """Licences of Python, of this project and of the installed packages; the same text once only."""
    candidates = [
        *_licences_in(stdlib, "python"),
        *_licences_in(Path(sys.base_prefix), "python"),
        *_licences_in(Path(__file__).resolve().parents[1], "surefoot"),
        *(
            (path.relative_to(folder).as_posix(), path)
            for folder in packages
            for info in sorted(folder.glob("*.dist-info"))
            for path in sorted(info.rglob("*"))
            if path.is_file() and _is_licence(path)
        ),
    ]
    seen: set[bytes] = set()
    for name, path in candidates:
        try:
            data = path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(data).digest()
        if digest not in seen:
            seen.add(digest)
            yield Text(name, 1, text)


def _no_report(what: str, done: float) -> None:
    """Progress that nobody asked for."""


def _collect(progress: Progress) -> dict[str, list[Row]]:
    """The rows of each source."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    packages = sorted({Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
    progress("reading the standard library", 0.0)
    sources = list(code_texts(stdlib))
    if not sources:
        raise PrepareError(
            f"this Python has no library sources in {stdlib}; use one that comes with its .py files"
        )
    progress("cutting its sources into rows", 0.2)
    code = _rows(sources)
    prose: list[Text] = []
    for count, source in enumerate(sources):
        if count % 20 == 0:
            progress("reading its docstrings", 0.35 + 0.5 * count / len(sources))
        prose.extend(docstrings(source))
    progress("reading topics and licences", 0.85)
    prose.extend(topic_texts())
    prose.extend(licence_texts(stdlib, packages))
    return {"code": code, "prose": _rows(prose)}


def _rows(texts: list[Text]) -> list[Row]:
    return [Row(row, text.file, text.line + line) for text in texts for line, row in cut(text.text)]


def _write_all(folder: Path, rows: dict[str, list[Row]], fingerprint: dict[str, Any]) -> None:
    """Write a whole folder, the marker last."""
    files: dict[str, int] = {}
    for source, part in rows.items():
        (folder / source).mkdir(parents=True)
        files |= _write_shards(folder, source, part)
    (folder / MARKER).write_text(json.dumps({"fingerprint": fingerprint, "files": files}, indent=1) + "\n")


def _write_shards(folder: Path, source: str, rows: list[Row]) -> dict[str, int]:
    """Write the rows of a source; returns the files' sizes by name."""
    sizes: dict[str, int] = {}
    for shard in range(SHARDS):
        part = rows[shard * len(rows) // SHARDS : (shard + 1) * len(rows) // SHARDS]
        table = pa.table(
            {
                "text": pa.array([row.text for row in part], pa.string()),
                "file": pa.array([row.file for row in part], pa.string()),
                "line": pa.array([row.line for row in part], pa.int32()),
            }
        )
        name = f"{source}/{source}-{shard:05d}.parquet"
        pq.write_table(
            table,
            folder / name,
            row_group_size=ROW_GROUP_ROWS,
            compression="zstd",
            write_page_checksum=True,
        )
        sizes[name] = (folder / name).stat().st_size
    return sizes


def _move_in(build: Path, target: Path, fingerprint: dict[str, Any]) -> None:
    """Put the finished folder in its place. Another process may have done so meanwhile: then its folder is as good."""
    for _ in range(3):
        try:
            os.rename(build, target)
            return
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_prepared(target, fingerprint):
            return
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
            os.rename(target, Path(aside) / "outdated")
    raise PrepareError(f"{target} is being prepared by others at the same time, again and again; try again")


def _check_target(target: Path) -> None:
    """Refuse, before the work is done, what holds something else or cannot be made."""
    try:
        if target.is_dir() and _marker(target) is None and any(target.iterdir()):
            raise PrepareError(
                f"{target} holds something else and is left alone; name a new or an empty folder"
            )
        if target.exists() and not target.is_dir():
            raise PrepareError(f"{target} is a file; name a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _cannot_write(target, e) from e


def _marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and isinstance(marker.get("files"), dict) else None


def _cannot_write(target: Path, e: OSError) -> PrepareError:
    return PrepareError(
        f"cannot prepare the text in {target}: {e.strerror or e}; name a folder that you may write, with 20 MB free"
    )


def _python_files(stdlib: Path) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(stdlib):
        folders[:] = [
            name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        found.extend(Path(root, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _read_source(path: Path) -> str | None:
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _licences_in(folder: Path, name: str) -> list[tuple[str, Path]]:
    """The licence files that lie in a folder itself, named after it."""
    if not folder.is_dir():
        return []
    return [
        (f"{name}/{path.name}", path)
        for path in sorted(folder.iterdir())
        if path.is_file() and _is_licence(path)
    ]


def _is_licence(path: Path) -> bool:
    return path.suffix in ("", ".txt", ".md", ".rst") and any(
        word in path.name.lower() for word in LICENCE_WORDS
    )

"""The pieces of a large checkpoint as a Parquet table beside its manifest.

A piece is about 95 bytes of JSON: a thousand ranks with a thousand shards each make a manifest of 100 MB, which every reader would
have to fetch and parse. From TABLE_PIECES_MIN pieces on they go into a table beside the manifest (one row a piece, a column for
each number), which the manifest names with size and checksum. Nothing else changes: whoever reads a manifest gets it whole.

Columns: `object` (number of the data object in the manifest), `name`, `at`, `dims`, then `offset0`, `extent0`, `offset1`, … as many
as any piece has dimensions; 0 where a piece has fewer.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.manifest import DataObject, Manifest, Piece, TableRef, table_key

TABLE_PIECES_MIN = 20_000
"""About 2 MB of JSON: below, a second object costs more than it saves."""
TABLE_PIECES_MAX = 2**23
"""More rows than this are refused unread: columns of one number repeated are a few bytes,
however long they are, and a row becomes some 250 bytes here. Eight times what 1,024 ranks with 1,024 tensors write."""
TABLE_DIMS_MAX = 64


def needs_table(manifest: Manifest) -> bool:
    """Has it too many pieces for JSON?"""
    return sum(len(o.pieces) for o in manifest.objects) >= TABLE_PIECES_MIN


def with_table(manifest: Manifest) -> tuple[Manifest, bytes]:
    """The manifest that refers to its pieces' table, and the table. The manifest still has its pieces: see `stored_form`."""
    data = encode_table(manifest.objects)
    ref = TableRef(
        key=table_key(manifest.generation, manifest.step, manifest.attempt),
        size=len(data),
        checksum=xxhash.xxh3_64_hexdigest(data),
    )
    return msgspec.structs.replace(manifest, table=ref), data


def stored_form(manifest: Manifest) -> Manifest:
    """What is stored as the manifest: without the pieces where there is a table of them."""
    if manifest.table is None:
        return manifest
    return msgspec.structs.replace(
        manifest, objects=tuple(msgspec.structs.replace(o, pieces=()) for o in manifest.objects)
    )


def require_table_key(manifest: Manifest, key: str) -> None:
    """Before anything is read from where a manifest says. Raises DamagedError: it lies elsewhere than under its own attempt."""
    ref = manifest.table
    try:
        right = ref is None or ref.key == table_key(manifest.generation, manifest.step, manifest.attempt)
    except ValueError:
        right = False
    if not right:
        raise DamagedError(f"{key} is damaged: its table of pieces lies outside its own attempt", key=key)


def require_table(data: bytes, ref: TableRef) -> None:
    """Raises DamagedError where it is not the one that was committed."""
    if len(data) != ref.size or xxhash.xxh3_64_hexdigest(data) != ref.checksum:
        raise DamagedError(f"{ref.key} is not what its manifest committed; load an older step", key=ref.key)


def filled_from_table(manifest: Manifest, data: bytes) -> Manifest:
    """The manifest with its pieces.

    Raises DamagedError naming the table, where it is not the one that was committed, or no such table.
    """
    ref = manifest.table
    assert ref is not None, "the caller has read it"
    require_table(data, ref)
    try:
        pieces = _decode_table(data, len(manifest.objects))
    except Exception as e:  # whatever pyarrow or a wrong column makes of it
        raise DamagedError(f"{ref.key} is no table of pieces: {e}; load an older step", key=ref.key) from e
    objects = [
        msgspec.structs.replace(o, pieces=tuple(mine))
        for o, mine in zip(manifest.objects, pieces, strict=True)
    ]
    return msgspec.structs.replace(manifest, objects=tuple(objects))


def encode_table(objects: Sequence[DataObject]) -> bytes:
    """The same objects always give the same bytes (by the same version of pyarrow)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pieces = [p for o in objects for p in o.pieces]
    dims = np.array([len(p.extent) for p in pieces], np.int8)
    columns: dict[str, Any] = {
        "object": np.repeat(np.arange(len(objects), dtype=np.int32), [len(o.pieces) for o in objects]),
        "name": pa.array([p.name for p in pieces], pa.string()).dictionary_encode(),
        "at": np.array([p.at for p in pieces], np.int64),
        "dims": dims,
    }
    for k in range(int(dims.max(initial=0))):
        columns[f"offset{k}"] = np.array([p.offset[k] if k < len(p.offset) else 0 for p in pieces], np.int64)
        columns[f"extent{k}"] = np.array([p.extent[k] if k < len(p.extent) else 0 for p in pieces], np.int64)
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def _decode_table(data: bytes, objects: int) -> list[list[Piece]]:
    """The pieces of each object."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data))
    rows = file.metadata.num_rows
    dims_max = (file.metadata.num_columns - 4) // 2
    if rows > TABLE_PIECES_MAX or dims_max > TABLE_DIMS_MAX:
        raise ValueError(f"{rows} rows of {dims_max} dimensions are more than any checkpoint has")
    table = file.read(use_threads=False)

    def numbers(column: str) -> np.ndarray:
        found = table.column(column).to_numpy()
        if found.dtype.kind != "i" or (len(found) and found.min() < 0):
            raise ValueError(f"column {column} holds other than whole numbers from 0 on")
        return found

    names = table.column("name").combine_chunks().cast(pa.dictionary(pa.int32(), pa.string()))
    words: list[str] = names.dictionary.to_pylist()
    name = [words[i] for i in names.indices.to_pylist()]
    whose, at, dims = numbers("object"), numbers("at").tolist(), numbers("dims")
    if len(whose) and (whose.max() >= objects or dims.max() > dims_max):
        raise ValueError("a piece lies in no object, or has more dimensions than columns")
    offset, extent = (
        np.column_stack([numbers(f"{word}{k}") for k in range(dims_max)] or [np.zeros((rows, 0), np.int64)])
        for word in ("offset", "extent")
    )
    pieces = [
        Piece(name=n, at=a, offset=tuple(o[:d]), extent=tuple(e[:d]))
        for n, a, d, o, e in zip(name, at, dims.tolist(), offset.tolist(), extent.tolist(), strict=True)
    ]
    if (whose[1:] < whose[:-1]).any():
        raise ValueError("the objects of its pieces are not in order")
    edges = np.searchsorted(whose, np.arange(objects + 1)).tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(edges)]

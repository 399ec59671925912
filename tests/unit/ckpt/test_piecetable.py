"""The table of pieces beside a large manifest."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from ckpt_images import arrays, make_images
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ckpt import tiers
from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.format import piecetable
from surefoot.ckpt.format.piecetable import encode_table, filled_from_table, stored_form, with_table
from surefoot.ckpt.loading.restore import read_manifest
from surefoot.ckpt.manifest import (
    DataObject,
    Manifest,
    Piece,
    TableRef,
    decode,
    encode,
    manifest_key,
    table_key,
)
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import MemoryObjectStore

TABLE = table_key(1, 20, "a")


def save(store: MemoryObjectStore) -> Manifest:
    create_record(store, Record(generation=1, start=StartRef(), reason="test", created_by="t"))
    for writer, image in enumerate(make_images(arrays(), 2)):
        tiers.upload_images(store, [image], generation=1, step=20, attempt="a", writer=writer, deadline_s=10)
    outcome = tiers.commit(store, generation=1, step=20, attempt="a", writers=2, deadline_s=5, facts={})
    assert isinstance(outcome, tiers.Committed)
    return outcome.manifest


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest checkpoint has a table."""
    monkeypatch.setattr(piecetable, "TABLE_PIECES_MIN", 1)


def test_a_small_checkpoint_has_none() -> None:
    store = MemoryObjectStore()
    assert save(store).table is None
    assert TABLE not in {o.key for o in store.list("gen-0001/")}


@pytest.mark.usefixtures("always")
def test_whoever_reads_the_manifest_gets_it_whole() -> None:
    store = MemoryObjectStore()
    written = save(store)
    assert read_manifest(store, 1, 20) == written
    assert sum(len(o.pieces) for o in written.objects) == 5
    stored = decode(Manifest, store.read(manifest_key(1, 20)), key="m")
    assert stored.table is not None
    assert all(not o.pieces for o in stored.objects), "they are stored once"


@pytest.mark.usefixtures("always")
def test_a_table_that_was_changed_or_lost_is_named() -> None:
    store = MemoryObjectStore()
    save(store)
    data = bytearray(store.read(TABLE))
    store.delete(TABLE)
    with pytest.raises(DamagedError, match=r"pieces.parquet is missing") as caught:
        read_manifest(store, 1, 20)
    assert caught.value.key == TABLE
    data[len(data) // 2] ^= 1
    store.create(TABLE, bytes(data))
    with pytest.raises(DamagedError, match=r"pieces.parquet is not what its manifest committed"):
        read_manifest(store, 1, 20)


def test_a_large_one_is_small() -> None:
    """256 ranks with 256 shards each: 5 MB of JSON."""
    objects = [
        DataObject(
            key=f"r{rank}",
            size=2**20,
            data_start=0,
            data_nbytes=2**20,
            block_nbytes=2**22,
            pieces=tuple(
                Piece(name=f"layers.{i}.weight", offset=(rank * 4, 0), extent=(4, 256), at=4096 * i)
                for i in range(256)
            ),
        )
        for rank in range(256)
    ]
    manifest, table = with_table(
        Manifest(generation=1, step=20, attempt="a", world_size=256, objects=tuple(objects))
    )
    stored = encode(stored_form(manifest))
    assert len(encode(manifest)) > 4_000_000
    assert len(stored) + len(table) < 100_000
    assert filled_from_table(decode(Manifest, stored, key="m"), table) == manifest


pieces = st.builds(
    lambda name, sides, at: Piece(
        name=name, offset=tuple(o for o, _ in sides), extent=tuple(e for _, e in sides), at=at
    ),
    st.text(max_size=4),
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=4),
    st.integers(0, 2**62),
)


@given(st.lists(st.lists(pieces, max_size=4), max_size=4))
def test_any_pieces_come_back(lists: list[list[Piece]]) -> None:
    """Objects without pieces, names of any letters, dimensions mixed, the largest numbers."""
    objects = tuple(
        DataObject(key=str(i), size=0, data_start=0, data_nbytes=0, block_nbytes=1, pieces=tuple(ps))
        for i, ps in enumerate(lists)
    )
    manifest, table = with_table(Manifest(generation=1, step=20, attempt="a", world_size=1, objects=objects))
    assert filled_from_table(stored_form(manifest), table) == manifest
    assert encode_table(objects) == table, "an upload that is tried again finds the same bytes"


def table_of(**changes: Any) -> bytes:
    columns: dict[str, Any] = {
        "object": np.array([0, 1], np.int32),
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "at": np.array([0, 4]),
        "dims": np.array([1, 1], np.int8),
        "offset0": np.array([0, 0]),
        "extent0": np.array([1, 1]),
    }
    out = io.BytesIO()
    pq.write_table(pa.table({k: v for k, v in (columns | changes).items() if v is not None}), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"PAR1", "no table", id="no parquet"),
        pytest.param(table_of(at=None), "at", id="no such column"),
        pytest.param(table_of(at=np.array([0, -4])), "from 0 on", id="negative"),
        pytest.param(table_of(at=np.array([0.0, 4.0])), "from 0 on", id="fractions"),
        pytest.param(table_of(object=np.array([0, 2], np.int32)), "in no object", id="object"),
        pytest.param(table_of(object=np.array([1, 0], np.int32)), "not in order", id="order"),
        pytest.param(table_of(dims=np.array([1, 9], np.int8)), "more dimensions", id="dims"),
        pytest.param(table_of(**{f"offset{k}": np.array([0, 0]) for k in range(1, 200)}), "are more than", id="columns"),
    ],
)  # fmt: skip
def test_a_forged_table_is_refused(data: bytes, words: str) -> None:
    objects = tuple(
        DataObject(key=str(i), size=0, data_start=0, data_nbytes=0, block_nbytes=1) for i in range(2)
    )
    ref = TableRef(key=TABLE, size=len(data), checksum=xxhash.xxh3_64_hexdigest(data))
    manifest = Manifest(generation=1, step=20, attempt="a", world_size=1, objects=objects, table=ref)
    with pytest.raises(DamagedError, match=words) as caught:
        filled_from_table(manifest, data)
    assert caught.value.key == TABLE


def test_absurdly_many_rows_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one number repeated are small, however long."""
    monkeypatch.setattr(piecetable, "TABLE_PIECES_MAX", 100_000)
    ones = np.zeros(200_000, np.int64)
    data = table_of(
        object=ones,
        name=pa.array(["a"] * len(ones)).dictionary_encode(),
        at=ones,
        dims=ones,
        offset0=ones,
        extent0=ones,
    )
    assert len(data) < 10_000
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(DamagedError, match="200000 rows"):
        filled_from_table(
            msgspec.structs.replace(
                Manifest(generation=1, step=20, attempt="a", world_size=1),
                table=TableRef(key=TABLE, size=len(data), checksum=xxhash.xxh3_64_hexdigest(data)),
            ),
            data,
        )

"""``verify`` of what is damaged: how much was compared, where the damage is, and what lies in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ckpt_images import make_images

from surefoot.ckpt import tiers
from surefoot.ckpt.loading.restore import read_manifest
from surefoot.ckpt.manifest import Manifest
from surefoot.ckpt.record import Record, StartRef, create_record
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools.verifying import Report, verify

BLOCK = 64


@pytest.fixture
def saved(tmp_path: Path) -> Manifest:
    """One object: large.a (160 bytes), large.b (160), and ten small ones of 4 bytes; six blocks."""
    held = {f"large.{n}": np.arange(20, dtype=np.float64) for n in "ab"}
    held |= {f"small.{n}": np.arange(1, dtype=np.float32) for n in "cdefghijkl"}
    store = open_store(tmp_path)
    create_record(store, Record(generation=1, start=StartRef(), reason="start", created_by="t"))
    images = make_images(held, block_nbytes=BLOCK)
    tiers.upload_images(store, images, generation=1, step=20, attempt="a", writer=0, deadline_s=10)
    done = tiers.commit(store, generation=1, step=20, attempt="a", writers=1, deadline_s=5, facts={})
    assert isinstance(done, tiers.Committed)
    return read_manifest(store, 1, 20)


def spoiled(root: Path, manifest: Manifest, spoil: Callable[[bytearray], None]) -> Report:
    path = root / manifest.objects[0].key
    data = bytearray(path.read_bytes())
    spoil(data)
    path.write_bytes(data)
    return verify(root)


def flip(at: int) -> Callable[[bytearray], None]:
    def spoil(data: bytearray) -> None:
        data[at] ^= 1

    return spoil


def test_a_damaged_block_is_named_with_what_lies_in_it(tmp_path: Path, saved: Manifest) -> None:
    o = saved.objects[0]
    report = spoiled(tmp_path, saved, flip(o.data_start + BLOCK + 5))
    (damage,) = report.damage
    assert not report.ok
    assert (report.nbytes, report.total_nbytes, report.objects) == (o.data_nbytes, o.data_nbytes, 1)
    assert (damage.key, damage.at, damage.nbytes) == (o.key, o.data_start + BLOCK, BLOCK)
    assert damage.tensors == ("large.a",)
    assert report.problems == (str(damage),)
    assert "block 1 (bytes" in report.problems[0]
    assert report.problems[0].endswith("in it lie large.a")


def test_neighbouring_blocks_are_one_stretch_and_many_names_are_counted(
    tmp_path: Path, saved: Manifest
) -> None:
    o = saved.objects[0]
    blocks = -(-o.data_nbytes // BLOCK)

    def spoil(data: bytearray) -> None:
        for b in (0, blocks - 2, blocks - 1):
            data[o.data_start + b * BLOCK] ^= 1

    report = spoiled(tmp_path, saved, spoil)
    assert [d.nbytes for d in report.damage] == [BLOCK, o.data_nbytes - (blocks - 2) * BLOCK]
    assert report.damaged_nbytes == BLOCK + report.damage[1].nbytes
    assert report.nbytes == o.data_nbytes
    assert len(report.damage[1].tensors) > 6
    assert f"blocks {blocks - 2} to {blocks - 1} " in report.problems[1]
    assert f" and {len(report.damage[1].tensors) - 4} more" in report.problems[1]


def test_what_is_cut_off_is_said_and_the_rest_compared(tmp_path: Path, saved: Manifest) -> None:
    o = saved.objects[0]

    def cut(data: bytearray) -> None:
        del data[o.data_start + 2 * BLOCK + 10 :]

    report = spoiled(tmp_path, saved, cut)
    assert report.nbytes == 2 * BLOCK
    (damage,) = report.damage
    assert f"has {o.data_start + 2 * BLOCK + 10} bytes instead of {o.size}" in damage.what
    assert (damage.at, damage.nbytes) == (o.data_start + 2 * BLOCK, o.data_nbytes - 2 * BLOCK)
    assert damage.tensors[:2] == ("large.a", "large.b")


def test_what_a_load_would_refuse_is_not_sound(tmp_path: Path, saved: Manifest) -> None:
    """Bytes too many: no checksum covers them, and a load asks for the size."""
    report = spoiled(tmp_path, saved, lambda data: data.extend(b"more"))
    assert [d.what for d in report.damage] == [
        f"has {saved.objects[0].size + 4} bytes instead of {saved.objects[0].size}"
    ]
    assert report.nbytes == saved.nbytes


def test_header_and_missing_object(tmp_path: Path, saved: Manifest) -> None:
    report = spoiled(tmp_path, saved, flip(20))
    assert ["header" in d.what for d in report.damage] == [True]
    assert report.nbytes == saved.nbytes
    (tmp_path / saved.objects[0].key).unlink()
    report = verify(tmp_path)
    assert [d.what for d in report.damage] == ["is missing"]
    assert len(report.damage[0].tensors) == 12
    assert report.nbytes == 0

"""Slot files: memory is claimed before it is promised, what they hold is read from them, and adoption believes nothing."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.agent import slots
from surefoot.agent.errors import MemoryBudgetError, SharedMemoryFullError
from surefoot.agent.slots import SlotFolder


def _images() -> Any:
    path = Path(__file__).parents[2] / "integration" / "stand_in_images.py"
    spec = importlib.util.spec_from_file_location("stand_in_images", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


images = _images()
ROW = 5000


def seal(folder: SlotFolder, rank: int, slot: int, step: int, *, area: slots.Area = "own") -> Path:
    path = folder.path(area, rank, slot)
    folder.reserve(path, images.slot_nbytes(ROW))
    with slots.mapped(path, write=True) as view:
        images.write_image(view, rank=rank, world_size=2, generation=1, step=step, row_nbytes=ROW)
    return path


def test_reserving_claims_memory_and_growing_keeps_what_is_held(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm")
    path = seal(folder, 0, 0, 7)
    size = path.stat().st_size
    assert path.stat().st_blocks * 512 >= size
    folder.reserve(path, size // 2)
    assert path.stat().st_size == size
    folder.reserve(path, 2 * size)
    assert path.stat().st_size == 2 * size
    (held,) = folder.images("own", 0)
    assert (held.rank, held.point, held.path) == (0, (1, 7), str(path))


def test_the_budget_bounds_all_slots_together(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm", budget_bytes=10_000)
    folder.reserve(folder.path("own", 0, 0), 6000)
    folder.reserve(folder.path("own", 0, 0), 6000)
    with pytest.raises(MemoryBudgetError, match=r"would take 12,000 bytes .* allows 10,000"):
        folder.reserve(folder.path("replica", 3, 0), 6000)
    folder.reserve(folder.path("replica", 3, 0), 4000)


def test_a_full_file_system_is_an_error_in_words_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)  # what a kernel may leave behind
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = SlotFolder(root=tmp_path / "shm")
    path = folder.path("own", 0, 0)
    folder.reserve(path, 1000)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFullError, match="no room for 1,000 more bytes"):
        folder.reserve(path, 2000)
    assert path.stat().st_size == 1000


def test_views_of_slots_that_hold_something_nothing_or_do_not_exist(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm")
    seal(folder, 0, 0, 7)
    slots.unseal(seal(folder, 0, 1, 8))
    seal(folder, 1, 2, 9).rename(folder.path("own", 0, 2))  # another rank's image is none of ours
    assert [v.point for v in folder.views("own", 0, 4)] == [(1, 7), None, None, None]


def test_adoption_takes_what_is_whole_and_unseals_the_rest(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm")
    assert folder.adopt("gpt/r1/n0") == []
    seal(folder, 0, 0, 7)
    seal(folder, 2, 1, 7, area="replica")
    damaged = seal(folder, 0, 1, 8)
    with slots.mapped(damaged, write=True) as view:
        view[slots.UNSEALED_BYTES + 17] ^= 1
    folder.path("own", 0, 2).write_bytes(b"")
    folder.path("own", 0, 3).write_bytes(b"no image at all" * 1000)
    folder.reserve(folder.upload_path(0, 0), 1000)
    assert slots.read_info(damaged) is not None, "its head is whole"
    adopted = folder.adopt("gpt/r1/n0")
    assert {(h.rank, h.point, h.replica) for h in adopted} == {(0, (1, 7), False), (2, (1, 7), True)}
    assert slots.read_info(damaged) is None
    assert not folder.upload_path(0, 0).exists()


def test_what_another_run_left_is_not_adopted(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm")
    folder.adopt("gpt/r1/n0")
    path = seal(folder, 0, 0, 7)
    assert folder.adopt("gpt/r2/n0") == []
    assert not path.exists()


def test_folders_come_and_go(tmp_path: Path) -> None:
    folder = SlotFolder(root=tmp_path / "shm")
    seal(folder, 0, 0, 7)
    seal(folder, 3, 0, 7)
    assert folder.ranks("own") == [0, 3]
    folder.drop_ranks("own", [3, 4])
    assert folder.ranks("own") == [0]
    folder.clear()
    assert not folder.root.exists()
    assert folder.ranks("own") == []

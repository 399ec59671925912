"""The shelf of snapshots: what it tells of the copies it holds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from surefoot.agent import flight
from surefoot.agent.flight import SnapshotName, SnapshotShelf
from surefoot.agent.slots import HeldImage, SlotFolder


def test_the_last_list_told_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies arrive at once and no third follows, as at the end of a run: the list told last has both.

    The first list is held up until the second copy is in its place; told late, it would hide that copy for good.
    """
    monkeypatch.setattr(flight, "receive", lambda path, name, chunks: None)
    told: list[set[int]] = []
    second_is_told = threading.Event()

    def on_change(held: list[HeldImage]) -> None:
        ranks = {h.rank for h in held}
        if ranks == {0}:
            second.start()
            second_is_told.wait(0.2)  # only a shelf that lets lists overtake each other gets here in time
        told.append(ranks)
        if ranks == {0, 1}:
            second_is_told.set()

    shelf = SnapshotShelf(SlotFolder(root=tmp_path, budget_bytes=10**6), on_change)
    second = threading.Thread(target=shelf.store, args=(_name(rank=1), []))
    shelf.store(_name(rank=0), [])
    second.join()
    assert told == [{0}, {0, 1}]


def _name(rank: int) -> SnapshotName:
    return SnapshotName(
        rank=rank, generation=1, step=12, nbytes=100, in_force=1, start_generation=0, start_step=0
    )

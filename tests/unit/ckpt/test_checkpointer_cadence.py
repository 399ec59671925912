"""`Checkpointer` by seconds and by choice, and what it tidies: in one process, on files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.manifest import object_key
from surefoot.ckpt.record import list_manifests
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools.inspect import list_checkpoints


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def saved_steps(root: str) -> list[int]:
    return [m.step for m in list_manifests(open_store(root))]


def test_by_seconds_the_first_save_comes_at_once(root: str) -> None:
    state = {"model": nn.Linear(3, 2)}
    with ckpt.Checkpointer(root, every_s=3600.0) as c:
        for step in range(1, 6):
            c.save(step, state)
    assert saved_steps(root) == [1]
    with ckpt.Checkpointer(root, every_s=3600.0) as c:
        c.load(state)  # which counts as saved
        for step in range(2, 6):
            c.save(step, state)
    assert saved_steps(root) == [1]


def test_by_choice_the_reason_stands_in_the_manifest(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is chosen is at least 10 s; the second save is made due by moving the last one back."""
    state = {"model": nn.Linear(3, 2)}
    with caplog.at_level(logging.INFO), ckpt.Checkpointer(root, every="auto") as c:
        for step in range(1, 10):
            c.save(step, state).wait()
        c._cadence.loaded({"ran_s": 100.0})  # as after a load, a long time ago
        c._cadence._pace.begin(-1e9)
        c.save(10, state).wait()
    assert saved_steps(root) == [1, 10]
    rows = list_checkpoints(open_store(root))
    assert "interval" not in rows[0].facts, "nothing was measured yet"
    assert "a save costs" in rows[1].facts["interval"]
    assert "0 faults in" in rows[1].facts["interval"]
    assert rows[1].facts["ran_s"] >= 100
    assert "checkpoints: every" in caplog.text


def test_both_cannot_be_asked_for(root: str) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        ckpt.Checkpointer(root, every=5, every_s=5.0)


def test_a_strict_load_is_noted_as_verified(root: str) -> None:
    model = nn.Linear(3, 2)
    ckpt.save(root, 20, {"model": model, "epoch": 1})
    with ckpt.Checkpointer(root) as c:
        c.load({"model": model}, strict=False)
    assert list_checkpoints(open_store(root))[0].flags == ()
    with ckpt.Checkpointer(root) as c:
        c.load({"model": model, "epoch": 0})
    assert list_checkpoints(open_store(root))[0].flags == ("verified",)


def test_what_an_earlier_start_left_is_swept_after_the_first_commit(root: str) -> None:
    state = {"model": nn.Linear(3, 2)}
    ckpt.save(root, 20, state)
    store = open_store(root)
    store.create(object_key(1, 30, "dead", 0), b"of a start that was killed")
    store.create("mine.txt", b"the user's")
    with ckpt.Checkpointer(root) as c:
        c.load(state)
        c.save(40, state).wait()
    assert [o.key for o in store.list("gen-0001/") if "/dead/" in o.key] == []
    assert store.read("mine.txt")

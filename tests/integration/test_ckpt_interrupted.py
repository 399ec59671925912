"""Ctrl-C in the midst of a save, and the training goes on: what was under way is committed whole or not at all, and the next save works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.objects.probe import probe_conditional
from surefoot.ckpt.store import MemoryObjectStore

SOON_S, LATER_S = 0.2, 1.0


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((200_000,), value)}


def stored(root: Path, step: int) -> set[int]:
    found = state(0)
    ckpt.load(root, found, step)
    return set(found["w"].tolist())


@contextmanager
def interrupted() -> Iterator[None]:
    """The block waits for something, and Ctrl-C ends that."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[ckpt.Checkpointer, int]]:
    """A checkpointer that has committed step 1, and whose uploader stands still with the upload of step 2; and its pid."""
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, state(1)).wait()
        assert c._equipment is not None
        pid = c._equipment.uploader().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            c.save(2, state(2))
            yield c, pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_who_interrupts_the_waiting_does_not_let_the_next_save_into_the_memory_of_the_one_before(
    frozen: tuple[ckpt.Checkpointer, int], tmp_path: Path
) -> None:
    c, pid = frozen
    for _ in range(3):
        with interrupted():
            c.save(3, state(3))
    thaw = threading.Timer(LATER_S, os.kill, (pid, signal.SIGCONT))
    thaw.start()
    c.save(4, state(4)).wait()
    thaw.join()
    assert [(step, stored(tmp_path, step)) for step in ckpt.steps(tmp_path)] == [(1, {1}), (2, {2}), (4, {4})]


def test_a_flight_whose_wait_was_interrupted_is_still_on_its_way(
    frozen: tuple[ckpt.Checkpointer, int],
) -> None:
    c, pid = frozen
    flight = c._takeoff._flight
    assert flight is not None
    with interrupted():
        flight.join()
    ended = threading.Event()
    threading.Thread(target=lambda: (flight.join(), ended.set()), daemon=True).start()
    assert not ended.wait(SOON_S)
    os.kill(pid, signal.SIGCONT)
    assert ended.wait(60)


def test_a_save_that_is_interrupted_where_it_begins_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted_start(self: threading.Thread) -> None:
        if self.name == "ckpt-save-2":
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    monkeypatch.setattr("surefoot.ckpt.saving.flight.START_S", 0.1)
    with ckpt.Checkpointer(tmp_path, deadline_s=3600) as c:
        c.save(1, state(1)).wait()
        with pytest.raises(KeyboardInterrupt):
            c.save(2, state(2))
        c.save(3, state(3)).wait()
    assert ckpt.steps(tmp_path) == [1, 3]


def test_a_probe_that_is_interrupted_leaves_no_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one(self: threading.Thread) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(KeyboardInterrupt):
        probe_conditional(MemoryObjectStore())
    (thread,) = started
    thread.join(60)
    assert not thread.is_alive()


def test_a_close_that_is_interrupted_gives_the_save_the_grace_of_an_error_and_leaves_nothing_behind(
    frozen: tuple[ckpt.Checkpointer, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, pid = frozen
    monkeypatch.setattr("surefoot.ckpt.saving.checkpointer.GRACE_S", 0.1)
    monkeypatch.setattr("surefoot.ckpt.saving.checkpointer.KILL_AFTER_S", 0.1)
    with interrupted():
        c.close()
    assert not Path(f"/proc/{pid}").exists()
    c.save(3, state(3)).wait()
    assert ckpt.steps(tmp_path) == [1, 3]

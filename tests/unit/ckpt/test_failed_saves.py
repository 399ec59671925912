"""What a save that comes to nothing raises: CommitError with the reason as its cause, however it is heard; and when."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import ckpt, failpoint
from surefoot.ckpt import errors
from surefoot.ckpt import store as stores
from surefoot.ckpt.saving import flight
from surefoot.ckpt.saving.troubles import error_of, failed, refusal, trouble_of


def state() -> dict[str, Any]:
    return {"w": torch.ones(100)}


def block(root: Path, step: int) -> None:
    """Nothing can be stored for that step: a file stands where its folder should."""
    folder = root / "gen-0001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step-{step:010d}").write_text("in the way")


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoint.arm(None)


def by_wait(c: ckpt.Checkpointer) -> None:
    c.save(2, state()).wait()


def by_a_blocking_save(c: ckpt.Checkpointer) -> None:
    c.save(2, state(), blocking=True)


def by_the_next_save(c: ckpt.Checkpointer) -> None:
    c.save(2, state())
    c.save(3, state())


def by_close(c: ckpt.Checkpointer) -> None:
    c.save(2, state())
    c.close()


@pytest.mark.parametrize("heard", [by_wait, by_a_blocking_save, by_the_next_save, by_close])
def test_a_store_that_fails(heard: Callable[[ckpt.Checkpointer], None], tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, state()).wait()
        block(tmp_path, 2)
        with pytest.raises(
            ckpt.CommitError, match=r"step 2 was not committed.*choose another root"
        ) as caught:
            heard(c)
        assert isinstance(caught.value.__cause__, ckpt.ObjectStoreDeniedError)
        c.save(4, state()).wait()
    assert ckpt.steps(tmp_path) == [1, 4]


def test_a_store_that_fails_before_anything_is_copied(tmp_path: Path) -> None:
    (tmp_path / "generations").write_text("in the way")
    with ckpt.Checkpointer(tmp_path) as c:
        with pytest.raises(ckpt.CommitError, match=r"step 1 was not saved.*choose another root") as caught:
            c.save(1, state())
        assert isinstance(caught.value.__cause__, ckpt.ObjectStoreDeniedError)
        (tmp_path / "generations").unlink()
        c.save(2, state())
    assert ckpt.steps(tmp_path) == [2]


def test_a_state_dict_of_the_callers_that_raises(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lost")

        def load_state_dict(self, saved: dict[str, Any]) -> None: ...

    with ckpt.Checkpointer(tmp_path) as c:
        with pytest.raises(ckpt.CommitError, match=r"step 1 cannot be saved.*KeyError: 'lost'") as caught:
            c.save(1, {"b": Broken()})
        assert isinstance(caught.value.__cause__, KeyError)


CAUSE = stores.ObjectStoreUnavailableError("away")


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (CAUSE, ckpt.CommitError, stores.ObjectStoreUnavailableError),
        (stores.ObjectUnknownError("?"), ckpt.CommitError, stores.ObjectUnknownError),
        (RuntimeError("x"), ckpt.CommitError, RuntimeError),
        (ckpt.ChannelError("gone"), ckpt.CommitError, ckpt.ChannelError),
        (errors.DamagedError("d", key="k"), ckpt.CommitError, errors.DamagedError),
        (ckpt.StateError("s"), ckpt.StateError, type(None)),
        (ckpt.CoverageError("c"), ckpt.CoverageError, type(None)),
        (ckpt.LineageError("l"), ckpt.LineageError, type(None)),
        (ckpt.CkptUserError("u"), ckpt.CkptUserError, type(None)),
    ],
)
@pytest.mark.parametrize("who", ["", "rank 3"])
def test_what_an_error_is_to_a_save(error: Exception, kind: type, cause: type, who: str) -> None:
    told = failed("step 1 was not committed", error, who)
    assert (type(told), type(told.__cause__)) == (kind, cause)
    assert str(error) in str(told)
    assert who in str(told)
    over = error_of(trouble_of(told))
    assert (type(over), str(over)) == (kind, str(told)), "and beyond this process"
    if isinstance(told.__cause__, stores.ObjectStoreError):
        assert (type(over.__cause__), str(over.__cause__)) == (cause, str(told.__cause__))


def test_a_commit_error_of_a_rank_has_its_own_cause_for_all() -> None:
    own = ckpt.CommitError("not stored")
    own.__cause__ = CAUSE
    assert failed("step 1", own, "rank 1").__cause__ is CAUSE
    assert failed("step 1", own) is own


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("StateError", ckpt.StateError),
        ("CkptUserError", ckpt.CkptUserError),
        ("KeyError", ckpt.CommitError),
        ("ObjectStoreDeniedError", ckpt.CommitError),
        ("", ckpt.CommitError),
    ],
)
def test_what_all_raise_where_one_cannot_save(kind: str, raised: type) -> None:
    assert type(refusal(kind, "rank 1: no")) is raised


# ---------------------------------------------------------------- a deadline is a deadline


def test_the_end_of_a_save_waits_for_no_word_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disarm: None
) -> None:
    """That a failure is noted for the record may take as long as the store hangs."""
    answers = threading.Event()
    monkeypatch.setattr(flight, "leave_failure", lambda *_: answers.wait())
    failpoint.arm(failpoint.parse("upload.before_objects=error"))
    c = ckpt.Checkpointer(tmp_path, memory_budget=1)
    try:
        with pytest.raises(ckpt.CommitError, match="FailpointError"):
            c.save(1, state())
        assert not answers.is_set()
    finally:
        answers.set()
        c.close()


def uploader_of(c: ckpt.Checkpointer) -> int:
    assert c._equipment is not None
    return c._equipment.uploader().pid


def test_an_uploader_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the kernel, say: what was to be stored and where is named, and the next save has another one."""
    monkeypatch.setattr(flight, "LATE_S", 0.2)
    with ckpt.Checkpointer(tmp_path, deadline_s=60) as c:
        c.save(1, state()).wait()
        c._takeoff._deadline_s = 0.2
        os.kill(uploader_of(c), signal.SIGSTOP)
        with pytest.raises(ckpt.CommitError) as caught:
            c.save(2, state()).wait()
        for word in ("rank 0", "r00000-0.safetensors", str(tmp_path), "0.2 s"):
            assert word in str(caught.value)
        c._takeoff._deadline_s = 60.0
        c.save(3, state()).wait()
    assert ckpt.steps(tmp_path) == [1, 3]


def test_a_commit_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disarm: None
) -> None:
    monkeypatch.setattr(flight, "LATE_S", 0.2)
    monkeypatch.setattr(flight, "ANSWER_S", 0.2)
    with ckpt.Checkpointer(tmp_path, deadline_s=60) as c:
        c.save(1, state()).wait()
        c._takeoff._deadline_s = 1.0
        failpoint.arm(failpoint.parse("ckpt.before_manifest=freeze"))
        with pytest.raises(ckpt.CommitError, match=r"has not come to an end in time.*next load"):
            c.save(2, state()).wait()
        failpoint.arm(None)
        c._takeoff._deadline_s = 60.0
        c.save(3, state()).wait()
    assert ckpt.steps(tmp_path) == [1, 3]


# ---------------------------------------------------------------- what is called with the wrong words


@pytest.mark.parametrize("root", [{"a": 1}, None, 5, b"bytes", ["a"]])
def test_what_is_no_root_at_all(root: Any, tmp_path: Path) -> None:
    for call in (
        lambda: ckpt.Checkpointer(root),
        lambda: ckpt.save(root, 1, state()),
        lambda: ckpt.load(root, state()),
        lambda: ckpt.steps(root),
        lambda: ckpt.read(root, 1, "w"),
        lambda: ckpt.verify(root, 1),
        lambda: ckpt.export(root, 1, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match=rf"of type {type(root).__name__}\) is no root .*give a path"):
            call()


def test_single_calls_take_the_words_of_the_methods(tmp_path: Path) -> None:
    made = ckpt.save(
        tmp_path, 7, state(), cursor={"at": 1}, extra={"b": 2}, blocking=False, every=5, deadline_s=60
    )
    assert (made.step, made.cursor) == (7, {"at": 1}), "due or not"
    loaded = ckpt.load(tmp_path, state(), 7, strict=False, wait_s=0.1, resume_tries=None)
    assert loaded is not None
    with pytest.raises(ckpt.StepMissingError, match="8"):
        ckpt.load(tmp_path, state(), 8, wait_s=0.01)


def test_who_set_a_step_aside_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save(tmp_path, step, {"w": torch.full((100,), float(step))})
    (data,) = tmp_path.glob("gen-*/step-0000000002/*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert not ckpt.verify(tmp_path, 2).ok
    loaded = ckpt.load(tmp_path, state())
    assert loaded is not None
    ((step, why),) = loaded.passed_over
    assert step == 2
    assert "found by `ckpt verify`" in why
    assert "earlier load" not in why

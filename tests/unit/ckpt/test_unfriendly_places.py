"""Where a job may have to run: a root that others use as well, a machine without room for a process, an interpreter that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.format.values import decode_value
from surefoot.ckpt.store import open_store

STATE = {"w": torch.arange(1000)}


def loaded_step(root: Path | str) -> int | None:
    loaded = ckpt.load(root, {"w": torch.zeros(1000, dtype=torch.int64)})
    return None if loaded is None else loaded.step


@pytest.mark.parametrize(
    "key",
    [
        "generations/0000.json",
        "generations/00001.json",
        f"generations/{'9' * 40}.json",
        "generations/٠٠٠٢.json",
        f"gen-0001/step-{'9' * 40}/manifest.json",
        f"gen-{'9' * 40}/step-0000000009/manifest.json",
        "gen-0001/step-٠٠٠٠٠٠٠٠٠٣/manifest.json",
        "gen-0001/step-00000000009/manifest.json",
    ],
)
def test_what_only_looks_like_a_key_of_ours_is_passed_over(key: str, tmp_path: Path) -> None:
    ckpt.save(tmp_path, 1, STATE)
    (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / key).write_bytes(b"{}")
    assert loaded_step(tmp_path) == 1
    ckpt.save(tmp_path, 2, STATE)
    assert ckpt.steps(tmp_path) == [1, 2]


def test_a_folder_beside_that_nobody_may_look_into_is_nothing_to_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lost+found, where a root is a file system of its own."""
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def denied(folder: Any) -> Any:
        if str(folder).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", denied)
    assert loaded_step(tmp_path) is None
    ckpt.save(tmp_path, 1, STATE)
    assert loaded_step(tmp_path) == 1


def test_a_path_that_is_no_utf8_is_the_same_folder_for_all_who_are_told_of_it(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert open_store(open_store(folder).root).root == open_store(folder).root
    with ckpt.Checkpointer(folder) as c:
        c.save(1, STATE).wait()
    assert os.listdir(tmp_path) == [folder.name]


def test_where_no_process_can_be_started_a_save_is_written_by_the_rank_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with ckpt.Checkpointer(tmp_path) as c:
        with monkeypatch.context() as m:
            m.setattr("surefoot.ckpt.saving.writer.subprocess.Popen", none)
            c.save(1, STATE).wait()
        c.save(2, STATE).wait()
    assert "no process can be started" in caplog.text
    assert ckpt.steps(tmp_path) == [1, 2]


LAST_WORDS = """
import atexit, sys, torch
from surefoot import ckpt

c = ckpt.Checkpointer(sys.argv[1])
state = {"w": torch.arange(1000)}
if sys.argv[2] == "later":
    c.save(1, state)
atexit.register(lambda: c.save(2, state))
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="an interpreter that ends starts no threads any more")
@pytest.mark.parametrize("begun", ["first", "later"])
def test_a_save_that_begins_when_the_interpreter_ends_is_waited_for_where_it_begins(
    begun: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_WORDS, str(tmp_path), begun], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ckpt.steps(tmp_path)[-1] == 2


@pytest.mark.parametrize("value", [{"ndarray": ["<f8", None, ""]}, {"tensor": ["w"]}, {"tensor": {}}])
def test_a_value_of_no_known_form_is_damage(value: Any) -> None:
    with pytest.raises(DamagedError, match="value v"):
        decode_value(value, "v", lambda name: name)

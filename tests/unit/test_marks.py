"""Marks, run folders and their locks, as far as they go without other processes."""

import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot import marks
from surefoot.marks import LivingRun, Mark, MarkedProcess, MarkError, RunFolderError, RunOwner


@pytest.fixture
def base() -> Iterator[Path]:
    """A base whose path is short enough for sockets (pytest's tmp_path may not be)."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    yield folder
    shutil.rmtree(folder)


def test_mark_round_trip() -> None:
    mark = Mark("gpt", "20260101T000000-abcdef", "n0", "1f")
    assert Mark.parse(str(mark)) == mark
    assert mark.env() == {"SUREFOOT_MARK": "gpt/20260101T000000-abcdef/n0/1f"}


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/d/e", "a//c/d", "a/b/c/"])
def test_bad_marks_are_refused(text: str) -> None:
    with pytest.raises(MarkError):
        Mark.parse(text)


def test_current_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_MARK", raising=False)
    assert marks.current() is None
    monkeypatch.setenv("SUREFOOT_MARK", "j/r/n/i")
    assert marks.current() == Mark("j", "r", "n", "i")


def test_base_folder_prefers_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_HOME", "/somewhere")
    assert marks.base_folder() == Path("/somewhere")
    monkeypatch.delenv("SUREFOOT_HOME")
    assert marks.base_folder().name == f"surefoot-{os.geteuid()}"


def test_owner_makes_private_files_and_removes_all(base: Path) -> None:
    with RunOwner.create("gpt", base) as owner:
        assert stat.S_IMODE(owner.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(owner.token_file.stat().st_mode) == 0o600
        assert len(owner.token) == 64
        assert owner.shm_dir == Path(f"/dev/shm/surefoot-{owner.run_id}")
        assert owner.shm_dir.is_dir()
        owner.describe(etcd="127.0.0.1:1")
        facts = json.loads((owner.folder / "owner.json").read_text())
        assert facts == {"job": "gpt", "run_id": owner.run_id, "pid": os.getpid(), "etcd": "127.0.0.1:1"}
    assert not owner.folder.exists()
    assert not owner.shm_dir.exists()
    assert owner.close() == []


def test_run_ids_and_tokens_differ(base: Path) -> None:
    with RunOwner.create("gpt", base) as one, RunOwner.create("gpt", base) as two:
        assert one.run_id != two.run_id
        assert one.token != two.token


def test_a_living_run_is_listed_and_not_swept(base: Path) -> None:
    with RunOwner.create("gpt", base) as owner:
        (owner.shm_dir / "n0").mkdir()
        assert [r.run_id for r in marks.living_runs(base)] == [owner.run_id]
        assert marks.living_runs(base)[0] == LivingRun(
            owner.run_id, owner.folder, {"job": "gpt", "run_id": owner.run_id, "pid": os.getpid()}
        )
        assert owner.run_id not in marks.sweep(base)
        assert (owner.shm_dir / "n0").is_dir()
    assert marks.living_runs(base) == []


def test_an_abandoned_run_is_swept(base: Path) -> None:
    owner = RunOwner.create("gpt", base)
    (owner.folder / "nodes/n0/logs").mkdir(parents=True)
    os.close(owner._lock_fd)  # what the kernel does when the owner dies
    assert owner.run_id in marks.sweep(base)
    assert list(base.iterdir()) == []
    assert not owner.shm_dir.exists()


def test_a_sweep_that_died_half_way_is_finished(base: Path) -> None:
    owner = RunOwner.create("gpt", base)
    os.close(owner._lock_fd)
    (owner.folder / "token").unlink()
    (owner.folder / "owner.json").unlink()
    shutil.rmtree(owner.shm_dir)
    assert owner.run_id in marks.sweep(base)
    assert list(base.iterdir()) == []


def test_other_names_in_the_base_are_left_alone(base: Path) -> None:
    (base / "notes").mkdir()
    (base / "20260101T000000-abcdef").write_text("a file, no folder")
    (base / "20260101T000000-abcde0").symlink_to("/")
    marks.sweep(base)
    assert len(list(base.iterdir())) == 3


def test_half_made_folders_go_when_they_are_old(base: Path) -> None:
    fresh, old = base / ".new-a", base / ".new-b"
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    marks.sweep(base)
    assert [f.name for f in base.iterdir()] == [".new-a"]


def test_orphaned_shared_memory_is_swept_only_without_run_folder_and_when_old(base: Path) -> None:
    lost, kept, young = (Path(f"/dev/shm/surefoot-20260101T000000-{secrets.token_hex(3)}") for _ in range(3))
    try:
        for shm in (lost, kept, young):
            shm.mkdir()
        (lost / ".run").write_text(str(base / "gone"))
        (kept / ".run").write_text(str(base))
        for shm in (lost, kept):
            os.utime(shm, (0, 0))
        swept = marks.sweep(base)
        assert lost.name.removeprefix("surefoot-") in swept
        assert not lost.exists()
        assert kept.exists()
        assert young.exists()
    finally:
        for shm in (lost, kept, young):
            shutil.rmtree(shm, ignore_errors=True)


def test_a_long_base_is_refused_with_the_number_of_bytes(base: Path) -> None:
    with pytest.raises(RunFolderError, match="SUREFOOT_HOME"):
        RunOwner.create("gpt", base / ("x" * 80))


def test_a_base_that_is_no_folder_is_refused(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(RunFolderError, match="SUREFOOT_HOME"):
        RunOwner.create("gpt", base / "file")


def test_a_linked_base_is_refused(base: Path) -> None:
    (base / "link").symlink_to(base)
    with pytest.raises(RunFolderError, match="not a folder of this user"):
        RunOwner.create("gpt", base / "link")


def test_end_spares_this_process_and_its_ancestors() -> None:
    mark = Mark("j", "20260101T000000-abcdef", "n0", "0")
    own = [MarkedProcess(pid, marks.start_time(pid) or 0, mark) for pid in (os.getpid(), os.getppid())]
    assert marks.end(own, timeout_s=1) == []


def test_start_time_of_nobody_is_none() -> None:
    assert marks.start_time(2**22 + 1) is None
    assert marks.start_time(os.getpid())

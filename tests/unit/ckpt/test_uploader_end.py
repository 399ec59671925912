"""The uploader ends with its rank, whenever and however that ends, and says nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

RANK = """
import os, sys
from surefoot.ckpt.saving.writer import UploaderProcess
uploader = UploaderProcess(sys.argv[1], 0)
if len(sys.argv) > 2 and os.fork() == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is left of stderr is the uploader's
    sys.stdin.read()
    os._exit(0)
while sys.argv[-1] == "ready" and uploader.read(60) is None:
    pass
os.kill(os.getpid(), 9)
"""
"""With "worker": a process that the rank forked lives on, and holds the rank's end of the socket pair open."""

LATE = """
import os, sys, time

class Told:
    def find_spec(self, name, path=None, target=None):
        if name == "surefoot.ckpt.saving.uploader":
            print("imports", name, file=sys.stderr, flush=True)

if "--parent" in sys.orig_argv:
    while os.path.exists("/proc/" + sys.orig_argv[sys.orig_argv.index("--parent") + 1]):
        time.sleep(0.01)  # the pace of polling
    print("late", file=sys.stderr, flush=True)
    sys.meta_path.insert(0, Told())
"""
"""As a sitecustomize module: holds the uploader up in its start until the rank is dead and reaped, and tells of its imports."""


@contextmanager
def rank_that_dies(*args: str, path: str = "") -> Iterator[subprocess.Popen[str]]:
    """The rank, dead and reaped. Its stderr is the uploader's as well, so it ends when both have."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path] if path else sys.path)}
    command = [sys.executable, "-c", RANK, *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as rank:
        assert rank.wait() == -9
        yield rank


@pytest.mark.parametrize("root", ["file", "s3://nowhere/root"])
@pytest.mark.parametrize("worker", [(), ("worker",)])
def test_a_rank_that_dies_before_its_uploader_runs(
    root: str, worker: tuple[str, ...], tmp_path: Path
) -> None:
    """It is gone, and its pid with it, when the uploader first looks: it does not even load what it would work with, which
    takes long on a busy machine. With a worker the socket pair stays open for good."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    root = (tmp_path / "root").as_uri() if root == "file" else root
    with rank_that_dies(root, *worker, path=str(tmp_path)) as rank:
        assert rank.stderr is not None
        assert rank.stderr.read() == "late\n"


def test_a_rank_that_dies_beside_a_worker(tmp_path: Path) -> None:
    with rank_that_dies((tmp_path / "root").as_uri(), "worker", "ready") as rank:
        assert rank.stderr is not None
        assert rank.stderr.read() == ""

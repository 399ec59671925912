"""A rank's end of its uploader (ckpt/saving/uploader.py): started early, spoken to, noticed when it dies, never left behind. Torch-free."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import surefoot
from surefoot.ckpt.errors import CommitError
from surefoot.ckpt.format.image import ImageStructure
from surefoot.ckpt.live.pool import StagingBuffer
from surefoot.ckpt.saving.jobs import (
    AbandonMsg,
    BufferMsg,
    ByeMsg,
    CommitMsg,
    LayoutMsg,
    Line,
    ToRank,
    UploadMsg,
)

_log = logging.getLogger(__name__)

KILL_AFTER_S = 5.0
"""How long an uploader may take to end once it was asked, or to drop an upload that was given up."""


class UploaderGoneError(CommitError):
    """The uploader of this rank died; the message says how."""


class UploaderProcess:
    """Starts at once and is not waited for: libraries load while the training goes on."""

    def __init__(self, root: str, rank: int) -> None:
        """Raises OSError: no process can be started."""
        self._rank = rank
        self._buffer: StagingBuffer | None = None
        self._structure: ImageStructure | None = None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Popen executes without running Python in a forked copy of this process, and without its atfork handlers.
                self._process = subprocess.Popen(
                    _command(root, theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                )
        except BaseException:
            ours.close()
            raise
        self._line: Line[ToRank] = Line(ours, ToRank)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_upload(self, job: UploadMsg, structure: ImageStructure, buffer: StagingBuffer | None) -> None:
        """Raises UploaderGoneError."""
        try:
            if buffer is not None and buffer is not self._buffer:
                self._line.send(BufferMsg(buffer.nbytes), [buffer.fd])
                self._buffer = buffer
            if structure is not self._structure:
                self._line.send(LayoutMsg(structure))
                self._structure = structure
            self._line.send(job)
        except OSError as e:
            raise self._gone() from e

    def send(self, message: CommitMsg | AbandonMsg) -> None:
        """Raises UploaderGoneError."""
        try:
            self._line.send(message)
        except OSError as e:
            raise self._gone() from e

    def read(self, timeout_s: float) -> ToRank | None:
        """The next answer; None where none came in time. Raises UploaderGoneError as soon as the process has died."""
        try:
            return self._line.read(timeout_s)
        except EOFError as e:
            raise self._gone() from e

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, wait_s: float) -> None:
        """Let it finish what it was asked to do, for `wait_s` at most, and end it."""
        try:
            self._line.send(ByeMsg())
            self._process.wait(wait_s)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
        self._line.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _gone(self) -> UploaderGoneError:
        try:
            code = self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return UploaderGoneError(f"the uploader of rank {self._rank} stopped talking and was killed")
        return UploaderGoneError(f"the uploader of rank {self._rank} (pid {self.pid}) {_ended(code)}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def _command(root: str, fd: int) -> list[str]:
    # -P: a file of the caller's called like a module must not get in the way. The parent-death signal goes by the thread
    # that starts the process: only the main thread is sure to stay.
    tether = ["--tethered"] if threading.current_thread() is threading.main_thread() else []
    own = ["--fd", str(fd), "--parent", str(os.getpid()), "--root", root, *tether]
    return [sys.executable, "-P", "-m", "surefoot.ckpt.saving.leash", *own]


def _environment() -> dict[str, str]:
    """This process's own (keys of the object store stand in it), and where this very package was found."""
    home = str(Path(surefoot.__file__).parent.parent)
    paths = [p for p in (os.environ.get("PYTHONPATH"), home) if p]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

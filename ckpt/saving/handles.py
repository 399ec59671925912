"""`SaveHandle`: how a save ended. An error is told to whoever waits, otherwise at the next call, or when the interpreter ends.

A script that ends without `close` still gets its last save: its end waits for it. Where that save failed and nobody was told,
the error is printed and the exit code is not 0. A script that ends by an exception is held up for `GRACE_S` at most.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from surefoot.ckpt.errors import CommitError
from surefoot.ckpt.manifest import Manifest

_log = logging.getLogger(__name__)

GRACE_S = 20.0
"""How long a save may still take when the script has failed or was interrupted: it is most welcome then, but not at any price."""
EXIT_CODE = 1


class SaveHandle:
    """One save. `wait` gives its end; where nobody has asked, the next `save` and `close` raise its error."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._done = threading.Event()
        self._staged = threading.Event()
        self._read: Callable[[], Manifest] | None = None
        self._manifest: Manifest | None = None
        self._error: Exception | None = None
        self.told = False
        """Somebody has heard how it ended."""

    def __repr__(self) -> str:
        if not self.done():
            state = "under way" if self.staged() else "being copied"
        elif self._error is not None:
            state = f"failed: {type(self._error).__name__}"
        else:
            state = "committed" if self._read is not None else "not due"
        return f"SaveHandle(step={self.step}, {state})"

    def done(self) -> bool:
        """True once `wait` will not block."""
        return self._done.is_set()

    def staged(self, timeout_s: float | None = None) -> bool:
        """True once the state is copied; with a timeout, waits so long for it.

        `save` returns after the copy, but for what lies on a device: there the copy goes on while the host does, and the caller's
        stream waits for it by itself before it runs what was launched after `save`. Only who changes device memory from *another*
        stream has to ask here first.
        """
        return self._staged.wait(timeout_s) if timeout_s is not None else self._staged.is_set()

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """The manifest of the committed step; None where the step was not due (`every=`).

        Raises:
            TimeoutError: it is still under way.
            CommitError: it was not committed, and why, the same on all ranks; its ``__cause__`` is the object store's error, where that
                was in the way. ReplicasDifferError: ranks hold different content; FencedError: another start of the job took over.
            ObjectStore…Error: it is committed, and its manifest could not be read.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is still under way after {timeout_s} s")
        self.settle()
        if self._manifest is None and self._read is not None:
            self._manifest = self._read()
        return self._manifest

    def ended_within(self, timeout_s: float) -> bool:
        """Has it ended by then? Nobody is told how."""
        return self._done.wait(timeout_s)

    def failure(self) -> Exception | None:
        """What went wrong, once it has ended; nobody is told."""
        return self._error

    def settle(self) -> None:
        """Wait for the end. Raises what went wrong."""
        self._done.wait()
        self.told = True
        _unseen.discard(self)
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Its end is no news: whoever began it knows already that it fails."""
        _unseen.discard(self)

    @property
    def alone(self) -> bool:
        """Nobody will wait for it at the end: it was begun there, in a handler of atexit or a thread that outlives the main one."""
        return not _watching

    def begin(self) -> None:
        """From now on the end of the interpreter waits for it."""
        _watch_exit()
        _unseen.add(self)

    def copied(self) -> None:
        self._staged.set()

    def finish(self, read: Callable[[], Manifest] | None, error: Exception | None = None) -> None:
        self._read, self._error = read, error
        self._staged.set()
        self._done.set()


_unseen: set[SaveHandle] = set()
"""Saves whose end nobody has heard of yet."""
_watching = False


def _watch_exit() -> None:
    global _watching
    if _watching:
        return
    # Before the interpreter joins its threads, and in the children of multiprocessing too, which run no atexit handlers.
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_at_exit)
    except RuntimeError:
        return  # it is ending already: see `SaveHandle.alone`
    _watching = True
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """A forked child has none of its parent's saves."""
    _unseen.clear()


def _at_exit() -> None:
    """Wait for what is under way, tell what went wrong, and make the exit code say so."""
    global _watching
    failed = getattr(sys, "last_value", None) is not None
    until = time.monotonic() + GRACE_S if failed else None
    trouble = False
    for handle in sorted(_unseen, key=lambda h: h.step):
        try:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not handle._done.wait(left):
                raise CommitError(
                    f"step {handle.step} was still being saved after {GRACE_S:g} s, and is given up"
                )
            handle.settle()
        except KeyboardInterrupt:
            print(f"interrupted while step {handle.step} was being saved: it is given up", file=sys.stderr)
            trouble = True
            break
        except Exception as e:
            print(
                f"surefoot: the save of step {handle.step} failed: {type(e).__name__}: {e}", file=sys.stderr
            )
            trouble = True
    _unseen.clear()
    _watching = False  # for what begins after this
    if trouble:
        _exit_with(EXIT_CODE)


def _exit_with(code: int) -> None:
    """Let this process end with `code`, whatever it was about to say, and run everything else that is to run at its end."""
    import multiprocessing

    if multiprocessing.parent_process() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            code
        )  # a child of multiprocessing has run its handlers by now, and exits with what it thinks it knows
    # exit(3) once more, in a handler of the C library that runs after the interpreter is down: the last code counts.
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.exit, ctypes.c_void_p), ctypes.c_void_p(code), None)

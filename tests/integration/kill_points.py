"""Notes every write of a process below a root, or to an S3 server, and kills it, with all its fellows, at a chosen one.

A *point* is a system call that changes something: a file or folder made, bytes written, an fsync, a link, a removal; on S3
a request to the server. A recorded run lists the points; a run with a `Kill` ends by SIGKILL just before one of them takes
effect, or after some of its bytes went out, or the call fails there with an errno.

Watched are `os` and sockets as Python code calls them, in the process that calls `install` and, through killing/sitecustomize.py,
in every Python process it starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

FOLDER = Path(__file__).parent / "killing"
VARIABLE = "SUREFOOT_TEST_KILL_POINTS"


@dataclass(frozen=True, slots=True)
class Point:
    """The `nth` time (from 1) that the process in this role did `what` to `name`; of calls that carry bytes, how many."""

    role: str
    what: str
    name: str
    nth: int
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.role}: {self.what} {self.name}#{self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL at a point, once `after_nbytes` of its bytes went out; `alone`: only the process that comes to it. With an
    `errno` nobody dies: the call fails."""

    role: str
    what: str
    name: str
    nth: int
    after_nbytes: int = 0
    alone: bool = False
    errno: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is watched: writes below `folder`; or, where there is a `port`, what is sent to the S3 server there, `folder` being the
    bucket and prefix. Notes go to `<log>.points`, from the first `arm` on."""

    log: str
    folder: str
    port: int = 0


def points_of(log: str) -> list[Point]:
    """What a run noted, in order; a request that went out in several pieces is one point."""
    path = Path(f"{log}.points")
    found: dict[tuple[str, str, str, int], Point] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        p = Point(**json.loads(line))
        before = found.get(point_id(p))
        found[point_id(p)] = replace(p, nbytes=p.nbytes + (before.nbytes if before else 0))
    return list(found.values())


def arm(log: str, kill: Kill | None) -> None:
    """From here on points are noted, and counted from 1; at `kill` it happens."""
    Path(f"{log}.fired").unlink(missing_ok=True)
    words = json.dumps(asdict(kill) if kill is not None else None)
    Path(f"{log}.new").write_text(f"{time.monotonic_ns()} {words}")
    os.rename(f"{log}.new", f"{log}.armed")


def fired(log: str) -> bool:
    return Path(f"{log}.fired").exists()


def from_environment() -> None:
    """In a process that a watched one started."""
    if text := os.environ.get(VARIABLE):
        role, words = json.loads(text)
        _Watcher(Watch(**words), f"{role}'s child").patch()


def install(watch: Watch, role: str) -> None:
    """Watch this process, and those it starts from here on."""
    os.environ[VARIABLE] = json.dumps([role, asdict(watch)])
    paths = [str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    _Watcher(watch, role).patch()


_NONCES = re.compile(r"(?<![0-9a-f])[0-9a-f]{12,}(?![0-9a-f])")


def point_id(point: Point) -> tuple[str, str, str, int]:
    return point.role, point.what, point.name, point.nth


class _Watcher:
    def __init__(self, watch: Watch, role: str) -> None:
        self._watch = watch
        self._role = role
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.RLock()
        self._requests: dict[int, tuple[str, int, int]] = {}
        self._write = os.write
        self._arming = ""
        self._kill: Kill | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(f"{watch.log}.points", flags, 0o600)
        pids = os.open(f"{watch.log}.pids", flags, 0o600)
        os.write(pids, f"{os.getpid()}\n".encode())
        os.close(pids)

    # ---- what is watched

    def patch(self) -> None:
        if self._watch.port:
            self._patch_send()
        else:
            for name in ("link", "unlink", "remove", "mkdir", "rmdir", "rename", "replace", "truncate"):
                self._patch_path(name)
            for name in ("write", "pwrite", "writev", "fsync", "fdatasync", "ftruncate"):
                self._patch_fd(name)
            self._patch_open()

    def _patch_path(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **words: Any) -> Any:
            place = args[1] if name in ("link", "rename", "replace") else args[0]
            self._pass(name, self._below(place), 0, lambda n: None)
            return real(*args, **words)

        setattr(os, name, call)

    def _patch_open(self) -> None:
        real = os.open

        def call(path: Any, flags: int, *args: Any, **words: Any) -> int:
            if flags & os.O_CREAT:
                self._pass("open", self._below(path), 0, lambda n: None)
            return real(path, flags, *args, **words)

        os.open = call

    def _patch_fd(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            place = self._below_fd(fd)
            if place is not None:
                data = args[0] if name in ("write", "pwrite") else b""
                nbytes = memoryview(data).nbytes

                def some(n: int) -> None:
                    real(fd, memoryview(data).cast("B")[:n], *args[1:])

                self._pass(name, place, nbytes, some)
            return real(fd, *args)

        setattr(os, name, call)

    def _patch_send(self) -> None:
        real = socket.socket.send

        def send(sock: socket.socket, data: Any, flags: int = 0) -> int:
            if self._is_server(sock):
                view = memoryview(data).cast("B")
                self._send(sock.fileno(), view, lambda n: _send_all(real, sock, view[:n]))
            return real(sock, data, flags)

        socket.socket.send = send  # type: ignore[method-assign]

    def _send(self, fd: int, data: memoryview, some: Callable[[int], None]) -> None:
        """A piece of a request; its first bytes name it."""
        if not self._armed():
            return
        if m := re.match(rb"(GET|PUT|POST|DELETE|HEAD) ([^ ]+) HTTP", bytes(data[:2048])):
            name = f"{m.group(1).decode()} {self._name(m.group(2).decode())}"
            with self._lock:
                self._requests[fd] = (name, self._count("send", name), 0)
        if fd in self._requests:
            name, nth, sent = self._requests[fd]
            self._requests[fd] = (name, nth, sent + len(data))
            self._come(Point(self._role, "send", name, nth, len(data)), some, sent)

    # ---- names

    def _below(self, path: Any) -> str | None:
        """The path below the folder, without nonces; None outside of it."""
        text = os.fspath(path)
        text = os.fsdecode(text) if isinstance(text, bytes) else text
        folder = self._watch.folder
        if text != folder and not text.startswith(folder + "/"):
            return None
        return _NONCES.sub("*", text[len(folder) :])

    def _below_fd(self, fd: int) -> str | None:
        try:
            return self._below(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            return None

    def _is_server(self, sock: socket.socket) -> bool:
        try:
            return sock.getpeername()[1] == self._watch.port
        except (OSError, IndexError):
            return False

    def _name(self, path: str) -> str:
        """Of a request: its path below the bucket and prefix, without nonces."""
        path = path.replace(f"/{self._watch.folder}", "")
        path = path.replace(quote(self._watch.folder.partition("/")[2], ""), "")
        return _NONCES.sub("*", re.sub(r"uploadId=[^&]*", "uploadId=*", path))

    # ---- points

    def _armed(self) -> bool:
        """Looks whether it is, and what for; every arming counts anew."""
        try:
            text = Path(f"{self._watch.log}.armed").read_text()
        except FileNotFoundError:
            return False
        with self._lock:
            if text != self._arming:
                words = json.loads(text.partition(" ")[2])
                self._arming, self._kill = text, Kill(**words) if words else None
                self._counts.clear()
        return True

    def _count(self, what: str, name: str) -> int:
        self._counts[what, name] += 1
        return self._counts[what, name]

    def _pass(self, what: str, name: str | None, nbytes: int, some: Callable[[int], None]) -> None:
        """A system call that is about to be made; None: it is none of ours."""
        if name is not None and self._armed():
            with self._lock:
                point = Point(self._role, what, name, self._count(what, name), nbytes)
            self._come(point, some, 0)

    def _come(self, point: Point, some: Callable[[int], None], sent: int) -> None:
        """Note it, and die there if it is the one: `sent` bytes of it are out already, `some(n)` sends n more."""
        self._write(self._log, json.dumps(asdict(point)).encode() + b"\n")
        kill = self._kill
        if kill is None or (kill.role, kill.what, kill.name, kill.nth) != point_id(point):
            return
        if sent <= kill.after_nbytes <= sent + point.nbytes:
            if kill.after_nbytes > sent:
                some(kill.after_nbytes - sent)
            os.close(os.open(f"{self._watch.log}.fired", os.O_WRONLY | os.O_CREAT, 0o600))
            if kill.errno:
                raise OSError(kill.errno, os.strerror(kill.errno))
            self._die(alone=kill.alone)

    def _die(self, *, alone: bool) -> None:
        pids = [int(line) for line in Path(f"{self._watch.log}.pids").read_text().split()]
        others = [] if alone else [pid for pid in pids if pid != os.getpid()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in others:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        os.kill(os.getpid(), signal.SIGKILL)


def _send_all(real: Callable[..., int], sock: socket.socket, data: memoryview) -> None:
    """The connection does not block: what does not fit into its buffer has not left."""
    while data:
        try:
            data = data[real(sock, data) :]
        except BlockingIOError:
            return

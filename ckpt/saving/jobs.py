"""What a rank and its uploader say to each other: JSON lines over a socket pair, files beside them. Torch-free."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from select import POLLHUP, POLLIN, poll
from typing import Any, Generic, TypeVar

import msgspec

from surefoot.ckpt.format.image import ImageStructure
from surefoot.ckpt.keeping.retention import Retention

READ_NBYTES = 2**18
FDS_MAX = 4


class BufferMsg(msgspec.Struct, frozen=True, tag="buffer"):
    """From now on data lies in this memory; its descriptor comes with the line."""

    nbytes: int


class LayoutMsg(msgspec.Struct, frozen=True, tag="layout"):
    """From now on data is laid out like this."""

    structure: ImageStructure


class UploadMsg(msgspec.Struct, frozen=True, kw_only=True, tag="upload"):
    """Store what the buffer holds. `replicas`: hashes that were taken already; None: take them. `conditional` False: this store
    creates only without conditions; so it is from now on."""

    generation: int
    conditional: bool = True
    step: int
    attempt: str
    rank: int
    world_size: int
    deadline_s: float
    values: dict[str, Any]
    cursor: dict[str, Any] | None
    extra: dict[str, Any] | None
    replicas: dict[str, str] | None
    failpoints: str = ""


class CommitMsg(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """Commit the attempt: all parts are stored. Then apply retention, and sweep if `sweep`."""

    generation: int
    step: int
    attempt: str
    writers: int
    deadline_s: float
    facts: dict[str, Any]
    retention: Retention | None
    sweep: bool


class AbandonMsg(msgspec.Struct, frozen=True, tag="abandon"):
    """Stop uploading for this attempt. Answered like the upload."""

    attempt: str


class ByeMsg(msgspec.Struct, frozen=True, tag="bye"):
    """Finish what was begun, and end."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """An error that crosses a process border: the name of its class, for replicas that differ the evidence, and what caused it."""

    kind: str
    message: str
    detail: dict[str, Any] = {}
    cause: Trouble | None = None


class ReadyMsg(msgspec.Struct, frozen=True, tag="ready"):
    """The uploader runs, and has its libraries loaded."""

    pid: int


class UploadedMsg(msgspec.Struct, frozen=True, kw_only=True, tag="uploaded"):
    """The upload has ended; `trouble` None: the part record is stored."""

    attempt: str
    trouble: Trouble | None = None


class CommittedMsg(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """The commit has ended: done, fenced, or in trouble."""

    attempt: str
    fenced_by: int = 0
    trouble: Trouble | None = None


class TidiedMsg(msgspec.Struct, frozen=True, tag="tidied"):
    """What retention lets go after that commit is gone."""

    attempt: str


ToUploader = BufferMsg | LayoutMsg | UploadMsg | CommitMsg | AbandonMsg | ByeMsg
ToRank = ReadyMsg | UploadedMsg | CommittedMsg | TidiedMsg

_M = TypeVar("_M")


class Line(Generic[_M]):
    """One end of the socket pair. `read` belongs to one thread at a time, `send` to any."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._sock = sock
        self._decoder = msgspec.json.Decoder(kind)
        self._rest = bytearray()
        self._scanned = 0
        self.fds: deque[int] = deque()
        """Descriptors that came, in order; the reader of the message that they belong to takes them."""
        self._sending = threading.Lock()
        self._poll = poll()
        self._poll.register(sock, POLLIN | POLLHUP)

    def read(self, timeout_s: float | None = None) -> _M | None:
        """The next message; None where none came in time. Raises EOFError where the other end is closed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._rest.find(b"\n", self._scanned)) < 0:
            self._scanned = len(self._rest)
            left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not self._poll.poll(left_ms):
                return None
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, READ_NBYTES, FDS_MAX)
            except ConnectionError:
                data, fds = b"", []
            if not data:
                raise EOFError
            self.fds.extend(fds)
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._scanned = 0
        return self._decoder.decode(line)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Raises ConnectionError where the other end is closed."""
        data = memoryview(msgspec.json.encode(message) + b"\n")
        with self._sending:
            sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
            self._sock.sendall(data[sent:])

    def close(self) -> None:
        self._sock.close()

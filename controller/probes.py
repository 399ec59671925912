"""Asking agents directly: one connection each, all at once, each answered within the deadline.

One thread and a selector, however many agents: a job of two thousand nodes is asked as fast as one of two. Outcomes are told
one by one as they come in. What counts as which outcome stands in core/events.py.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable

import msgspec

from surefoot.controller import wire
from surefoot.controller.core.decisions import ProbeTarget
from surefoot.controller.core.events import (
    ProbeAnswered,
    ProbeBroken,
    ProbeOutcome,
    ProbeRefused,
    ProbeTimedOut,
)

ANSWER_BYTES_MAX = 4 << 20
"""A status of some hundred ranks is 100 kB; more than this is no agent of ours."""

OPEN_MAX = 256
"""Connections open at once: below the usual limit of 1,024 file descriptors."""


class _Call:
    """One agent being asked."""

    def __init__(self, target: ProbeTarget, request: bytes) -> None:
        self.target = target
        self.unsent = request
        self.received = bytearray()
        self.sock = socket.socket(
            socket.AF_INET6 if ":" in target.host else socket.AF_INET, socket.SOCK_STREAM
        )
        self.sock.setblocking(False)
        self.connected = False

    def connect(self) -> int:
        return self.sock.connect_ex((self.target.host, self.target.port))

    def write(self) -> None:
        """The connection stands, or failed. Raises OSError."""
        if not self.connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.connected = True
        self.unsent = self.unsent[self.sock.send(self.unsent) :]

    def read(self) -> bytes | None:
        """A whole line, or None yet. Raises OSError, ValueError."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed before it answered")
        self.received += data
        if len(self.received) > ANSWER_BYTES_MAX:
            raise ValueError("the answer is too long")
        line, newline, _ = self.received.partition(b"\n")
        return bytes(line) if newline else None


def probe_all(
    targets: Iterable[ProbeTarget],
    *,
    op: int,
    job: str,
    token: str,
    deadline_s: float,
    tell: Callable[[ProbeOutcome], None],
) -> None:
    """Ask all targets; `tell` is called exactly once for each, from this thread. Blocks up to `deadline_s` a batch."""
    request = wire.encode(wire.ProbeMsg(token=token, job=job)) + b"\n"
    waiting = list(targets)
    while waiting:
        batch, waiting = waiting[:OPEN_MAX], waiting[OPEN_MAX:]
        _Round(op, request, deadline_s, tell).run(batch)


class _Round:
    def __init__(
        self, op: int, request: bytes, deadline_s: float, tell: Callable[[ProbeOutcome], None]
    ) -> None:
        self.op, self.request, self.deadline_s, self.tell = op, request, deadline_s, tell
        self.selector = selectors.DefaultSelector()
        self.open: set[_Call] = set()

    def run(self, targets: Iterable[ProbeTarget]) -> None:
        until = time.monotonic() + self.deadline_s
        try:
            for target in targets:
                self._start(target)
            while self.open and (left := until - time.monotonic()) > 0:
                for key, events in self.selector.select(left):
                    self._go_on(key.data, events)
            for call in list(self.open):
                self._end(call, ProbeTimedOut(op=self.op, uid=call.target.uid))
        finally:
            self.selector.close()

    def _start(self, target: ProbeTarget) -> None:
        call = _Call(target, self.request)
        self.open.add(call)
        try:
            code = call.connect()
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            self.selector.register(call.sock, selectors.EVENT_WRITE, call)
        except OSError as e:  # also a host name that cannot be looked up
            self._failed(call, e)

    def _go_on(self, call: _Call, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                call.write()
                if not call.unsent:
                    self.selector.modify(call.sock, selectors.EVENT_READ, call)
            elif (line := call.read()) is not None:
                self._end(call, self._outcome(call, line))
        except (OSError, ValueError) as e:
            self._failed(call, e)

    def _outcome(self, call: _Call, line: bytes) -> ProbeOutcome:
        uid = call.target.uid
        try:
            answer = msgspec.json.decode(line, type=wire.ControlMessage)
        except (msgspec.ValidationError, msgspec.DecodeError) as e:
            return ProbeBroken(op=self.op, uid=uid, detail=f"its answer is none: {e}")
        match answer:
            case wire.ProbeReplyMsg(status=status) if status.uid == uid:
                return ProbeAnswered(op=self.op, uid=uid, status=status)
            case wire.ProbeReplyMsg(status=status):
                # The port went to another agent of the job: the one that had it is gone.
                return ProbeRefused(op=self.op, uid=uid, detail=f"{status.uid} answers there now")
            case wire.RefusedMsg(reason=reason):
                return ProbeBroken(op=self.op, uid=uid, detail=f"it refused: {reason}")
            case _:
                return ProbeBroken(op=self.op, uid=uid, detail="its answer is a question")

    def _failed(self, call: _Call, error: Exception) -> None:
        uid, detail = call.target.uid, str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED and not call.connected:
            self._end(call, ProbeRefused(op=self.op, uid=uid, detail=detail))
        else:
            self._end(call, ProbeBroken(op=self.op, uid=uid, detail=detail))

    def _end(self, call: _Call, outcome: ProbeOutcome) -> None:
        self.open.discard(call)
        try:
            self.selector.unregister(call.sock)
        except KeyError:
            pass  # it never got that far
        call.sock.close()
        self.tell(outcome)

"""The rank's end of the socket to its agent.

One line of JSON per message (`controller.wire`). The training thread sends; a receiver thread, started in the rank after
the fork, folds what the agent says into an `AgentNews` and wakes whoever waits. The training thread never reads the
socket, so it never blocks on the agent but in `wait`, which has a deadline.

When the connection ends the rank must not live on: nobody would end it, and its snapshots would go nowhere. `on_lost` is
called at once, from whichever thread noticed, and is expected not to return (`session` ends the process).
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from surefoot.agent.failures import AgentTimeoutError, StartupError
from surefoot.controller.wire import (
    AgentToRank,
    CommittedMsg,
    HelloMsg,
    PoolReadyMsg,
    RankToAgent,
    ReplicatedMsg,
    StartMsg,
    StopMsg,
    encode,
)

LINE_BYTES_MAX = 16 * 2**20
"""A StartMsg holds a whole plan: about 150 bytes a member, so this is room for 100,000 nodes."""

SEND_TIMEOUT_S = 60
"""An agent that reads nothing for so long while its socket buffer is full is no agent."""

T = TypeVar("T")

_MESSAGE: msgspec.json.Decoder[AgentToRank] = msgspec.json.Decoder(AgentToRank)


@dataclass(slots=True)
class AgentNews:
    """What the agent has said so far. Pure; guarded by the link's lock."""

    generation: int
    replicated: int = -1
    """The newest step of which this rank's snapshot is safe; -1: none yet."""
    committed: int = 0
    """The newest step known to be committed, by any generation of the lineage."""
    answers: dict[int, CommittedMsg] = field(default_factory=dict)
    """Step of this generation to the outcome of its last attempt, until it is taken."""
    pool: PoolReadyMsg | None = None
    """The answer to the last PoolMsg, until it is taken."""
    stop: StopMsg | None = None

    def apply(self, message: AgentToRank) -> None:
        """Fold one message in; a second StartMsg breaks the protocol."""
        match message:
            case ReplicatedMsg():
                self.replicated = max(self.replicated, message.step)
            case CommittedMsg():
                if not message.failure:
                    self.committed = max(self.committed, message.step)
                if message.generation == self.generation:
                    self.answers[message.step] = message
            case PoolReadyMsg():
                self.pool = message
            case StopMsg():
                self.stop = message
            case StartMsg():
                raise StartupError("the agent sent a second StartMsg on one connection")


class AgentLink:
    """See the module. Made by `connect`; `start` begins to receive."""

    def __init__(
        self, sock: socket.socket, start: StartMsg, rest: bytes, on_lost: Callable[[str], None]
    ) -> None:
        self.start_msg = start
        self._sock = sock
        self._rest = rest
        self._on_lost = on_lost
        self._closing = False
        self._news = AgentNews(generation=start.plan.generation)
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()

    @classmethod
    def connect(
        cls, path: Path, hello: HelloMsg, *, deadline_s: float, on_lost: Callable[[str], None]
    ) -> AgentLink:
        """Connect, say hello, and wait for the StartMsg.

        Raises:
            StartupError: nobody listens, the agent hung up (a wrong token, or a generation it does not run), or said
                something else.
            AgentTimeoutError: it said nothing within `deadline_s`.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(deadline_s)
        try:
            sock.connect(str(path))
            sock.sendall(encode(hello) + b"\n")
            line, rest = _first_line(sock, time.monotonic() + deadline_s)
            start = _MESSAGE.decode(line)
        except TimeoutError:
            sock.close()
            raise AgentTimeoutError(f"the agent at {path} did not answer within {deadline_s:g} s") from None
        except (OSError, EOFError) as e:
            sock.close()
            raise StartupError(f"no start from the agent at {path}: {e or type(e).__name__}") from e
        except msgspec.MsgspecError as e:
            sock.close()
            raise StartupError(f"the agent at {path} speaks another protocol: {e}") from e
        if not isinstance(start, StartMsg):
            sock.close()
            raise StartupError(f"the agent at {path} answered hello with {type(start).__name__}")
        sock.settimeout(None)
        # The receiver blocks without limit in recv, so the limit for sends is the kernel's (struct timeval).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        return cls(sock, start, rest, on_lost)

    def start(self) -> None:
        """Begin to receive, in a daemon thread."""
        threading.Thread(target=self._receive, name="agent-link", daemon=True).start()

    def send(self, message: RankToAgent) -> None:
        """Hand one message over. Blocks only while the socket's buffer is full.

        Raises:
            AgentTimeoutError: the agent read nothing for `SEND_TIMEOUT_S`.
        """
        try:
            with self._send_lock:
                self._sock.sendall(encode(message) + b"\n")
        except BlockingIOError:
            raise AgentTimeoutError(f"the agent has not read its socket for {SEND_TIMEOUT_S} s") from None
        except OSError as e:
            self._lost(f"sending {type(message).__name__}: {e}")

    def peek(self, look: Callable[[AgentNews], T]) -> T:
        """Read, or take from, the news under the lock; never waits."""
        with self._changed:
            return look(self._news)

    def wait(self, look: Callable[[AgentNews], T | None], *, deadline_s: float, what: str) -> T:
        """Wait until `look` returns something other than None, and return that.

        Args:
            look: called under the lock at once and after each message; may take what it finds.
            what: what is waited for, for the error.

        Raises:
            AgentTimeoutError: nothing within `deadline_s` seconds.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            while (found := look(self._news)) is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise AgentTimeoutError(f"the agent did not report {what} within {deadline_s:g} s")
                self._changed.wait(left)
            return found

    def close(self) -> None:
        """Hang up: the end of the connection is no loss from here on."""
        self._closing = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the agent hung up first
        self._sock.close()

    def closing(self) -> None:
        """The last message was sent: the agent may hang up whenever it likes."""
        self._closing = True

    def _receive(self) -> None:
        try:
            while (cut := self._rest.find(b"\n")) < 0:
                self._read()
            while True:
                line, self._rest = self._rest[:cut], self._rest[cut + 1 :]
                message = _MESSAGE.decode(line)
                with self._changed:
                    self._news.apply(message)
                    self._changed.notify_all()
                while (cut := self._rest.find(b"\n")) < 0:
                    self._read()
        except (OSError, EOFError) as e:
            self._lost(str(e))
        except (msgspec.MsgspecError, StartupError) as e:
            self._lost(f"it broke the protocol: {e}")

    def _read(self) -> None:
        self._rest += _some(self._sock)
        if len(self._rest) > LINE_BYTES_MAX:
            raise EOFError(f"a line of more than {LINE_BYTES_MAX} bytes")

    def _lost(self, reason: str) -> None:
        if not self._closing:
            self._on_lost(reason)


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(2**16)
    if not data:
        raise EOFError("it hung up")
    return data


def _first_line(sock: socket.socket, end: float) -> tuple[bytes, bytes]:
    """The first line and what came after it; `end` on the monotonic clock."""
    data = b""
    while b"\n" not in data:
        if len(data) > LINE_BYTES_MAX:
            raise EOFError(f"a line of more than {LINE_BYTES_MAX} bytes")
        sock.settimeout(max(end - time.monotonic(), 1e-3))
        data += _some(sock)
    line, _, rest = data.partition(b"\n")
    return line, rest

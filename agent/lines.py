"""JSON lines over a socket, the blocking end: what a zygote, a snapshot server or a TCPStore host holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from surefoot.controller import wire

LINE_BYTES_MAX = 4 << 20
"""A plan of ten thousand nodes is about a megabyte; what is longer is no message of ours."""

M = TypeVar("M")


class LineTooLongError(ValueError):
    """The peer sent more than `LINE_BYTES_MAX` without a newline."""


class BlockingLines(Generic[M]):
    """One connected stream socket. `read` belongs to one thread, `send` to any."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], M]) -> None:
        self._sock = sock
        self._decode = decode
        self._rest = bytearray()
        self._sending = threading.Lock()

    def read(self) -> M | None:
        """The next message; None when the peer has closed its end or died.

        Raises:
            msgspec.DecodeError: it is no message of the expected kind; LineTooLongError.
        """
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > LINE_BYTES_MAX:
                raise LineTooLongError(f"a line of more than {LINE_BYTES_MAX} bytes")
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return self._decode(line)

    def send(self, message: msgspec.Struct) -> None:
        """Raises: ConnectionError, if the peer is gone."""
        with self._sending:
            self._sock.sendall(wire.encode(message) + b"\n")

    def close(self) -> None:
        self._sock.close()

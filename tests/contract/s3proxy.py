"""A proxy in front of the real S3 server: it counts what passes, and fails on cue. Fixture ``s3_proxy`` (tests/conftest.py).

    def test_x(s3_proxy):                                   # AWS_ENDPOINT_URL of this process and its children leads to it
        store = open_store(s3_proxy.root)
        fault = s3_proxy.fault("UploadPart", status(503, "SlowDown"), part=2, times=3)
        ...
        assert fault.fired == 3                             # a fault that never fired proves nothing
        assert s3_proxy.count("CopyObject") == 0
        assert s3_proxy.nbytes_out("GetObject", key=".safetensors") < 1.1 * size

Operations are named as in the S3 API ("*": all of them): PutObject, GetObject, HeadObject, DeleteObject, CopyObject,
ListObjectsV2, CreateMultipartUpload, UploadPart, CompleteMultipartUpload, AbortMultipartUpload, ListParts, ListMultipartUploads.
`key` is a part of the key, in which `*` stands for anything; `part` is a part's number, `skip` how many matching requests pass first, `times` how many fail then
(None: all, until ``fault.stop()``). The first fault that matches acts.

What a fault does: `status` `error_in_200` `reset` `reset_answer` `stall` `delay` `drop` `damage` `garbage`, or any function of an
`Exchange`: it may look at ``exchange.request``, call ``exchange.forward()`` (the server does it, and its answer comes back as an
`Answer`), ``exchange.send(answer)``, ``exchange.reset()``. With ``done=True`` the server has done it before the fault: only the
answer is lost. One thread per connection, in the process of the test; the server's signature check passes, for nothing of a
request is changed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CHUNK_NBYTES = 256 * 2**10


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as it came, and what became of it."""

    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case."""
    operation: str
    key: str
    """Bucket and key, as ``bucket/key``."""
    part: int = 0
    nbytes_in: int = 0
    """Of its body, as far as it was read."""
    nbytes_out: int = 0
    """Of the answer's body, as far as it was sent."""
    status: int = 0
    """Of the answer; 0: there was none."""
    body: bytes = b""
    """While it is under way; dropped afterwards."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Fault:
    """See the module."""

    operation: str
    act: Callable[[Exchange], None]
    key: str
    part: int | None
    skip: int
    times: int | None
    fired: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when it has fired for the first time."""

    def stop(self) -> None:
        self.times = self.fired

    def takes(self, request: Request) -> bool:
        if self.operation not in ("*", request.operation) or not fnmatchcase(request.key, f"*{self.key}*"):
            return False
        if self.part not in (None, request.part) or (self.times is not None and self.fired >= self.times):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.fired += 1
        self.begun.set()
        return True


# ---------------------------------------------------------------- what faults do


def status(code: int, error: str = "", *, done: bool = False) -> Callable[[Exchange], None]:
    """Answer with an error."""

    def act(exchange: Exchange) -> None:
        if done:
            exchange.forward()
        exchange.send(Answer(code, {"Content-Type": "application/xml"}, _error(error or str(code))))

    return act


def error_in_200(error: str = "InternalError", *, done: bool = False) -> Callable[[Exchange], None]:
    """A 200 whose body is an error, as S3 may answer the completion of a multipart upload."""
    return status(200, error, done=done)


def reset(after_nbytes: int = 0, *, done: bool = False) -> Callable[[Exchange], None]:
    """Reset the connection when so much of the request's body has come; `done`: all of it, and the server has done it."""

    def act(exchange: Exchange) -> None:
        if done:
            exchange.forward()
        else:
            exchange.receive(after_nbytes)
        exchange.reset()

    return act


def reset_answer(after_nbytes: int) -> Callable[[Exchange], None]:
    """Reset the connection after the answer's head and so much of its body."""

    def act(exchange: Exchange) -> None:
        exchange.send(exchange.forward(), only_nbytes=after_nbytes)
        exchange.reset()

    return act


def stall(*, done: bool = False) -> Callable[[Exchange], None]:
    """Take the request and never answer, until the test ends or the client hangs up."""

    def act(exchange: Exchange) -> None:
        if done:
            exchange.forward()
        else:
            exchange.receive()
        exchange.wait_for_hangup()

    return act


def garbage() -> Callable[[Exchange], None]:
    """Under TLS: bytes that are no record in the midst of the answer."""

    def act(exchange: Exchange) -> None:
        exchange.receive()
        exchange.garble()

    return act


def delay(seconds: float) -> Callable[[Exchange], None]:
    """Forward only after so long; longer than one wants to wait."""

    def act(exchange: Exchange) -> None:
        exchange.receive()
        exchange.proxy.closing.wait(seconds)
        exchange.send(exchange.forward())

    return act


def drop() -> Callable[[Exchange], None]:
    """Throw the bytes away, and answer as if they were stored."""

    def act(exchange: Exchange) -> None:
        exchange.receive()
        headers = {"ETag": f'"{hashlib.md5(exchange.request.body).hexdigest()}"'}
        if crc := exchange.request.headers.get("x-amz-checksum-crc32"):
            headers["x-amz-checksum-crc32"] = crc
        exchange.send(Answer(200, headers, b""))

    return act


def damage(at: int = 0) -> Callable[[Exchange], None]:
    """One bit of the request's body is flipped on its way."""

    def act(exchange: Exchange) -> None:
        exchange.receive()
        body = bytearray(exchange.request.body)
        body[at] ^= 1
        exchange.request.body = bytes(body)
        exchange.send(exchange.forward())

    return act


def _error(code: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>by the proxy</Message></Error>'
    ).encode()


# ---------------------------------------------------------------- one request


class Exchange:
    """One request on its way through. Used by its connection's thread alone."""

    def __init__(self, proxy: S3Proxy, connection: Connection, request: Request) -> None:
        self.proxy = proxy
        self.request = request
        self._connection = connection
        self._length = int(request.headers.get("content-length", 0))
        self._continued = "100-continue" not in request.headers.get("expect", "").lower()

    def receive(self, nbytes: int | None = None) -> None:
        """Read the request's body, or so much of it."""
        if not self._continued and self._length:
            self._connection.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._continued = True
        missing = (self._length if nbytes is None else min(nbytes, self._length)) - self.request.nbytes_in
        if missing > 0:
            more = self._connection.read(missing)
            self.request.body += more
            self.request.nbytes_in += len(more)

    def forward(self) -> Answer:
        """Let the server do it."""
        self.receive()
        upstream = self._connection.upstream()
        upstream.putrequest(
            self.request.method, self.request.target, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.request.headers.items():
            if name not in ("expect", "connection"):
                upstream.putheader(name, value)
        upstream.endheaders(self.request.body or None)
        response = upstream.getresponse()
        dropped = ("transfer-encoding", "connection", "content-length")
        headers = {n: v for n, v in response.getheaders() if n.lower() not in dropped}
        body = response.read()
        if self.request.method == "HEAD":
            headers["Content-Length"] = response.getheader("Content-Length") or "0"
        return Answer(response.status, headers, body)

    def send(self, answer: Answer, only_nbytes: int | None = None) -> None:
        self.receive()  # a client that is still sending would see a reset instead of the answer
        self.request.status = answer.status
        lines = [f"HTTP/1.1 {answer.status} {http.client.responses.get(answer.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if not any(name.lower() == "content-length" for name in answer.headers):
            lines.append(f"Content-Length: {len(answer.body)}")
        self._connection.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        body = memoryview(answer.body)[:only_nbytes]
        for at in range(0, len(body), CHUNK_NBYTES):
            chunk = body[at : at + CHUNK_NBYTES]
            self._connection.socket.sendall(chunk)
            self.request.nbytes_out += len(chunk)

    def reset(self) -> None:
        self._connection.reset()

    def garble(self) -> None:
        os.write(self._connection.socket.fileno(), b"garbage" * 100)
        self.wait_for_hangup()

    def wait_for_hangup(self) -> None:
        self._connection.socket.recv(1)
        raise ConnectionAbortedError("the client hung up on a fault")


def read_request(head: bytes) -> Request:
    """What the head of a request asks for. PURE."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    return Request(
        method=method,
        target=target,
        headers=headers,
        operation=_operation(method, query, headers),
        key=unquote(url.path).lstrip("/"),
        part=int(query.get("partNumber", ["0"])[0]),
    )


def _operation(method: str, query: dict[str, list[str]], headers: dict[str, str]) -> str:
    upload = "uploadId" in query
    match method:
        case "PUT" if "x-amz-copy-source" in headers:
            return "UploadPartCopy" if upload else "CopyObject"
        case "PUT":
            return "UploadPart" if upload else "PutObject"
        case "POST" if "uploads" in query:
            return "CreateMultipartUpload"
        case "POST":
            return "CompleteMultipartUpload" if upload else "DeleteObjects"
        case "DELETE":
            return "AbortMultipartUpload" if upload else "DeleteObject"
        case "HEAD":
            return "HeadObject"
        case _ if upload:
            return "ListParts"
        case _ if "uploads" in query:
            return "ListMultipartUploads"
        case _:
            return "ListObjectsV2" if "list-type" in query else "GetObject"


# ---------------------------------------------------------------- connections


class Connection:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: str) -> None:
        self.socket = client
        self._server = server
        self._upstream: http.client.HTTPConnection | None = None
        self._read = bytearray()

    def upstream(self) -> http.client.HTTPConnection:
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self._server, timeout=60)
        return self._upstream

    def head(self) -> bytes | None:
        """The next request's head; None where the client has hung up."""
        while (end := self._read.find(b"\r\n\r\n")) < 0:
            if not (more := self.socket.recv(65536)):
                return None
            self._read += more
        head = bytes(self._read[:end])
        del self._read[: end + 4]
        return head

    def read(self, nbytes: int) -> bytes:
        while len(self._read) < nbytes:
            if not (more := self.socket.recv(max(65536, nbytes - len(self._read)))):
                raise ConnectionAbortedError("the client hung up in mid body")
            self._read += more
        taken = bytes(self._read[:nbytes])
        del self._read[:nbytes]
        return taken

    def reset(self) -> None:
        """RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        raise ConnectionAbortedError("reset by a fault")

    def close(self) -> None:
        self.socket.close()
        if self._upstream is not None:
            self._upstream.close()


class S3Proxy:
    """See the module."""

    def __init__(self, server: Any, root: str, certificate: Path | None = None) -> None:
        self.root = root
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        self.closing = threading.Event()
        self.requests: list[Request] = []
        """All that have come, in order; those under way included."""
        self._env = server.env
        self._server = server.endpoint.removeprefix("http://")
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: dict[threading.Thread, Connection] = {}
        self._acceptor = threading.Thread(target=self._accept, name="s3proxy")
        self._acceptor.start()

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    def env(self) -> dict[str, str]:
        """The AWS variables that lead here."""
        return self._env() | {"AWS_ENDPOINT_URL": self.endpoint}

    def fault(
        self,
        operation: str,
        act: Callable[[Exchange], None],
        *,
        key: str = "",
        part: int | None = None,
        skip: int = 0,
        times: int | None = 1,
    ) -> Fault:
        """From now on; see the module."""
        fault = Fault(operation=operation, act=act, key=key, part=part, skip=skip, times=times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def forget(self) -> None:
        """Faults and what was counted."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def of(self, operation: str = "*", *, key: str = "") -> list[Request]:
        with self._lock:
            return [r for r in self.requests if operation in ("*", r.operation) and key in r.key]

    def count(self, operation: str = "*", *, key: str = "") -> int:
        """Requests so far."""
        return len(self.of(operation, key=key))

    def nbytes_in(self, operation: str = "*", *, key: str = "") -> int:
        """Bytes of the bodies sent to the server."""
        return sum(r.nbytes_in for r in self.of(operation, key=key))

    def nbytes_out(self, operation: str = "*", *, key: str = "") -> int:
        """Bytes of the bodies that came from it."""
        return sum(r.nbytes_out for r in self.of(operation, key=key))

    def close(self) -> None:
        self.closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            left = dict(self._open)
        for thread, connection in left.items():
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(client, self._server)
            thread = threading.Thread(target=self._serve, args=(connection,), name="s3proxy-connection")
            with self._lock:
                self._open[thread] = connection
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            if self._tls is not None:
                connection.socket = self._tls.wrap_socket(connection.socket, server_side=True)
            while (head := connection.head()) is not None:
                self._pass(connection, read_request(head))
        except (OSError, http.client.HTTPException):
            pass  # a client or a fault ended the connection
        finally:
            connection.close()
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def _pass(self, connection: Connection, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
            fault = next((f for f in self._faults if f.takes(request)), None)
        exchange = Exchange(self, connection, request)
        try:
            if fault is None:
                exchange.send(exchange.forward())
            else:
                fault.act(exchange)
        finally:
            request.body = b""


@contextmanager
def run_proxy(server: Any, root: str, certificate: Path | None = None) -> Iterator[S3Proxy]:
    """A proxy in front of `server` (an `S3Server`), for the length of the block. `root` is only kept, for tests.

    Args:
        certificate: a PEM file with certificate and key: the proxy speaks TLS (the server behind it does not).
    """
    proxy = S3Proxy(server, root, certificate)
    try:
        yield proxy
    finally:
        proxy.close()

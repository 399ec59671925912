"""What a user of S3 gets wrong, and what a network does: a typed error that says what to do, and no call without an end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from surefoot.ckpt.objects.s3 import SINGLE_PUT_NBYTES, S3ObjectStore
from surefoot.ckpt.objects.s3errors import Call
from surefoot.ckpt.objects.s3session import Patience
from surefoot.ckpt.store import (
    ObjectExistsError,
    ObjectStore,
    ObjectStoreDeniedError,
    ObjectStoreUnavailableError,
    ObjectUnknownError,
    open_store,
)

pytestmark = pytest.mark.slow

CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "create": lambda s: s.create("k", b"data"),
    "read": lambda s: s.read("k"),
    "list": lambda s: s.list(""),
    "delete": lambda s: s.delete("k"),
}


@pytest.mark.s3
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", [{"key": "nobody"}, {"secret": "not-the-secret"}])
def test_wrong_keys(
    s3_server: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], call: str
) -> None:
    for name, value in s3_server.env(**wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreDeniedError, match="AWS_SECRET_ACCESS_KEY"):
        CALLS[call](open_store(s3_url))


@pytest.mark.s3
def test_no_keys(s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ObjectStoreDeniedError, match="AWS_ACCESS_KEY_ID"):
        open_store(s3_url).list("")


@pytest.mark.s3
@pytest.mark.parametrize("call", ["read", "list"])
def test_a_bucket_that_is_not_there(s3_url: str, call: str) -> None:
    with pytest.raises(ObjectStoreDeniedError, match="create the bucket 'no-such-bucket'"):
        CALLS[call](open_store("s3://no-such-bucket/x"))


@pytest.mark.s3
def test_large_objects_are_created_conditionally_as_well(s3_url: str) -> None:
    """Beyond SINGLE_PUT_NBYTES they go up in parts; the completion is what is conditional."""
    store = open_store(s3_url)
    data = bytes(range(256)) * (SINGLE_PUT_NBYTES // 256 + 1000)
    store.create("large", data)
    with pytest.raises(ObjectExistsError):
        store.create("large", bytes(len(data)))
    assert store.read("large", len(data) - 1000) == data[-1000:]
    assert store.list("")[0].size == len(data)


# ---------------------------------------------------------------- nobody, or nobody who answers


def lead_to(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.parametrize("call", ["create", "list"])
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        lead_to(
            monkeypatch, s.getsockname()[1]
        )  # bound and not listening: refused, and nobody else can take it
        # With that deadline nobody but `UNREACHABLE_S` ends it within a test's life.
        with pytest.raises(ObjectStoreUnavailableError, match="AWS_ENDPOINT_URL"):
            CALLS[call](open_store("s3://b/x", deadline_s=1e6))


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server that does this with each connection, and keeps it open; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            try:
                behave(connection)
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


def hang(connection: socket.socket) -> None:
    """Say nothing, for ever."""


def break_off(connection: socket.socket) -> None:
    """Take the request and hang up."""
    connection.recv(65536)
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def busy(connection: socket.socket) -> None:
    connection.recv(65536)
    body = b"<Error><Code>SlowDown</Code><Message>m</Message></Error>"
    head = f"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + body)
    connection.close()


@pytest.mark.parametrize(
    ("behave", "call", "error"),
    [
        (hang, "create", ObjectUnknownError),
        (hang, "list", ObjectStoreUnavailableError),
        (break_off, "create", ObjectUnknownError),
        (break_off, "read", ObjectStoreUnavailableError),
        (busy, "create", ObjectStoreUnavailableError),
        (busy, "list", ObjectStoreUnavailableError),
    ],
)
def test_the_deadline_holds(
    monkeypatch: pytest.MonkeyPatch,
    behave: Callable[[socket.socket], None],
    call: str,
    error: type[Exception],
) -> None:
    """A creation of which no answer came is unknown; what was turned away was not done. That the call returns at all shows that it has
    an end; and no try may take longer than what was left when it was made, however late a busy machine makes it."""
    tries: list[tuple[float, float]] = []
    of_one = Patience.try_now_s

    def watched(patience: Patience) -> float:
        left_s = patience.left_s()
        tries.append((of_one(patience), left_s))
        return tries[-1][0]

    with server(behave) as port:
        lead_to(monkeypatch, port)
        store = open_store("s3://b/x", deadline_s=3.0)
        assert isinstance(store, S3ObjectStore)
        opening = Patience(deadline=time.monotonic() + 60, try_s=60)
        store._session.open(Call(root="s3://b/x", what="open", key=""), opening)  # not on the call's time
        monkeypatch.setattr(Patience, "try_now_s", watched)
        with pytest.raises(error, match=r"k|list"):
            CALLS[call](store)
    assert tries
    # A read has a little more, by the size that it asks for.
    assert all(0 < try_s <= left_s <= 4.0 for try_s, left_s in tries), tries

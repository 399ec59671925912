"""The parts of EtcdStore that need no etcd: what a failure means, and what an endpoint is."""

import os
import subprocess
import sys

import pytest

from surefoot.controller import etcdstore, store
from surefoot.controller.etcdstore import classify, target


@pytest.mark.parametrize(
    ("code", "details", "write", "read"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", store.CoordUnknownError, store.CoordUnavailableError),
        # Sent, and not answered: nobody knows.
        (
            "UNAVAILABLE",
            "Stream removed (Socket closed)",
            store.CoordUnknownError,
            store.CoordUnavailableError,
        ),
        (
            "UNAVAILABLE",
            "recvmsg:Connection reset by peer",
            store.CoordUnknownError,
            store.CoordUnavailableError,
        ),
        (
            "UNAVAILABLE",
            "etcdserver: request timed out",
            store.CoordUnknownError,
            store.CoordUnavailableError,
        ),
        (
            "UNAVAILABLE",
            "etcdserver: request timed out, possibly due to previous leader failure",
            store.CoordUnknownError,
            store.CoordUnavailableError,
        ),
        ("UNAVAILABLE", "etcdserver: server stopped", store.CoordUnknownError, store.CoordUnavailableError),
        ("UNKNOWN", "Stream removed", store.CoordUnknownError, store.CoordUnavailableError),
        ("CANCELLED", "Channel closed!", store.CoordUnknownError, store.CoordUnavailableError),
        ("INTERNAL", "?", store.CoordUnknownError, store.CoordUnavailableError),
        # Never sent, or refused before anything was done.
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
            store.CoordUnavailableError,
            store.CoordUnavailableError,
        ),
        ("UNAVAILABLE", "etcdserver: no leader", store.CoordUnavailableError, store.CoordUnavailableError),
        (
            "RESOURCE_EXHAUSTED",
            "etcdserver: too many requests",
            store.CoordUnavailableError,
            store.CoordUnavailableError,
        ),
        (
            "RESOURCE_EXHAUSTED",
            "etcdserver: mvcc: database space exceeded",
            store.CoordFullError,
            store.CoordFullError,
        ),
        ("NOT_FOUND", "etcdserver: requested lease not found", store.LeaseLostError, store.LeaseLostError),
        (
            "OUT_OF_RANGE",
            "etcdserver: mvcc: required revision has been compacted",
            store.CompactedError,
            store.CompactedError,
        ),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", store.CoordError, store.CoordError),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", store.CoordDeniedError, store.CoordDeniedError),
        (
            "PERMISSION_DENIED",
            "etcdserver: permission denied",
            store.CoordDeniedError,
            store.CoordDeniedError,
        ),
        (
            "INVALID_ARGUMENT",
            "etcdserver: user name is empty",
            store.CoordDeniedError,
            store.CoordDeniedError,
        ),
    ],
)
def test_what_a_failure_means(code: str, details: str, write: type[Exception], read: type[Exception]):
    assert classify(code, details, writes=True) is write
    assert classify(code, details, writes=False) is read


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ("127.0.0.1:2379", "ipv4:127.0.0.1:2379"),
        ("http://127.0.0.1:2379", "ipv4:127.0.0.1:2379"),
        ("10.0.0.1:1, 10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:2379", "ipv6:[::1]:2379"),
        ("etcd.example:2379", "dns:///etcd.example:2379"),
    ],
)
def test_endpoints(endpoints: str | list[str], expected: str):
    assert target(endpoints) == expected


@pytest.mark.parametrize("endpoints", ["", "localhost", "host:", ":2379", "host:99999", "a:1,,b:2", []])
def test_what_is_no_endpoint_is_said(endpoints: str | list[str]):
    with pytest.raises(store.CoordError, match="HOST:PORT"):
        target(endpoints)


@pytest.mark.parametrize(
    ("prefix", "start", "end"),
    [
        ("/a/", b"/a/", b"/a0"),
        ("", b"\x00", b"\x00"),
        ("\U0010ffff", b"\xf4\x8f\xbf\xbf", b"\xf4\x8f\xbf\xc0"),
    ],
)
def test_the_range_of_a_prefix(prefix: str, start: bytes, end: bytes):
    assert etcdstore._range_of(prefix) == (start, end)


@pytest.mark.slow
def test_loading_it_changes_no_variable_that_a_child_would_inherit():
    code = """
import os, sys
before = dict(os.environ)
from surefoot.controller import store, etcdstore
assert "grpc" not in sys.modules and "etcd3" not in sys.modules, "loaded before it is needed"
etcdstore._load()
assert "grpc" in sys.modules
changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
print(sorted(name for name in changed if name.startswith(("GRPC_V", "GRPC_E", "PROTO"))))
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRPC", "PROTO"))
    }
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
